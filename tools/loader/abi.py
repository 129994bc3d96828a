"""ctypes mirror of experimental/common/attn_abi.h, and a loaded kernel library. No torch here."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tools.core.errors import KernelError, UserError
from tools.core.files import show_path

ABI_VERSION = 1
HEAD_DIM = 128
PREFILL, EXTEND, DECODE = 0, 1, 2
ENTRY_NAMES = ("unified_prefill", "unified_extend", "unified_decode")


class Params(ctypes.Structure):
    """UnifiedAttnParams: sizes are counts of elements, strides are in elements; see the header for shapes."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("o", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("cu_seqlens", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("heads_q", ctypes.c_int64),
        ("heads_kv", ctypes.c_int64),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_kv", ctypes.c_int64),
        ("q_stride", ctypes.c_int64 * 3),
        ("k_stride", ctypes.c_int64 * 3),
        ("v_stride", ctypes.c_int64 * 3),
        ("o_stride", ctypes.c_int64 * 3),
        ("lse_stride", ctypes.c_int64 * 2),
        ("num_sms", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class Library:
    """A kernel library in this process. Loading runs its static initialisers: never load what is not trusted to run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._dll = ctypes.CDLL(str(path))
            version = self._dll.unified_attn_abi_version
            self._entries = [getattr(self._dll, name) for name in ENTRY_NAMES]
            self._workspace = self._dll.unified_attn_workspace_bytes
            self._error = self._dll.unified_attn_error
        except (OSError, AttributeError) as error:
            raise UserError(f"{show_path(path)}: not a kernel library: {error}") from None
        version.restype = ctypes.c_int
        version.argtypes = ()
        if version() != ABI_VERSION:
            raise UserError(f"{show_path(path)}: interface version {version()} is not {ABI_VERSION}")
        for entry in self._entries:
            entry.restype = ctypes.c_int
            entry.argtypes = (ctypes.POINTER(Params), ctypes.c_void_p)
        self._workspace.restype = ctypes.c_int64
        self._workspace.argtypes = (ctypes.c_int, ctypes.POINTER(Params))
        self._error.restype = ctypes.c_char_p
        self._error.argtypes = (ctypes.c_int,)

    def workspace_bytes(self, entry: int, params: Params) -> int:
        """Bytes of workspace that a call needs; the content does not matter. KernelError where it says less than 0."""
        size = int(self._workspace(entry, ctypes.byref(params)))
        if size < 0:
            raise KernelError(f"{ENTRY_NAMES[entry]}: {self.message(size)}", size)
        return size

    def call(self, entry: int, params: Params, stream: int | None) -> None:
        """Enqueue one call on a stream (None on the CPU); KernelError where the library returns a code."""
        code = int(self._entries[entry](ctypes.byref(params), stream))
        if code != 0:
            raise KernelError(f"{ENTRY_NAMES[entry]}: {self.message(code)} (code {code})", code)

    def message(self, code: int) -> str:
        """The library's sentence for a code."""
        text = self._error(code)
        return text.decode("utf-8", "replace") if text else f"error {code}"
