"""Hardware counters of a kernel library, read with Nsight Compute where that is possible.

The judge starts `ncu ... python -m tools.evaluator.counters LIBRARY CELLS`: a process of its own that loads the library,
calls each cell once under the profiler and exits. Counters inform; they decide nothing.
"""

from __future__ import annotations

import csv
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.core.files import REPO_ROOT
from tools.evaluator.grids import Cell

METRICS = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
TIMEOUT_S = 90.0


def chosen(cells: list[Cell]) -> list[Cell]:
    """The cells to look at: of each kind the shortest and the longest at the smallest batch, and the largest decode."""
    found = []
    for kind in dict.fromkeys(cell.kind for cell in cells):
        group = [cell for cell in cells if cell.kind == kind]
        small = [cell for cell in group if cell.batch == group[0].batch]
        found += [small[0], small[-1]] + ([group[-1]] if kind == "decode" else [])
    return list(dict.fromkeys(found))


def read(library: Path, cells: list[Cell], heads: tuple[int, int], launches: dict[str, int]) -> dict[str, Any]:
    """{"note": why nothing could be read, or "", "kernels": [{"cell", "kernel", "grid", "block", metric: value}]}.

    launches: kernels that one call of each cell was seen to launch, which tells whose kernels are whose.
    """
    ncu = shutil.which("ncu") or next((str(p) for p in Path("/usr/local/cuda/bin").glob("ncu")), None)
    if ncu is None:
        return {"note": "unavailable: no ncu on this machine", "kernels": []}
    work = [{"name": c.name, "entry": c.entry, "batch": c.batch, "rows": c.rows, "keys": c.keys, "heads": heads} for c in cells]
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--metrics", ",".join(METRICS)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        command += [sys.executable, "-m", "tools.evaluator.counters", str(library), json.dumps(work), scratch]
        text = _output(command, scratch)
    if text is None:
        return {"note": f"unavailable: ncu took more than {TIMEOUT_S:g} s", "kernels": []}
    kernels = parse(text)
    if not kernels:
        return {"note": f"unavailable: {_reason(text)}", "kernels": []}
    owners = [cell.name for cell in cells for _ in range(launches.get(cell.name, 0))]
    if len(owners) == len(kernels):
        return {"note": "", "kernels": [{"cell": owner, **kernel} for owner, kernel in zip(owners, kernels, strict=True)]}
    return {"note": "which cell a kernel belongs to could not be told", "kernels": [{"cell": None, **k} for k in kernels]}


def _output(command: list[str], scratch: str) -> str | None:
    """What ncu prints; None where it takes too long. scratch: the one folder that its part within the confined process may
    write to, where it then keeps its lock."""
    process = subprocess.Popen(
        command,
        cwd=REPO_ROOT,
        env={**os.environ, "TMPDIR": scratch},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=TIMEOUT_S)
        return text
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _reason(text: str) -> str:
    """The first error that ncu names, else its last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("==ERROR==")]
    return [*errors, *lines[-1:], "ncu printed nothing"][0][:300]


def parse(text: str) -> list[dict[str, Any]]:
    """The kernels of ncu's CSV output in launch order, each metric as "name [unit]"."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[start:]):
        if not row.get("Metric Name"):
            continue
        kernel = found.setdefault(
            row["ID"], {"kernel": row["Kernel Name"], "grid": row["Grid Size"], "block": row["Block Size"]}
        )
        value = (row["Metric Value"] or "").replace(",", "")
        unit = row.get("Metric Unit") or ""
        try:
            kernel[f"{row['Metric Name']} [{unit}]"] = float(value)
        except ValueError:
            kernel[f"{row['Metric Name']} [{unit}]"] = value
    return list(found.values())


def main() -> int:
    """Inside ncu: call every cell once, the profiler on around the call alone."""
    import torch

    from tools.evaluator import sandbox
    from tools.evaluator.worker import ENTRIES
    from tools.loader import abi

    torch.zeros(1, device="cuda").normal_()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    sandbox.enter(sys.argv[3], [str(Path(sys.argv[1]).parent)], "cuda", unix_sockets=True)
    _call_all(abi, Path(sys.argv[1]), ENTRIES)
    return 0


def _call_all(abi: Any, path: Path, entries: dict[str, int]) -> None:
    import torch

    library = abi.Library(path)
    for cell in json.loads(sys.argv[2]):
        heads_q, heads_kv = cell["heads"]
        shapes = [(cell["batch"], heads_q, cell["rows"], 128)] + [(cell["batch"], heads_kv, cell["keys"], 128)] * 2
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for shape in shapes)
        o = torch.empty_like(q)
        params = abi.Params()
        params.q, params.k, params.v, params.o = (t.data_ptr() for t in (q, k, v, o))
        params.batch, params.heads_q, params.heads_kv = cell["batch"], heads_q, heads_kv
        params.seqlen_q, params.seqlen_kv = cell["rows"], cell["keys"]
        for name, tensor in (("q_stride", q), ("k_stride", k), ("v_stride", v), ("o_stride", o)):
            setattr(params, name, (ctypes.c_int64 * 3)(*tensor.stride()[:3]))
        entry = entries[cell["entry"]]
        workspace = torch.empty(max(1, library.workspace_bytes(entry, params)), dtype=torch.uint8, device="cuda")
        params.workspace = workspace.data_ptr()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        library.call(entry, params, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    sys.exit(main())
