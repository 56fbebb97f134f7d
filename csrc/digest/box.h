// The boxes whose digests are wanted, each in as few dimensions as describe it.
#pragma once
#include <cstdint>

#include "both.h"
#include "megarl.h"

namespace megarl {

constexpr int kMaxDims = 8;  // of more than one element
constexpr int64_t kPiece = 1024;  // units of work in a piece: blocks of 8 bytes, or single elements; of many lines

struct Box {
  const void* data;
  uint64_t offset;  // flat index of the first element
  int64_t first;    // pieces of the boxes before
  int64_t lines, units;  // fewer than 2^32 lines; units of work in a line
  int32_t dims;
  int16_t itemsize, shift;  // 2^shift elements in a block of 8 bytes
  int64_t sizes[kMaxDims], strides[kMaxDims];
  uint64_t steps[kMaxDims];

  // Where line `outer` (row-major over all dimensions but the last) begins: elements from the data, flat index.
  MEGARL_BOTH void line(uint32_t outer, int64_t* element, uint64_t* index) const {
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (int d = dims - 2; d >= 0; --d) {
      const uint32_t above = d > 0 ? outer / (uint32_t)sizes[d] : 0, i = outer - above * (uint32_t)sizes[d];
      *element += i * strides[d];
      *index += i * steps[d];
      outer = above;
    }
  }
  // Lines that are evenly spaced from line `outer` on, with it.
  MEGARL_BOTH int64_t lines_after(uint32_t outer) const {
    if (dims <= 2) return lines - outer;
    return sizes[dims - 2] - outer % (uint32_t)sizes[dims - 2];
  }
  MEGARL_BOTH int64_t width() const { return sizes[dims - 1]; }
  MEGARL_BOTH int64_t stride() const { return strides[dims - 1]; }
  MEGARL_BOTH uint64_t step() const { return steps[dims - 1]; }
  MEGARL_BOTH int per_block() const { return 1 << shift; }
  // Do a line's elements follow one another both in memory and in the flat index?
  MEGARL_BOTH bool runs() const { return stride() == 1 && step() == 1; }
};
static_assert(sizeof(Box) == MEGARL_DIGEST_BOX_BYTES, "what callers allocate");

}  // namespace megarl
