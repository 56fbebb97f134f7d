// What every .cu file needs: launching, and reductions whose order is fixed by the block's size alone.
// tests/native compiles the same files with g++ against an emulated cuda_runtime.h, so that the kernels run in CI:
// only static __shared__ memory, full warps, no code after an early return that others wait for.
#pragma once
#include <cuda_runtime.h>

#include "megarl.h"

#ifdef MEGARL_EMULATED
#define MEGARL_LAUNCH(kernel, grid, block, stream, ...) \
  ((void)(stream), emulated::launch(grid, block, [&] { kernel(__VA_ARGS__); }))
#else
#define MEGARL_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#endif

namespace megarl {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Butterfly: every lane gets the same bits, in an order that nothing changes.
template <class T, class Combine>
__device__ inline T warp_reduce(T value, Combine combine) {
  for (int lane = kWarp / 2; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(kAllLanes, value, lane));
  return value;
}

}  // namespace megarl
