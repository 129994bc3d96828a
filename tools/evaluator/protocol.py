"""The messages between the judge and its workers: one JSON object a line, over a socket pair of their own.

A request is {"id": n, "cmd": name, ...}; its reply {"id": n, "ok": true, ...} or {"id": n, "ok": false, "error": text}.
Standard output and error of a worker are not part of it, so whatever a candidate prints cannot be read as a reply. File
descriptors (the memory of CPU chunks) travel beside a request, so that a worker holds what it was given and nothing else.

A tensor travels as a reference into shared memory: {"chunk": id, "offset": bytes, "dtype": "bf16" | "f32" | "i32",
"shape": [...], "stride": [...]} (strides in elements).
"""

from __future__ import annotations

import json
import os
import select
import socket
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
    """One end of the socket pair, which the channel owns from here on. takes: whether it accepts descriptors."""

    def __init__(self, end: socket.socket, *, takes: bool = False) -> None:
        self._socket, self._takes = end, takes
        self._pending = b""
        self.descriptors: list[int] = []  # received and not yet taken

    def send(self, message: dict[str, Any], timeout_s: float | None = None, descriptors: tuple[int, ...] = ()) -> None:
        """Raises ChannelClosed, or ChannelTimeout where the other side does not read."""
        view = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if descriptors:
                view = view[socket.send_fds(self._socket, [view[:1]], list(descriptors)) :]
            while view:
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not select.select([], [self._socket], [], wait)[1]:
                    raise ChannelTimeout(f"a request was not read in {timeout_s:g} s")
                view = view[self._socket.send(view[: 1 << 16], socket.MSG_DONTWAIT) :]
        except BlockingIOError:  # select said otherwise: too little room for a whole part
            raise ChannelTimeout("a request was not read") from None
        except OSError as problem:  # EPIPE, or a descriptor that a dying worker took along
            raise ChannelClosed(str(problem)) from problem

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. Raises ChannelTimeout, ChannelClosed or ChannelGarbage."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if len(self._pending) > MAX_MESSAGE_BYTES:
                raise ChannelGarbage(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], wait)[0]:
                raise ChannelTimeout(f"no reply in {timeout_s:g} s")
            try:
                if self._takes:
                    part, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 4)
                    self.descriptors += descriptors
                else:  # the kernel drops what is sent along
                    part = self._socket.recv(1 << 16)
            except OSError as problem:  # reset by a dying worker
                raise ChannelClosed(str(problem)) from problem
            if not part:
                raise ChannelClosed("the socket was closed")
            self._pending += part
        line, self._pending = self._pending.split(b"\n", 1)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise ChannelGarbage(f"not JSON: {line[:80]!r}") from problem
        if not isinstance(message, dict):
            raise ChannelGarbage(f"not an object: {line[:80]!r}")
        return message

    def early(self) -> bool:
        """Whether the other side has said something that nobody asked for."""
        if self._pending:
            return True
        if not select.select([self._socket], [], [], 0)[0]:
            return False
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))  # nothing: it hung up
        except OSError:
            return False

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())
        self._socket.close()
