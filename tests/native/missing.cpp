// Kernels that are not written yet, so that the extension can be imported meanwhile.
#define MISSING(name) extern "C" __attribute__((weak)) int name() { return 1; }
MISSING(megarl_cuda_logprob_local)
MISSING(megarl_cuda_logprob_combine)
MISSING(megarl_cuda_logprob_backward)
MISSING(megarl_cuda_gae)
MISSING(megarl_cuda_policy)
MISSING(megarl_cuda_digest)
MISSING(megarl_cpu_policy)
