// The packaged kernel, every launch in stream order: its code is the same, but it does not ask to start while the kernel
// before it still runs (programmatic dependent launch). What decode gains by overlapping calls is the difference.

#include <cuda_runtime.h>

// A launch attribute of this kind is not looked at. Defined behind the header that declares both names.
#define cudaLaunchAttributeProgrammaticStreamSerialization cudaLaunchAttributeIgnore

#include "unified_attn_ext.cu"
