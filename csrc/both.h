// Marks functions that run on the CPU and on a GPU.
#pragma once

#ifdef __CUDACC__
#define MEGARL_BOTH __host__ __device__
#else
#define MEGARL_BOTH
#endif
