"""Build a target's kernel, load it where the machine allows, and say what the compiler made of it.

    python tools/load_kernel.py --gpu cpu --verbose
    python tools/load_kernel.py --gpu h200 --source my.cu --compile-only     # needs nvcc, no GPU
    python tools/load_kernel.py --update-hashes                              # after a deliberate change of a source

As a module: `from tools.load_kernel import load_kernel`. Measures nothing. Exit codes: 0, 2 (one line says why), 130.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.core.config import EXPERIMENTAL, load_target, target_names
from tools.core.errors import CommandParser, UserError, run_command
from tools.core.hashes import update_hashes
from tools.loader.build import build, print_built

if TYPE_CHECKING:
    from tools.loader.interface import Kernel


def load_kernel(gpu: str | None, **options: Any) -> Kernel:
    """See tools.loader.interface.load_kernel; imported on the first call, because it needs torch."""
    from tools.loader import interface

    return interface.load_kernel(gpu, **options)


def main(arguments: list[str] | None = None) -> int:
    """Parse, build, load, print."""
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", metavar="TARGET", help=f"one of: {', '.join(target_names())}")
    parser.add_argument("--config", type=Path, help="a config file in place of the target's own")
    parser.add_argument("--source", type=Path, help="a candidate in place of the config's source")
    parser.add_argument("--verbose", action="store_true", help="print the command, registers, shared memory and spills")
    parser.add_argument("--json", action="store_true", help="print everything known of the build as JSON")
    parser.add_argument("--compile-only", action="store_true", help="do not look for the GPU and do not load")
    parser.add_argument("--allow-compat", action="store_true", help="accept another GPU that can run the code")
    parser.add_argument("--verify-library", action="store_true", help="compare bits with the contract's library")
    parser.add_argument("--update-hashes", action="store_true", help="refresh the sha256 entries of configs and stop")
    args = parser.parse_args(arguments)
    if args.update_hashes:
        everywhere = sorted(EXPERIMENTAL.glob(f"{args.gpu or '*'}/*.yaml"))
        for path in [args.config] if args.config else everywhere:
            for line in update_hashes(load_target(args.gpu, path)):
                print(line)
        return 0
    if args.gpu is None and args.config is None:
        raise UserError("name a target (--gpu) or a config file (--config)")
    if args.compile_only:
        built = build(load_target(args.gpu, args.config), args.source)
    else:
        options = {"source": args.source, "config": args.config, "allow_compat": args.allow_compat}
        loaded = load_kernel(args.gpu, **options, verify_library=args.verify_library).built
        assert loaded is not None  # load_kernel always states what it built
        built = loaded
    if args.json:
        print(json.dumps(dataclasses.asdict(built), default=str, indent=1, sort_keys=True))
    elif args.verbose:
        print_built(built)
    else:
        print(f"{built.library}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
