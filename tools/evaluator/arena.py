"""Memory that the judge owns and its workers see: every input, output, LSE and workspace of an evaluation lies here.

An arena is a list of big chunks. The judge allocates from them by bumping a pointer and takes everything of a scope
back at once; a worker maps a chunk when it first needs it. CPU chunks are anonymous shared memory (memfd, whose
descriptor is handed over), CUDA chunks are device allocations shared through CUDA IPC. Chunks are mapped once and never
move. *Closed* chunks hold what the candidate must not see, the outputs of everything else: its worker never maps them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.core.errors import UserError
from tools.evaluator.protocol import ITEM_BYTES

ALIGN_BYTES = 256
GRANULE_BYTES = 1 << 21  # chunks are whole device pages, so that no two share an IPC handle
CLOSED_SHARE = 2  # closed chunks hold outputs only: they are this much smaller
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)
Ref = dict[str, Any]


# ---------------------------------------------------------------- chunks


class CpuChunk:
    """Shared host memory, shared by handing its descriptor over."""

    handle = ""

    def __init__(self, nbytes: int, handle: str | None = None, descriptor: int | None = None) -> None:
        self.nbytes = nbytes
        if descriptor is None:
            descriptor = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(
                descriptor, getattr(fcntl, "F_ADD_SEALS", 1033), SEALS
            )  # a worker could else cut the judge's memory off
        self.descriptors: tuple[int, ...] = (descriptor,)
        self._map = mmap.mmap(descriptor, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def free(self) -> None:
        """The mapping goes with the last tensor of it."""
        os.close(self.descriptors[0])
        self.descriptors = ()

    def bytes_tensor(self) -> Any:
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8)


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _DeviceArray:
    """Lets torch see raw device memory as a uint8 tensor without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaChunk:
    """Device memory of the primary context of torch's current device. The handle is a CUDA IPC handle in hex."""

    descriptors: tuple[int, ...] = ()

    def __init__(self, nbytes: int, handle: str | None = None, descriptor: int | None = None) -> None:
        import torch

        torch.zeros(1, device="cuda")  # makes the primary context current on this thread
        driver = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_uint64()
        raw = _IpcHandle()
        self.nbytes = nbytes
        if handle is None:
            self._check(
                driver, driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), f"allocating {nbytes} bytes"
            )
            self._check(driver, driver.cuIpcGetMemHandle(ctypes.byref(raw), pointer), "sharing device memory (CUDA IPC)")
            self.handle = bytes(raw.reserved).hex()
        else:
            ctypes.memmove(ctypes.byref(raw), bytes.fromhex(handle), 64)
            flags = ctypes.c_uint(1)  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only one there is
            driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint]
            self._check(
                driver,
                driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), raw, flags),
                "mapping shared device memory (CUDA IPC)",
            )
            self.handle = handle
        self.address = int(pointer.value)

    @staticmethod
    def _check(driver: ctypes.CDLL, code: int, what: str) -> None:
        if code:
            text = ctypes.c_char_p()
            driver.cuGetErrorString(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {code}"
            raise UserError(f"{what} failed: {reason}")

    def free(self) -> None:
        """Give the allocation back. Only its maker may, when no tensor of it is used any more."""
        ctypes.CDLL("libcuda.so.1").cuMemFree_v2(ctypes.c_uint64(self.address))

    def bytes_tensor(self) -> Any:
        import torch

        return torch.as_tensor(_DeviceArray(self.address, self.nbytes), device="cuda")


DTYPES = {"torch.bfloat16": "bf16", "torch.float32": "f32", "torch.int32": "i32", "torch.uint8": "u8"}
CHUNKS: dict[str, Any] = {"cpu": CpuChunk, "cuda": CudaChunk}


# ---------------------------------------------------------------- the worker's side


class Mapping:
    """Chunks as a worker sees them. Pointers need no torch; tensors do."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._chunks: dict[int, Any] = {}
        self._bytes: dict[int, Any] = {}

    def open(self, chunk: int, handle: str, nbytes: int, descriptor: int | None) -> None:
        if chunk not in self._chunks:
            self._chunks[chunk] = CHUNKS[self._device](nbytes, handle, descriptor)

    def pointer(self, ref: Ref | None) -> int | None:
        return None if ref is None else self._chunks[ref["chunk"]].address + ref["offset"]

    def tensor(self, ref: Ref | None) -> Any:
        if ref is None:
            return None
        chunk = ref["chunk"]
        if chunk not in self._bytes:
            self._bytes[chunk] = self._chunks[chunk].bytes_tensor()
        return view(self._bytes[chunk], ref)


def torch_dtype(name: str) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "u8": torch.uint8}[name]


def view(chunk_bytes: Any, ref: Ref) -> Any:
    base = chunk_bytes.view(torch_dtype(ref["dtype"]))
    return base.as_strided(ref["shape"], ref["stride"], ref["offset"] // ITEM_BYTES[ref["dtype"]])


# ---------------------------------------------------------------- the judge's side


@dataclass
class _Chunk:
    number: int
    memory: Any
    tensor: Any
    used: int = 0
    kept: bool = False  # outside all scopes
    closed: bool = False  # not for the candidate


class Arena:
    """The judge's allocator. `device` is "cpu" or "cuda"; chunks of at least `chunk_bytes` are added as needed."""

    def __init__(self, device: str, chunk_bytes: int) -> None:
        self.device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[_Chunk] = []

    def _add_chunk(self, nbytes: int, *, kept: bool = False, closed: bool = False) -> _Chunk:
        least = 0 if kept else self._chunk_bytes // (CLOSED_SHARE if closed else 1)
        size = max(least, nbytes, 1)
        memory = CHUNKS[self.device](-(-size // GRANULE_BYTES) * GRANULE_BYTES)
        chunk = _Chunk(len(self._chunks), memory, memory.bytes_tensor(), kept=kept, closed=closed)
        self._chunks.append(chunk)
        return chunk

    def keep(self, nbytes: int, *, closed: bool = False) -> Any:
        """A uint8 tensor of `nbytes` that no scope takes back."""
        chunk = self._add_chunk(nbytes, kept=True, closed=closed)
        return chunk.tensor[:nbytes]

    def closed(self, number: int) -> bool:
        return self._chunks[number].closed

    def bytes(self, nbytes: int, *, skew: int = 0, closed: bool = False) -> tuple[int, int]:
        """(chunk, offset) of fresh memory; its address is a multiple of 256 bytes plus `skew`."""
        need = nbytes + skew + ALIGN_BYTES
        fitting = (c for c in self._chunks if not c.kept and c.closed == closed and c.memory.nbytes - c.used >= need)
        chunk = next(fitting, None) or self._add_chunk(need, closed=closed)
        offset = (chunk.used + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES + skew
        chunk.used = offset + nbytes
        return chunk.number, offset

    def empty(
        self,
        shape: tuple[int, ...] | list[int],
        dtype: str = "bf16",
        *,
        order: tuple[int, ...] | None = None,
        skew: int = 0,
        pad: int = 0,
        closed: bool = False,
    ) -> Any:
        """An uninitialised tensor of `shape`, stored densely with its dimensions in `order` (outermost first).

        skew: bytes added to a 256-byte aligned address. pad: bytes kept free before and after the tensor. closed: in
        memory that the candidate's worker never maps.
        """
        order = order or tuple(range(len(shape)))
        stride, step = [0] * len(shape), 1
        for dim in reversed(order):
            stride[dim] = step
            step *= shape[dim]
        chunk, offset = self.bytes(step * ITEM_BYTES[dtype] + 2 * pad, skew=skew, closed=closed)
        ref = {"chunk": chunk, "offset": offset + pad, "dtype": dtype, "shape": list(shape), "stride": stride}
        return view(self._chunks[chunk].tensor, ref)

    def ref(self, tensor: Any) -> Ref | None:
        """The reference of any view of arena memory, however transposed, expanded or sliced."""
        if tensor is None:
            return None
        address = tensor.data_ptr()
        for chunk in self._chunks:
            if 0 <= address - chunk.memory.address < chunk.memory.nbytes:
                return {
                    "chunk": chunk.number,
                    "offset": address - chunk.memory.address,
                    "dtype": DTYPES[str(tensor.dtype)],
                    "shape": list(tensor.shape),
                    "stride": list(tensor.stride()),
                }
        raise AssertionError(f"a tensor of shape {tuple(tensor.shape)} does not lie in the arena")

    def handle(self, number: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        """What a worker needs to map a chunk: the arguments of its request, and descriptors to send along."""
        memory = self._chunks[number].memory
        return {"chunk": number, "handle": memory.handle, "bytes": memory.nbytes}, memory.descriptors

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Takes everything allocated inside back at the end."""
        marks = [(chunk, chunk.used) for chunk in self._chunks]
        try:
            yield
        finally:
            for chunk in self._chunks:
                chunk.used = 0
            for chunk, used in marks:
                chunk.used = used

    def close(self) -> None:
        """Give all memory back; nothing of it may be used afterwards."""
        for chunk in self._chunks:
            chunk.memory.free()
        self._chunks.clear()

    def capacity(self) -> int:
        return sum(chunk.memory.nbytes for chunk in self._chunks)


def nbytes(shape: tuple[int, ...] | list[int], dtype: str = "bf16") -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]
