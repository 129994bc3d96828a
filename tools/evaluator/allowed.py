"""What a kernel's own object may ask of other libraries: a list of what is allowed, and everything else is not.

The C and C++ runtime for memory, mathematics, exceptions and, on the CPU, threads; on CUDA the calls that launch kernels
and ask about the device. No file, no clock but the one that a waiting thread needs, no signal, no other process, no way
to find a function by its name, no other library. CUDA host code has no threads: the device does the work there.
"""

from __future__ import annotations

import re

ABI = ("unified_prefill", "unified_extend", "unified_decode", "unified_attn_workspace_bytes", "unified_attn_error",
       "unified_attn_abi_version")  # fmt: skip

# Exact names of C functions and of what the compiler calls by itself.
_C = """
abort __assert_fail __stack_chk_fail __errno_location __dso_handle __cxa_atexit __cxa_thread_atexit atexit __tls_get_addr
malloc calloc realloc free aligned_alloc posix_memalign
memcpy memmove memset memcmp memchr __memcpy_chk __memmove_chk __memset_chk strlen strcmp strncmp
_Unwind_Resume __gxx_personality_v0 __cxa_begin_catch __cxa_end_catch __cxa_rethrow __cxa_throw __cxa_allocate_exception
__cxa_free_exception __cxa_init_primary_exception __cxa_get_exception_ptr __cxa_bad_cast __cxa_bad_typeid
__cxa_throw_bad_array_new_length __cxa_pure_virtual __cxa_deleted_virtual __cxa_guard_acquire __cxa_guard_release
__cxa_guard_abort __cxa_call_terminate __dynamic_cast __libc_single_threaded
fegetenv fesetenv feholdexcept feupdateenv fegetround fesetround feclearexcept feraiseexcept fetestexcept
__cpu_model __cpu_indicator_init __udivti3 __umodti3 __divti3 __modti3 __udivmodti4 __multi3 __popcountdi2 __clzdi2 __ctzdi2
__extendhfsf2 __truncsfhf2 __truncdfhf2 __extendbfsf2 __truncsfbf2 __truncdfbf2 __fixsfti __fixdfti __floattisf __floattidf
__floatuntisf __floatuntidf
"""
_MATHS = """
acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 exp10 expm1 fabs fdim floor fma fmax fmin
fmod frexp hypot ilogb ldexp lgamma llrint llround log log10 log1p log2 logb lrint lround modf nearbyint nextafter pow
remainder remquo rint round scalbln scalbn sin sincos sinh sqrt tan tanh tgamma trunc
"""
_THREADS = """
pthread_create pthread_join pthread_detach pthread_self pthread_equal pthread_atfork pthread_once
pthread_mutex_init pthread_mutex_destroy pthread_mutex_lock pthread_mutex_trylock pthread_mutex_unlock
pthread_rwlock_init pthread_rwlock_destroy pthread_rwlock_rdlock pthread_rwlock_wrlock pthread_rwlock_unlock
pthread_cond_init pthread_cond_destroy pthread_cond_wait pthread_cond_timedwait pthread_cond_clockwait pthread_cond_signal
pthread_cond_broadcast pthread_barrier_init pthread_barrier_destroy pthread_barrier_wait
pthread_attr_init pthread_attr_destroy pthread_attr_setstacksize pthread_attr_setdetachstate
pthread_getaffinity_np pthread_setaffinity_np pthread_key_create pthread_key_delete pthread_getspecific pthread_setspecific
__pthread_key_create sched_yield sched_getaffinity sched_getcpu __sched_cpucount __sched_cpualloc __sched_cpufree sysconf
get_nprocs __once_proxy
"""
_CUDA = """
__cudaRegisterFatBinary __cudaRegisterFatBinaryEnd __cudaUnregisterFatBinary __cudaRegisterFunction __cudaRegisterVar
__cudaInitModule __cudaPushCallConfiguration __cudaPopCallConfiguration __cudaGetKernel __cudaLaunchKernel
cudaLaunchKernel cudaLaunchKernelExC cudaLaunchCooperativeKernel cudaMemsetAsync
cudaFuncSetAttribute cudaFuncGetAttributes cudaFuncSetCacheConfig
cudaOccupancyMaxActiveBlocksPerMultiprocessor cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
cudaOccupancyMaxActiveClusters cudaOccupancyMaxPotentialClusterSize cudaOccupancyAvailableDynamicSMemPerBlock
cudaGetDevice cudaGetDeviceCount cudaDeviceGetAttribute cudaGetDeviceProperties cudaGetDeviceProperties_v2
cudaDriverGetVersion cudaRuntimeGetVersion
cudaGetLastError cudaPeekAtLastError cudaGetErrorString cudaGetErrorName cuTensorMapEncodeTiled
"""

