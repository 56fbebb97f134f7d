// One line of the digest: the sum of mix(flat index, element bits). Compiled once per instruction set.
#include <cstring>

#include "isa.h"

namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA) {
namespace {

// splitmix64's finaliser (Steele, Lea and Flood 2014) over bits + golden-ratio multiples of the index: every bit of
// either changes about half of the result's bits, so sums do not cancel as they would for a linear mix.
inline uint64_t mix(uint64_t index, uint64_t element) {
  uint64_t x = element + (index + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <class Element>
uint64_t line(const Element* data, int64_t count, int64_t stride, uint64_t index, uint64_t step) {
  uint64_t sum = 0;
  if (stride == 1 && step == 1) {
    for (int64_t i = 0; i < count; ++i) sum += mix(index + (uint64_t)i, data[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) sum += mix(index + (uint64_t)i * step, data[i * stride]);
  }
  return sum;
}

}  // namespace

uint64_t digest_line(const void* data, int itemsize, int64_t count, int64_t stride, uint64_t index, uint64_t step) {
  switch (itemsize) {
    case 1: return line(static_cast<const uint8_t*>(data), count, stride, index, step);
    case 2: return line(static_cast<const uint16_t*>(data), count, stride, index, step);
    case 4: return line(static_cast<const uint32_t*>(data), count, stride, index, step);
    default: return line(static_cast<const uint64_t*>(data), count, stride, index, step);
  }
}

}  // namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA)
