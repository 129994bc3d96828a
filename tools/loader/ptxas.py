"""What `ptxas -v` says of each CUDA kernel."""

from __future__ import annotations

import re
from typing import Any

from tools.loader.toolchain import demangle

_KERNEL = re.compile(r"^ptxas info\s*: Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def resources(log: str) -> list[dict[str, Any]]:
    """One entry a kernel and architecture: registers a thread; bytes of static shared memory, spills and stack.

    Dynamic shared memory is chosen at launch and is not known here. A source can make the compiler print lines like these;
    what decides anything reads the binary instead (cubin.py).
    """
    found: list[dict[str, Any]] = []
    for line in log.splitlines():
        if match := _KERNEL.search(line):
            found.append({"kernel": match["name"], "arch": match["arch"], "registers": 0, "shared_bytes": 0,
                          "spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 0})  # fmt: skip
        elif found and (match := _STACK.search(line)):
            stack, stores, loads = map(int, match.groups())
            found[-1] |= {"stack_bytes": stack, "spill_store_bytes": stores, "spill_load_bytes": loads}
        elif found and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            found[-1] |= {"registers": int(match[1]), "shared_bytes": int(shared[1]) if shared else 0}
    for entry, name in zip(found, demangle([entry["kernel"] for entry in found]), strict=True):
        entry["kernel"] = name
    return found
