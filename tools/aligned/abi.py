"""ctypes mirror of experimental/cpu/kernels/operators_abi.h. No torch here."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tools.core.errors import KernelError, UserError
from tools.core.files import show_path

ABI_VERSION = 1
ERRORS = {
    -1: "a size is below 1, a width is no multiple of 16, or a pointer is null",
    -2: "a token, target, position or sequence is out of range",
    -3: "the number of threads is negative",
    -4: "out of memory for the threads' scratch space",
}
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_ARGUMENTS = {  # of each function, without the number of threads, which is the last of all
    "embedding": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
    "add": (_POINTER, _POINTER, _POINTER, _SIZE),
    "rmsnorm": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _FLOAT),
    "angles": (_POINTER, _POINTER, _POINTER, _POINTER, _SIZE),
    "rope": (_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE),
    "linear": (_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
    "swiglu": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
    "route": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT),
    "combine": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
    "cache_write": (_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE),
    "log_prob": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE),
}
NAMES = tuple(_ARGUMENTS)


class OperatorLibrary:
    """An operator library in this process. Loading runs its static initialisers: never load what is not trusted to run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._dll = ctypes.CDLL(str(path))
            version = self._dll.operators_abi_version
            self._functions = {name: getattr(self._dll, f"operators_{name}") for name in NAMES}
        except (OSError, AttributeError) as error:
            raise UserError(f"{show_path(path)}: not an operator library: {error}") from None
        version.restype = ctypes.c_int
        version.argtypes = ()
        if version() != ABI_VERSION:
            raise UserError(f"{show_path(path)}: interface version {version()} is not {ABI_VERSION}")
        for name, function in self._functions.items():
            function.restype = ctypes.c_int
            function.argtypes = (*_ARGUMENTS[name], _INT)

    def call(self, name: str, *arguments: int | float | None, threads: int) -> None:
        """One operator, as in the header; KernelError where it returns a code."""
        code = int(self._functions[name](*arguments, threads))
        if code:
            raise KernelError(f"{name}: {ERRORS.get(code, f'unknown error code {code}')}", code)
