"""A kernel source that is slower by a known share and otherwise the same: what the planted gain of a trial is measured with."""

from __future__ import annotations

import re

from tools.core.errors import UserError

ENTRIES = ("unified_prefill", "unified_extend", "unified_decode")
_KERNEL = re.compile(r"(__global__[^;{]*\{)")


def slowed(source: str, gain: float, device: str) -> str:
    """A source of which the given one takes 1 - gain of the time, with the same bits. device: cpu (C++) or cuda.

    UserError for a CUDA source without kernels.
    """
    return _slowed_cuda(source, gain) if device == "cuda" else _slowed_cpu(source, gain)


def _slowed_cpu(source: str, gain: float) -> str:
    """Every exported function idles on before it returns."""
    renamed = "".join(f"#define {name} plain_{name}\n" for name in ENTRIES)
    restored = "".join(f"#undef {name}\n" for name in ENTRIES)
    entries = "".join(
        f"int {name}(const UnifiedAttnParams* p, void* s) {{ return slowed(plain_{name}, p, s); }}\n" for name in ENTRIES
    )
    return f"""{renamed}#line 1
{source}
{restored}#include <chrono>
namespace {{
int slowed(int (*call)(const UnifiedAttnParams*, void*), const UnifiedAttnParams* params, void* stream) {{
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const int code = call(params, stream);
  const Clock::time_point end = Clock::now();
  while (Clock::now() - end < (end - start) * {gain / (1 - gain):.9f}) {{
  }}
  return code;
}}
}}  // namespace
extern "C" {{
{entries}}}
"""


def _slowed_cuda(source: str, gain: float) -> str:
    """Every thread of every kernel idles on before it ends, for a share of the clock ticks that it has run."""
    text, count = _KERNEL.subn(r"\1 const Idler idler_;", source)
    if not count:
        raise UserError("the source has no __global__ function: no gain can be planted in it")
    return f"""#include <cuda_runtime.h>
namespace {{
struct Idler {{
  const unsigned began = clock();
  __device__ ~Idler() {{
    const unsigned least = (unsigned)((float)((unsigned)clock() - began) * {1 / (1 - gain):.9f}f);
    while ((unsigned)clock() - began < least) {{
    }}
  }}
}};
}}  // namespace
#line 1
{text}
"""
