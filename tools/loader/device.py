"""Whether this machine is a target's: asked before anything is compiled."""

from __future__ import annotations

import re

import torch

from tools.core.config import Target
from tools.core.errors import UserError


def resolve_device(target: Target, device: torch.device | str | None) -> torch.device:
    """The device a kernel is loaded for: the target's type, with an index only where one was asked for."""
    kind = target.config["target"]["device"]
    try:
        resolved = torch.device(device if device is not None else kind)
    except RuntimeError as error:
        raise UserError(f"device {device!r}: {error}") from None
    if resolved.type != kind:
        raise UserError(f"device {str(resolved)!r} is not of target {target.name}'s type, {kind}")
    return resolved


def check_machine(target: Target, device: torch.device, *, allow_compat: bool = False) -> str | None:
    """Refuse a GPU that is not the target's; with allow_compat, one that cannot run the target's code.

    Returns None on the target's own GPU (and for the CPU), else a sentence that says what stands in.
    """
    section = target.config["target"]
    if section["device"] == "cpu":
        return None
    if torch.version.cuda is None:
        raise UserError(f"target {target.name} needs a CUDA build of torch; this one is torch {torch.__version__}")
    if not torch.cuda.is_available():
        raise UserError(f"target {target.name} needs a GPU ({section['gpu_names'][0]}); torch sees none")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UserError(f"device {str(device)!r}: this machine has {torch.cuda.device_count()} GPUs")
    name = torch.cuda.get_device_name(device)
    if name in section["gpu_names"]:
        return None
    found = f"this GPU is {name!r}, target {target.name} is {' or '.join(map(repr, section['gpu_names']))}"
    if not allow_compat:
        raise UserError(found)
    capability = torch.cuda.get_device_capability(device)
    if not any(runs_on(arch, capability) for arch in target.config["build"]["arch"]):
        raise UserError(f"{found}; its compute capability {capability[0]}.{capability[1]} cannot run "
                        f"{', '.join(target.config['build']['arch'])}")  # fmt: skip
    return f"compatibility only: {found}"


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code of one -gencode entry runs on a GPU of a compute capability.

    Machine code (sm_XY) runs within its major version from XY on, PTX (compute_XY) on anything from XY on; either with
    an `a` suffix on exactly XY only.
    """
    _, _, codes = arch.partition(",code=")
    for kind, number, suffix in re.findall(r"(sm|compute)_(\d+)([af]?)", codes):
        version = divmod(int(number), 10)
        if suffix == "a":
            if capability == version:
                return True
        elif capability >= version and (capability[0] == version[0] or (kind == "compute" and suffix == "")):
            return True
    return False
