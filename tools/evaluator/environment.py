"""What the machine and its software were: recorded with every report, hashed apart."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "numpy",
    "flash-attn-3",
    "flash_attn_3",
    "fa3-fwd",
    "flash-attn",
    "flashinfer-python",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cutlass",
    "triton",
)
QUERY = (
    "name",
    "driver_version",
    "clocks.max.sm",
    "clocks.current.sm",
    "clocks.current.memory",
    "temperature.gpu",
    "power.limit",
    "power.draw",
)


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = str(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gpu_state() -> dict[str, str] | str:
    """Clocks, power and throttling as nvidia-smi reports them now, or why not."""
    text = _run("nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader")
    if not text:
        return "unavailable: nvidia-smi gave nothing"
    return dict(zip(QUERY, (value.strip() for value in text.splitlines()[0].split(",")), strict=False))


def record(device: str) -> dict[str, Any]:
    """The environment of this run."""
    import torch

    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": " ".join((platform.system(), platform.release().split("-")[0], *platform.libc_ver())).strip(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "packages": packages(),
        "torch_cuda": torch.version.cuda,
        "gpu": None,
        "gpu_state": None,
        "variables": {
            k: v
            for k, v in sorted(os.environ.items())
            if k.startswith(("CUDA_", "OMP_", "MKL_", "FLASHINFER_", "TORCH_", "NVIDIA_TF32")) and "/" not in v
        },
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "compute_capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
        found["gpu_state"] = gpu_state()
    return found


def keep_still() -> None:
    """On the CPU the judge shares the cores with those it times: one thread, since torch's others spin while they wait, and
    memory that is kept when freed, since fresh pages cost more than the copies of results that they are for."""
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):
        c = ctypes.CDLL(None)
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
            c.mallopt(option, 1 << 30)
