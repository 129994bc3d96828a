"""One evaluation at a time on a GPU. Several may be started together: their builds overlap, what runs on the device does not.

turn = take("cuda", lambda: print("waits"))   # held until turn.close(), or until the process ends
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tools.core.errors import UserError


def take(device: str, waits: Callable[[], None], folder: Path | None = None) -> AbstractContextManager[object]:
    """The device's turn, an open file under an exclusive lock; nothing on the CPU, whose builds disturb as well.

    waits: called once if another evaluation has it. folder: where the lock lies, else that of temporary files.
    UserError where the lock is not a plain file of this user.
    """
    if device == "cpu":
        return nullcontext()
    import fcntl  # Linux, as all CUDA targets

    path = (folder or Path(tempfile.gettempdir())) / f"areal-tik-gpu-{os.getuid()}.lock"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        raise UserError(f"{path}: the GPU's lock cannot be opened: {problem.strerror}") from None
    found = os.fstat(opened)
    if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
        os.close(opened)
        raise UserError(f"{path}: the GPU's lock is not a plain file of this user")
    file = os.fdopen(opened, "wb", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waits()
        fcntl.flock(file, fcntl.LOCK_EX)
    return file
