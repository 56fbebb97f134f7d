// The box whose digest is wanted, in as few dimensions as describe it.
#pragma once
#include <cstdint>

#include "both.h"

namespace megarl {

constexpr int kMaxDims = 8;  // of more than one element

struct Box {
  int dims = 0;
  int64_t sizes[kMaxDims], strides[kMaxDims];
  uint64_t steps[kMaxDims];

  // Where line `outer` (row-major over all dimensions but the last) begins: elements from the data, flat index.
  MEGARL_BOTH void line(int64_t outer, int64_t* element, uint64_t* index) const {
    for (int d = dims - 2; d >= 0; --d) {
      const int64_t i = outer % sizes[d];
      outer /= sizes[d];
      *element += i * strides[d];
      *index += (uint64_t)i * steps[d];
    }
  }
  MEGARL_BOTH int64_t width() const { return sizes[dims - 1]; }
  MEGARL_BOTH int64_t stride() const { return strides[dims - 1]; }
  MEGARL_BOTH uint64_t step() const { return steps[dims - 1]; }
};

// Leaves out dimensions of size 1, puts the others into the order of memory (sums do not mind) and joins neighbours
// that are one run both in memory and in the flat index. False where more than kMaxDims are left.
inline bool fold(int dims, const int64_t* sizes, const int64_t* strides, const uint64_t* steps, Box* box) {
  int order[kMaxDims], count = 0;
  for (int d = 0; d < dims; ++d) {
    if (sizes[d] == 1) continue;
    if (count == kMaxDims) return false;
    int at = count++;
    for (; at > 0 && strides[order[at - 1]] < strides[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  for (int i = 0; i < count; ++i) {
    const int d = order[i], last = box->dims - 1;
    if (last >= 0 && box->strides[last] == sizes[d] * strides[d] && box->steps[last] == (uint64_t)sizes[d] * steps[d]) {
      box->sizes[last] *= sizes[d];
      box->strides[last] = strides[d];
      box->steps[last] = steps[d];
      continue;
    }
    box->sizes[box->dims] = sizes[d];
    box->strides[box->dims] = strides[d];
    box->steps[box->dims++] = steps[d];
  }
  if (box->dims == 0) {
    box->sizes[0] = box->strides[0] = 1;
    box->steps[0] = 1;
    box->dims = 1;
  }
  return true;
}

}  // namespace megarl
