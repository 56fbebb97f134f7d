#include <cuda_runtime.h>

#include "megarl.h"

extern "C" const char* megarl_cuda_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