_EXCEPTIONS = (
    r"(exception|bad_\w+|logic_error|runtime_error|domain_error|invalid_argument|length_error|out_of_range|range_error|"
    r"overflow_error|underflow_error|system_error|future_error|error_category)"
)
# Names of the C++ runtime, as the linker knows them.
_CXX = (
    r"_Zn[aw][jm]\w*", r"_Zd[al]Pv\w*", r"_ZSt7nothrow", r"_ZSt9terminatev", r"_ZSt\d+__throw_\w+",
    r"_ZSt\d+__glibcxx_assert_fail\w*",
    r"_ZT[IS]\w+", r"_ZTVN10__cxxabiv1\w+", rf"_ZTVSt\d+{_EXCEPTIONS}", rf"_ZNK?St\d+{_EXCEPTIONS}[CDE4]\w*",
    r"_ZNK?St15__exception_ptr\w+", r"_ZSt17current_exceptionv", r"_ZSt17rethrow_exception\w+", r"_ZSt18uncaught_exceptionv",
    r"_ZNK?St7__cxx1112basic_stringI[cw]\w+", r"_ZNK?Ss\w+", r"_ZSt\d+_Rb_tree_\w+", r"_ZSt11_Hash_bytesPKvmm",
    r"_ZNKSt8__detail20_Prime_rehash_policy\w+", r"_ZNSt8__detail15_List_node_base\w+", r"_ZNSt19_Sp_make_shared_tag\w+",
    r"_ZNSt3_V21[56](generic|system)_categoryEv", r"__aarch64_(cas|swp|ldadd|ldclr|ldset|ldeor)\d+_\w+",
)  # fmt: skip
_CXX_THREADS = (
    r"_ZNSt6thread\w+", r"_ZNSt18condition_variable\w+", r"_ZNSt22condition_variable_any\w+",
    r"_ZNSt6chrono3_V212steady_clock3nowEv", r"_ZSt15__once_callable", r"_ZSt11__once_call",
    r"_ZNSt13__future_base\w+", r"_ZSt15future_categoryv", r"_ZNSt28__atomic_futex_unsigned_base\w+",
)  # fmt: skip
# CUTLASS prints its refusals to std::cerr.
_CXX_CERR = (
    r"_ZSt4cerr", r"_ZSt21ios_base_library_initv",
    r"_ZNSt8ios_base4Init[CD]1Ev", r"_ZNSo(lsE\w+|3putEc|5flushEv|9_M_insertI\w+)", r"_ZSt16__ostream_insert\w+",
    r"_ZStlsI\w+", r"_ZSt4endlI\w+", r"_ZNKSt5ctypeIcE13_M_widen_initEv", r"_ZSt16__throw_bad_castv",
)  # fmt: skip

_NAMES = {*_C.split(), *(name + kind for name in _MATHS.split() for kind in ("", "f", "l"))}
_EXACT = {"cpu": {*_NAMES, *_THREADS.split()}, "cuda": {*_NAMES, *_CUDA.split()}}
_FORMS = {
    "cpu": re.compile("|".join((*_CXX, *_CXX_THREADS))),
    "cuda": re.compile("|".join((*_CXX, *_CXX_CERR))),
}

# Shared libraries that a kernel library may name; nothing else is ever loaded with it.
LIBRARIES = re.compile(
    r"(libstdc\+\+|libc\+\+|libc\+\+abi|libgcc_s|libm|libc|libpthread|librt|libdl|ld-linux[-\w]*|libatomic)\.so(\.[\d.]+)?"
)
# Sections of an object that become part of the running library.
SECTIONS = re.compile(
    r"\.(text|rodata|data|bss|tdata|tbss|ldata|lbss|lrodata|eh_frame|gcc_except_table|init_array|note\.[\w.-]+)([.$].*)?"
    r"|\.nv_fatbin|\.nvFatBinSegment|__nv_module_id"
)
INITIALISERS = re.compile(r"_GLOBAL__(sub_)?I_.*|_GLOBAL__sub_I\.\d+_.*|(_ZL\d+)?__sti____cudaRegisterAll\w*")
DEVICE_IMPORTS = ("__assertfail",)
# Texts that the compiler keeps on the device for assert().
ASSERT_TEXT = re.compile(r"\$str(\$\d+)?|__unnamed_\d+")
STATE_BYTES = 1  # of a device variable: the headers of CUDA and CUTLASS define empty tag objects of one byte


def may_import(name: str, device: str) -> bool:
    """Whether an object for a kind of device ("cpu" or "cuda") may leave a symbol to other libraries."""
    return name in _EXACT[device] or _FORMS[device].fullmatch(name) is not None


def may_define(name: str, weak: bool) -> bool:
    """Whether an object may define a symbol for others: the interface, and C++ functions that stand in for nobody else's."""
    if name in ABI or re.match(r"DW\.ref\.|__clang_call_terminate$|__x86\.get_pc_thunk", name):
        return True
    if not name.startswith("_Z") or re.match(r"_Z(n[aw]|d[al])", name):
        return False
    return weak or re.match(r"_Z(N[KVr]*)?(St|S[abdios]|N9__gnu_cxx|N10__cxxabiv1)", name) is None
