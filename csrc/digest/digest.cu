// The digests of many boxes on a GPU. A warp takes pieces of lines; sums are of integers, so their order changes nothing.
#include "cuda/device.h"
#include "digest/box.h"
#include "digest/mix.h"

namespace megarl {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kLoads = 8;
constexpr int64_t kMaxGrid = 4096;

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

// Piece `piece` of a line that begins at `data` and has flat index `first`.
template <class Element>
__device__ __forceinline__ uint64_t piece_of(const Box& box, int64_t element, uint64_t first, int64_t piece, int lane) {
  const Element* data = static_cast<const Element*>(box.data) + element;
  if (box.runs()) return run(data, first, box.width(), piece, lane);
  const int64_t end = min(box.width(), (piece + 1) * kPiece);
  uint64_t sum = 0;
  for (int64_t i = piece * kPiece + lane; i < end; i += kWarp)
    sum += digest_element(data[i * box.stride()], (first + (uint64_t)i * box.step()) * sizeof(Element));
  return sum;
}

// The last box of [from, count) that begins at or before `piece`; a warp looks at 32 of them at once.
__device__ __forceinline__ int64_t box_of(const Box* boxes, int64_t from, int64_t count, int64_t piece, int lane) {
  while (count - from > 1) {
    const int64_t step = (count - from + kWarp - 1) / kWarp, at = from + lane * step;
    const int begun = __popc(__ballot_sync(kAllLanes, at < count && boxes[at].first <= piece));
    from += (begun - 1) * step;
    count = min(count, from + step);
  }
  return from;
}

// `boxes` is null where there is one box: `only`, which then needs no copy to the device.
__global__ void __launch_bounds__(kThreads, 4)
    kernel(const __grid_constant__ Box only, const Box* boxes, int64_t count, int64_t pieces, uint64_t* digests) {
  __shared__ uint64_t sums[kWarps];
  __shared__ int64_t places[kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const auto plus = [](uint64_t a, uint64_t b) { return a + b; };
  int64_t i = 0;
  uint64_t sum = 0;
  for (int64_t next = (int64_t)blockIdx.x * kWarps + warp; next < pieces; next += (int64_t)gridDim.x * kWarps) {
    if (const int64_t found = box_of(boxes, i, count, next, lane); found != i) {
      sum = warp_reduce(sum, plus);
      if (lane == 0) atomicAdd(reinterpret_cast<unsigned long long*>(digests + i), (unsigned long long)sum);
      sum = 0;
      i = found;
    }
    const Box& box = boxes ? boxes[i] : only;
    int64_t piece = next - box.first;
    const int64_t outer = box.pieces == 1 ? piece : box.lines == 1 ? 0 : piece / box.pieces;
    piece -= outer * box.pieces;
    int64_t element = 0;
    uint64_t index = box.offset;
    box.line(outer, &element, &index);
    switch (box.itemsize) {  // the same for all lanes
      case 1: sum += piece_of<uint8_t>(box, element, index, piece, lane); break;
      case 2: sum += piece_of<uint16_t>(box, element, index, piece, lane); break;
      case 4: sum += piece_of<uint32_t>(box, element, index, piece, lane); break;
      default: sum += piece_of<uint64_t>(box, element, index, piece, lane); break;
    }
  }
  sum = warp_reduce(sum, plus);
  if (lane == 0) {
    sums[warp] = sum;
    places[warp] = i;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 0; w < kWarps;) {  // neighbours that ended with the same box add once
    i = places[w];
    for (sum = 0; w < kWarps && places[w] == i; ++w) sum += sums[w];
    if (sum) atomicAdd(reinterpret_cast<unsigned long long*>(digests + i), (unsigned long long)sum);
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_cuda_digests(const void* table, int64_t count, int64_t pieces, uint64_t* digests, void* stream) {
  using megarl::kMaxGrid, megarl::kWarps, megarl::kThreads;
  const cudaError_t error =
      cudaMemsetAsync(digests, 0, count * sizeof *digests, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess || pieces == 0) return error;
  const auto* boxes = static_cast<const megarl::Box*>(table);
  const int64_t blocks = (pieces + kWarps - 1) / kWarps;
  const dim3 grid((unsigned)(blocks < kMaxGrid ? blocks : kMaxGrid));
  MEGARL_LAUNCH(megarl::kernel, grid, dim3(kThreads), stream, count == 1 ? *boxes : megarl::Box{},
                count == 1 ? nullptr : boxes, count, pieces, digests);
  return cudaGetLastError();
}
