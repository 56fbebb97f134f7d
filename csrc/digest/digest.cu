// The digests of many boxes on a GPU. A warp takes pieces of a box; sums are of integers, so their order changes
// nothing.
#include "cuda/device.h"
#include "digest/box.h"
#include "digest/mix.h"

namespace megarl {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kLoads = 8;               // blocks that a lane has on the way at once, of one long line
constexpr int kFew = 4;                 // and where each has a line of its own
constexpr int kRound = kWarp * kLoads;  // units
constexpr int64_t kMaxGrid = 4096;
constexpr int64_t kMost = 1 << 30;  // boxes, and pieces: 8 TiB

// Calls `what` with a value of the unsigned type of `itemsize` bytes; that is the same for all lanes.
template <class What>
__device__ __forceinline__ void by_size(int itemsize, What what) {
  switch (itemsize) {
    case 1: return what(uint8_t{});
    case 2: return what(uint16_t{});
    case 4: return what(uint32_t{});
    default: return what(uint64_t{});
  }
}

// Units of a box from number `unit` of line `line` on, a round or `most` of them, all in lines that are evenly spaced.
// Of lines of a round and longer it has but one, cut at `unit`.
struct Span {
  const char* data;      // the first line's first element
  uint64_t first, step;  // its flat index, and how far on the next line's is
  int64_t gap;           // bytes from line to line
  int width;             // elements in a line, those beyond a round left out
  int units;             // in a line
  int begin, end;        // of the span, counted from the first line's first unit
  uint32_t inverse;  // 2^20 / units, rounded up: divides numbers below 512 without an error; 0: one line

  __device__ __forceinline__ Span(const Box& box, uint32_t line, int64_t unit, int64_t most) {
    const bool one = box.units >= kRound;
    int64_t element = 0, cut = 0, wide = box.width();
    first = box.offset;
    box.line(line, &element, &first);
    if (one) {
      cut = box.runs() ? (int64_t)((((first >> box.shift) + (uint64_t)unit) << box.shift) - first) : unit;
      if (cut < 0) cut = 0;
      first += (uint64_t)cut * box.step();
      wide -= cut;
    }
    data = static_cast<const char*>(box.data) + (element + cut * box.stride()) * box.itemsize;
    width = (int)min(wide, (int64_t)kRound * 16);
    units = one ? 0 : (int)box.units;
    begin = one ? 0 : (int)unit;
    inverse = one ? 0 : (1u << 20) / (uint32_t)units + 1;
    const int64_t left = one ? box.units - unit : box.lines_after(line) * box.units - unit;
    end = begin + (int)min(min(most, left), (int64_t)kRound);
    gap = box.dims > 1 ? box.strides[box.dims - 2] * box.itemsize : 0;
    step = box.dims > 1 ? box.steps[box.dims - 2] : 0;
  }
};

// A block of a span: its number in the logical tensor, where it begins (or would) in memory and in its line.
struct Block {
  const char* data;
  uint64_t number;
  int at;

