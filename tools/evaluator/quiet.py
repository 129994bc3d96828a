"""The device between two turns: idle, and with nothing left in its cache that a kernel pinned there.

CUDA only. Every worker stands still when the judge writes a region of twice the L2 cache. That evicts what the last pass
left; lines that a kernel asked to keep (a persisting access window, evict_last hints) are set back to normal before. The
write takes a known time on an idle device: where it takes much longer, something still runs there.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from tools.evaluator.arena import Arena
from tools.evaluator.runner import Runner
from tools.evaluator.statistics import median

BUSY_RATIO, BUSY_MS = 3.0, 0.2


class Quiet:
    """Does nothing on the CPU, where a stopped worker takes no time and a pass streams more than the caches hold."""

    def settle(self) -> str | None:
        """Evict the cache; a sentence where the device was not idle."""
        return None

    def wait(self) -> None:
        """Return when the device has nothing left to do for anybody."""

    def ping_ms(self, worker: Runner) -> float:
        """What a request takes that does next to nothing, on the judge's clock."""
        start = time.perf_counter()
        worker.ping()
        self.wait()
        return 1000 * (time.perf_counter() - start)


class QuietCuda(Quiet):
    """scratch: twice the L2 cache, in the judge's own memory."""

    def __init__(self, l2_bytes: int) -> None:
        import torch

        self._torch = torch
        self._scratch: Any = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
        self._word: Any = torch.zeros(1, device="cuda")
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._usual_ms = median([self._write() for _ in range(9)])

    def _write(self) -> float:
        """Milliseconds on the judge's clock: events would not see how long the device served another process before."""
        self._torch.cuda.synchronize()
        start = time.perf_counter()
        self._scratch.fill_(1)
        self._torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)

    def settle(self) -> str | None:
        self._driver.cuCtxResetPersistingL2Cache()
        for _ in range(2):  # one write may meet something that passes
            if (taken := self._write()) <= BUSY_RATIO * self._usual_ms + BUSY_MS:
                return None
        return f"the device is not idle while every worker is stopped: a write of {self._usual_ms:.3f} ms took {taken:.3f} ms"

    def wait(self) -> None:
        """A write of one word: it runs when no other process holds the device."""
        self._word.fill_(1)
        self._torch.cuda.synchronize()


def open_quiet(arena: Arena, l2_bytes: int) -> Quiet:
    return QuietCuda(l2_bytes) if arena.device == "cuda" else Quiet()
