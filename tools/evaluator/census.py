"""How many machine instructions of each class a CUDA kernel has, from a disassembler where one is installed.

    counts, note = count(images)          # counts["sm_90", symbol]["mma"]

A census describes the code, not a run: loops are counted once. Without a disassembler the note says so, and nothing
fails. Tools are looked for in CUDA_HOME, beside nvcc, on PATH, and in the Python packages that bring them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tools.core.errors import UserError
from tools.loader import toolchain

TOOLS = {"nvdisasm": ("-c",), "cuobjdump": ("-sass",)}
TIMEOUT_S = 120
INSTRUCTION_BYTES = 16

# The first class whose pattern fits an opcode counts it; "other" takes the rest.
CLASSES = {
    "mma": re.compile(r"(H|I|D|B|Q|F)MMA\b|(H|I|Q|B)GMMA\b|UTC\w*MMA\b"),
    "exponential": re.compile(r"MUFU\.EX2\b"),
    "mufu_other": re.compile(r"MUFU\b"),
    "conversion": re.compile(r"(F2F|F2FP|F2I|F2IP|I2F|I2FP|I2I|FRND|UF2F\w*|UF2I\w*|UI2F\w*)\b"),
    "fp32": re.compile(r"(FFMA|FADD|FMUL|FMNMX|FSEL|FSET|FSETP)\w*\b"),
    "integer": re.compile(r"U?(IMAD|IADD3?|VIADD\w*|LOP3|PLOP3|LEA|ISETP|SEL|SHF|SHL|SHR|USHF|IMNMX|VIMNMX\w*|IABS|PRMT)\b"),
    "tma": re.compile(r"(UTMA\w+|UBLK\w+)\b"),
    "global_load": re.compile(r"(LDG|LD|LDGSTS)\b"),
    "global_store": re.compile(r"(STG|ST)\b"),
    "shared_load": re.compile(r"(LDS|LDSM)\b"),
    "shared_store": re.compile(r"(STS|STSM)\b"),
    "local": re.compile(r"(LDL|STL)\b"),
    "atomic": re.compile(r"(ATOM|ATOMG|ATOMS|RED|REDG|REDAS|UREDG\w*)\b"),
    "barrier": re.compile(r"(BAR|SYNCS|UCGABAR\w*|WARPSYNC|DEPBAR|LDGDEPBAR|ARRIVES|WARPGROUP|MEMBAR)\b"),
}
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+)|^\s*Function : (\S+)")
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:(@!?U?P[T\d])\s+)?([A-Z][\w.]*)")


def count(images: list[tuple[str, bytes]]) -> tuple[dict[tuple[str, str], dict[str, int]], str]:
    """Counts of each class by (architecture, kernel's symbol), and which tool made them or why none did."""
    tools = find_tools()
    if not tools:
        return {}, "unavailable: no nvdisasm and no cuobjdump (CUDA toolkit, or pip install nvidia-cuda-nvdisasm)"
    problem = ""
    for program in tools:
        found: dict[tuple[str, str], dict[str, int]] = {}
        try:
            for arch, cubin in images:
                found |= {(arch, name): counts for name, counts in parse(disassemble(program, cubin)).items()}
        except UserError as error:
            problem = problem or str(error)
            continue
        return found, program.name
    return {}, f"unavailable: {problem}"


def find_tools() -> list[Path]:
    """Every disassembler there is, in order of preference."""
    folders = [str(Path(home) / "bin")] if (home := os.environ.get("CUDA_HOME")) else []
    if nvcc := shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc"):
        folders.append(str(Path(nvcc).resolve().parent))
    folders += os.environ.get("PATH", "").split(os.pathsep)
    for package, pattern in (("nvidia", "*/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            folders += sorted(str(folder) for folder in Path(place).glob(pattern))
    path = os.pathsep.join(folders)
    return [Path(program) for name in TOOLS if (program := shutil.which(name, path=path))]


def disassemble(program: Path, cubin: bytes) -> str:
    """What a tool prints for an image; UserError where it fails or takes too long."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run(
                [program, *TOOLS[program.name], file.name], capture_output=True, text=True, errors="replace",
                timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, env=toolchain.clean_environment()[0], check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"{program.name}: {error}") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"{program.name}: {words[0].replace(file.name, 'the image')[:200]}")
    return done.stdout


def parse(listing: str) -> dict[str, dict[str, int]]:
    """Counts by kernel symbol from the listing of either tool. "total" leaves out NOPs and what never runs."""
    found: dict[str, dict[str, int]] = {}
    counts: dict[str, int] | None = None
    for line in listing.splitlines():
        if match := _SECTION.match(line):
            counts = found.setdefault(match[1] or match[2], dict.fromkeys((*CLASSES, "other", "nop", "total"), 0))
        elif counts is not None and (match := _OPCODE.match(line)):
            predicate, opcode = match.groups()
            if opcode == "NOP" or predicate == "@!PT":
                counts["nop"] += 1
                continue
            counts[next((name for name, form in CLASSES.items() if form.match(opcode)), "other")] += 1
            counts["total"] += 1
    return found