  __device__ __forceinline__ Block(const Span& span, const Box& box, uint32_t unit) {
    const uint32_t over = unit * span.inverse >> 20;
    const uint64_t first = span.first + over * span.step;
    number = (first >> box.shift) + (unit - over * (uint32_t)span.units);
    at = (int)((uint32_t)number << box.shift) - (int)(uint32_t)first;
    data = span.data + over * span.gap + at * box.itemsize;
  }
  // Does it lie in the line, and can it be loaded as 8 bytes?
  __device__ __forceinline__ bool whole(const Span& span, const Box& box) const {
    // Without branches, so that loads are not kept apart.
    return (at >= 0) & (at + box.per_block() <= span.width) & (reinterpret_cast<uintptr_t>(data) % 8 == 0);
  }
  __device__ __forceinline__ const unsigned long long* words() const {
    return reinterpret_cast<const unsigned long long*>(data);
  }
};

// Adds the elements of a block that lie in its line, loaded one by one.
template <class Element>
__device__ __forceinline__ void add_slowly(uint64_t& sum, const Block& block, int width) {
  constexpr int kPer = 8 / sizeof(Element);
  uint64_t bits = 0, count = 0;
#pragma unroll(kPer > 4 ? 1 : kPer)
  for (int i = 0; i < kPer; ++i) {
    if (block.at + i < 0 || block.at + i >= width) continue;
    bits |= (uint64_t)reinterpret_cast<const Element*>(block.data)[i] << (i * 8 * sizeof(Element));
    ++count;
  }
  sum += digest_content(bits, count) * digest_key((block.number + 1) * kSpread);
}

// Adds the whole rounds of blocks that lie in a line from unit `unit` on, in `count` units; returns the units of them.
__device__ __forceinline__ int add_rounds(uint64_t& sum, const Box& box, uint32_t line, int64_t unit, int count,
                                          int lane) {
  int64_t element = 0;
  uint64_t first = box.offset;
  box.line(line, &element, &first);
  const uint64_t number = (first >> box.shift) + (uint64_t)unit;
  const int64_t at = (int64_t)((number << box.shift) - first);
  const auto* data = reinterpret_cast<const unsigned long long*>(static_cast<const char*>(box.data) +
                                                                 (element + at) * box.itemsize);
  if (at < 0 || reinterpret_cast<uintptr_t>(data) % 8) return 0;
  const int blocks = (int)min((box.width() - at) >> box.shift, (int64_t)count), per = box.per_block();
  uint64_t spread = (number + lane + 1) * kSpread;
  int done = 0;
  for (data += lane; done + kRound <= blocks; done += kRound, data += kRound, spread += kRound * kSpread) {
    uint64_t v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = __ldcs(data + i * kWarp);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      sum += digest_content(v[i], per) * digest_key(spread + (uint64_t)(i * kWarp) * kSpread);
  }
  return done;
}

// Adds blocks from, from + kWarp, ... of a span, kFew of them, each of whatever line it is in.
__device__ __forceinline__ void add_few(uint64_t& sum, const Span& span, const Box& box, int from) {
  uint64_t v[kFew], numbers[kFew];
  unsigned whole = 0, rest = 0;  // bits of the kFew blocks
#pragma unroll
  for (int i = 0; i < kFew; ++i) {
    const int unit = from + i * kWarp;
    const Block block(span, box, (uint32_t)unit);
    const bool there = unit < span.end, fast = there & block.whole(span, box);
    numbers[i] = block.number;
    v[i] = fast ? __ldcs(block.words()) : 0;
    whole |= (unsigned)fast << i;
    rest |= (unsigned)(there & !fast) << i;
  }
#pragma unroll
  for (int i = 0; i < kFew; ++i)
    sum += digest_content(v[i], whole >> i & 1 ? box.per_block() : 0) * digest_key((numbers[i] + 1) * kSpread);
#pragma unroll 1
  for (; rest; rest &= rest - 1) {  // a line's first and last block, and all of a line that is not aligned
    const Block block(span, box, (uint32_t)(from + (__ffs(rest) - 1) * kWarp));
    by_size(box.itemsize, [&](auto x) { add_slowly<decltype(x)>(sum, block, span.width); });
  }
}

// Adds the elements of a span whose lines are no runs.
template <class Element>
__device__ __forceinline__ void add_elements(uint64_t& sum, const Span& span, const Box& box, int lane) {
#pragma unroll 2
  for (int unit = span.begin + lane; unit < span.end; unit += kWarp) {
    const uint32_t over = (uint32_t)unit * span.inverse >> 20, i = (uint32_t)unit - over * (uint32_t)span.units;
    const auto* line = reinterpret_cast<const Element*>(span.data + over * span.gap);
    sum += digest_element(line[i * box.stride()], (span.first + over * span.step + i * box.step()) * sizeof(Element));
  }
}

// Adds `count` units of a box from number `unit` of line `line` on.
__device__ __forceinline__ void add_piece(uint64_t& sum, const Box& box, uint32_t line, int64_t unit, int count,
                                          int lane) {
  while (count > 0) {
    int done = box.runs() && box.units >= kRound ? add_rounds(sum, box, line, unit, count, lane) : 0;
    if (done == 0) {  // the same for all lanes
      const Span span(box, line, unit, count);
      done = span.end - span.begin;
      if (!box.runs()) {
        by_size(box.itemsize, [&](auto x) { add_elements<decltype(x)>(sum, span, box, lane); });
      } else {
#pragma unroll 1
        for (int from = span.begin; from < span.end; from += kFew * kWarp) add_few(sum, span, box, from + lane);
      }
    }
    unit += done;
    const uint32_t over = unit >= box.units ? (uint32_t)(unit / box.units) : 0;
    line += over;
    unit -= over * box.units;
    count -= done;
  }
}

// The last box of [from, count) that begins at or before `piece`; a warp looks at 32 of them at once.
__device__ __forceinline__ int box_of(const Box* boxes, int from, int count, uint32_t piece, int lane) {
  while (count - from > 1) {
    const int step = (count - from + kWarp - 1) / kWarp, at = from + lane * step;
    const int begun = __popc(__ballot_sync(kAllLanes, at < count && boxes[at].first <= piece));
    from += (begun - 1) * step;
    count = min(count, from + step);
  }
  return from;
}

// `boxes` is null where there is one box: `only`, which then needs no copy to the device.
__global__ void __launch_bounds__(kThreads, 4)
    kernel(const __grid_constant__ Box only, const Box* boxes, int count, uint32_t pieces, uint64_t* digests) {
  __shared__ uint64_t sums[kWarps];
  __shared__ int last[kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const auto plus = [](uint64_t a, uint64_t b) { return a + b; };
  int i = 0;
  uint64_t sum = 0;
  for (uint32_t next = blockIdx.x * kWarps + warp; next < pieces; next += gridDim.x * kWarps) {
    if (const int found = box_of(boxes, i, count, next, lane); found != i) {
      sum = warp_reduce(sum, plus);
      if (lane == 0) atomicAdd(reinterpret_cast<unsigned long long*>(digests + i), (unsigned long long)sum);
      sum = 0;
      i = found;
    }
    const Box& box = boxes ? boxes[i] : only;
    const int64_t unit = ((int64_t)next - box.first) * kPiece;
    const uint32_t line = box.lines == 1 ? 0 : (uint32_t)((uint64_t)unit / (uint64_t)box.units);
    add_piece(sum, box, line, unit - line * box.units, (int)min(kPiece, box.lines * box.units - unit), lane);
  }
  sum = warp_reduce(sum, plus);
  if (lane == 0) {
    sums[warp] = sum;
    last[warp] = i;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 0; w < kWarps;) {  // neighbours that ended with the same box add once
    i = last[w];
    for (sum = 0; w < kWarps && last[w] == i; ++w) sum += sums[w];
    if (sum) atomicAdd(reinterpret_cast<unsigned long long*>(digests + i), (unsigned long long)sum);
  }
}

}  // namespace
}  // namespace megarl

extern "C" int megarl_cuda_digests(const void* table, int64_t count, int64_t pieces, uint64_t* digests, void* stream) {
  using megarl::kMaxGrid, megarl::kMost, megarl::kThreads, megarl::kWarps;
  const cudaError_t error =
      cudaMemsetAsync(digests, 0, count * sizeof *digests, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess || pieces == 0) return error;
  if (count > kMost || pieces > kMost) return cudaErrorInvalidValue;
  const auto* boxes = static_cast<const megarl::Box*>(table);
  const int64_t blocks = (pieces + kWarps - 1) / kWarps;
  const dim3 grid((unsigned)(blocks < kMaxGrid ? blocks : kMaxGrid));
  MEGARL_LAUNCH(megarl::kernel, grid, dim3(kThreads), stream, count == 1 ? *boxes : megarl::Box{},
                count == 1 ? nullptr : boxes, (int)count, (uint32_t)pieces, digests);
  return cudaGetLastError();
}
