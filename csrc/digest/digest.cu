// The digest on a GPU. A warp takes pieces of lines; sums are of integers, so their order changes nothing.
#include "cuda/device.h"
#include "digest/box.h"
#include "digest/mix.h"

namespace megarl {
namespace {

constexpr int kThreads = 256, kLoads = 8, kRounds = 4;
constexpr int kPiece = kWarp * kLoads * kRounds;  // units of work in a piece: blocks of 8 bytes, or single elements
constexpr int64_t kMaxGrid = 4096;

struct Job {
  Box box;
  uint64_t offset;
  int64_t lines, pieces;  // pieces in a line
};

template <class Element>
__device__ __forceinline__ uint64_t load(const Element* p) {
  return *p;
}

// The elements that block `block` has of [first, first + width), the first of which lies at `data`.
template <class Element>
__device__ __forceinline__ uint64_t part_of_block(const Element* data, uint64_t first, int64_t width, uint64_t block) {
  constexpr int kPer = 8 / sizeof(Element);
  uint64_t bits = 0, count = 0;
#pragma unroll(kPer > 4 ? 1 : kPer)
  for (int i = 0; i < kPer; ++i) {
    const int64_t at = (int64_t)(block * kPer + i - first);
    if (at < 0 || at >= width) continue;
    bits |= load(data + at) << (i * 8 * sizeof(Element));
    ++count;
  }
  return digest_content(bits, count) * digest_key((block + 1) * kSpread);
}

// Blocks [piece * kPiece, ...) of a line whose elements follow one another in memory and in the flat index.
template <class Element>
__device__ uint64_t run(const Element* data, uint64_t first, int64_t width, int64_t piece, int lane) {
  constexpr int kPer = 8 / sizeof(Element);
  const uint64_t blocks = (first + width - 1) / kPer - first / kPer + 1;
  const int64_t begin = piece * kPiece, end = begin + kPiece < (int64_t)blocks ? begin + kPiece : (int64_t)blocks;
  const Element* start = data - first % kPer;  // where the line's first block begins, or would
  const bool aligned = reinterpret_cast<uintptr_t>(start) % 8 == 0;
  uint64_t sum = 0;
  for (int64_t round = begin; round < end; round += kWarp * kLoads) {
    const bool inside = aligned && (round > 0 || first % kPer == 0) &&
                        (round + kWarp * kLoads) * kPer - (int64_t)(first % kPer) <= width;
    if (inside) {  // the same for all lanes
      const auto* p = reinterpret_cast<const unsigned long long*>(start) + round + lane;
      uint64_t v[kLoads], spread = (first / kPer + (uint64_t)(round + lane) + 1) * kSpread;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) v[i] = __ldcs(p + i * kWarp);
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        sum += digest_content(v[i], kPer) * digest_key(spread + (uint64_t)(i * kWarp) * kSpread);
    } else {
      for (int64_t b = round + lane; b < round + kWarp * kLoads && b < end; b += kWarp)
        sum += part_of_block(data, first, width, first / kPer + (uint64_t)b);
    }
  }
  return sum;
}

template <class Element, bool Runs>
__global__ void __launch_bounds__(kThreads, 4) kernel(const Element* data, const Job job, uint64_t* digest) {
  __shared__ uint64_t sums[kThreads / kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t warps = (int64_t)gridDim.x * (kThreads / kWarp), work = job.lines * job.pieces;
  uint64_t sum = 0;
  for (int64_t item = (int64_t)blockIdx.x * (kThreads / kWarp) + warp; item < work; item += warps) {
    const int64_t outer = job.pieces == 1 ? item : job.lines == 1 ? 0 : item / job.pieces;
    const int64_t piece = item - outer * job.pieces;
    int64_t element = 0;
    uint64_t index = job.offset;
    job.box.line(outer, &element, &index);
    if constexpr (Runs) {
      sum += run(data + element, index, job.box.width(), piece, lane);
    } else {
      const int64_t end = min(job.box.width(), (piece + 1) * kPiece);
      for (int64_t i = piece * kPiece + lane; i < end; i += kWarp)
        sum += digest_element(data[element + i * job.box.stride()],
                              (index + (uint64_t)i * job.box.step()) * sizeof(Element));
    }
  }
  const auto plus = [](uint64_t a, uint64_t b) { return a + b; };
  sum = warp_reduce(sum, plus);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (int i = 0; i < kThreads / kWarp; ++i) sum += sums[i];
    atomicAdd(reinterpret_cast<unsigned long long*>(digest), (unsigned long long)sum);
  }
}

template <class Element>
void launch(const void* data, Job job, uint64_t* digest, void* stream) {
  constexpr int kPer = 8 / sizeof(Element);
  const bool runs = job.box.stride() == 1 && job.box.step() == 1;
  const int64_t units = runs ? job.box.width() / kPer + 2 : job.box.width();  // a run may begin and end within a block
  job.pieces = (units + kPiece - 1) / kPiece;
  const int64_t blocks = (job.lines * job.pieces + kThreads / kWarp - 1) / (kThreads / kWarp);
  const dim3 grid((unsigned)(blocks < kMaxGrid ? blocks : kMaxGrid));
  const auto* elements = static_cast<const Element*>(data);
  if (runs) {
    MEGARL_LAUNCH((kernel<Element, true>), grid, dim3(kThreads), stream, elements, job, digest);
  } else {
    MEGARL_LAUNCH((kernel<Element, false>), grid, dim3(kThreads), stream, elements, job, digest);
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_cuda_digest(const void* data, int itemsize, int dims, const int64_t* sizes,
                                  const int64_t* strides, uint64_t offset, const uint64_t* steps, uint64_t* digest,
                                  void* stream) {
  megarl::Job job;
  job.offset = offset;
  if (!megarl::fold(dims, sizes, strides, steps, &job.box)) return cudaErrorInvalidValue;
  job.lines = 1;
  for (int d = 0; d + 1 < job.box.dims; ++d) job.lines *= job.box.sizes[d];
  const cudaError_t error = cudaMemsetAsync(digest, 0, sizeof *digest, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return error;
  switch (itemsize) {
    case 1: megarl::launch<uint8_t>(data, job, digest, stream); break;
    case 2: megarl::launch<uint16_t>(data, job, digest, stream); break;
    case 4: megarl::launch<uint32_t>(data, job, digest, stream); break;
    default: megarl::launch<uint64_t>(data, job, digest, stream); break;
  }
  return cudaGetLastError();
}
