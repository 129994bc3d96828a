"""The messages between the judge and its workers: one JSON object a line, over two dedicated pipes.

A request is {"id": n, "cmd": name, ...}; its reply {"id": n, "ok": true, ...} or {"id": n, "ok": false, "error": text}.
Standard output and error of a worker are not part of it, so whatever a candidate prints cannot be read as a reply.

A tensor travels as a reference into shared memory: {"chunk": id, "offset": bytes, "dtype": "bf16" | "f32" | "i32",
"shape": [...], "stride": [...]} (strides in elements).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from typing import Any

MAX_MESSAGE_BYTES = 16 << 20
ITEM_BYTES = {"bf16": 2, "f32": 4, "i32": 4, "u8": 1}


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelTimeout(Exception):
    """No whole message before the deadline."""


class ChannelGarbage(Exception):
    """Bytes that are no message, or the wrong message."""


class Channel:
    """One end of the pipe pair.

    read_fd, write_fd: file descriptors owned by the channel from here on.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._pending = b""

    def send(self, message: dict[str, Any], timeout_s: float | None = None) -> None:
        """Raises ChannelClosed, or ChannelTimeout where the other side does not read."""
        view = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while view:
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not select.select([], [self._write_fd], [], wait)[1]:
                    raise ChannelTimeout(f"a request was not read in {timeout_s:g} s")
                view = view[os.write(self._write_fd, view[: select.PIPE_BUF]) :]  # a writable pipe takes this many at once
        except OSError as problem:  # EPIPE, or a descriptor that a dying worker took along
            raise ChannelClosed(str(problem)) from problem

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. Raises ChannelTimeout, ChannelClosed or ChannelGarbage."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if len(self._pending) > MAX_MESSAGE_BYTES:
                raise ChannelGarbage(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read_fd], [], [], wait)[0]:
                raise ChannelTimeout(f"no reply in {timeout_s:g} s")
            part = os.read(self._read_fd, 1 << 16)
            if not part:
                raise ChannelClosed("the pipe was closed")
            self._pending += part
        line, self._pending = self._pending.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError as problem:
            raise ChannelGarbage(f"not JSON: {line[:80]!r}") from problem
        if not isinstance(message, dict):
            raise ChannelGarbage(f"not an object: {line[:80]!r}")
        return message

    def close(self) -> None:
        for fd in (self._read_fd, self._write_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
