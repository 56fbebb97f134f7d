// One line of the digest. Compiled once per instruction set; integers are the same everywhere.
#include <cstring>

#include "digest/mix.h"
#include "isa.h"
#include "registers.h"

namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA) {
namespace {

constexpr int kWords = kRegisterBytes / sizeof(uint64_t);
typedef uint64_t Words __attribute__((vector_size(8 * kWords)));

// `count` whole blocks of `elements` elements each, the first of them number `block`.
inline uint64_t whole_blocks(const char* data, int64_t count, uint64_t block, uint64_t elements) {
  constexpr int kUnroll = 4;
  Words lane, sum = {};
  for (int i = 0; i < kWords; ++i) lane[i] = (uint64_t)i * megarl::kSpread;
  Words spread = lane + (block + 1) * megarl::kSpread;
  const auto add = [&](int64_t b, Words& to) __attribute__((always_inline)) {
    Words v;
    std::memcpy(&v, data + b * 8, sizeof v);
    to += megarl::digest_content(v, elements) * megarl::digest_key(spread);
    spread += kWords * megarl::kSpread;
  };
  int64_t b = 0;
  if (count >= kUnroll * kWords) {
    Words sums[kUnroll] = {};
    for (; b + kUnroll * kWords <= count; b += kUnroll * kWords)
      for (int k = 0; k < kUnroll; ++k) add(b + k * kWords, sums[k]);
    for (const Words& s : sums) sum += s;
  }
  for (; b + kWords <= count; b += kWords) add(b, sum);
  uint64_t total = 0;
  for (int i = 0; i < kWords; ++i) total += sum[i];
  for (; b < count; ++b) {
    uint64_t v;
    std::memcpy(&v, data + b * 8, sizeof v);
    total += megarl::digest_content(v, elements) * megarl::digest_key((block + (uint64_t)b + 1) * megarl::kSpread);
  }
  return total;
}

template <class Element>
uint64_t elements(const Element* data, int64_t count, int64_t stride, uint64_t index, uint64_t step) {
  uint64_t sum = 0;
  if (stride == 1) {  // a loop that vectorises
    for (int64_t i = 0; i < count; ++i)
      sum += megarl::digest_element(data[i], (index + (uint64_t)i * step) * sizeof(Element));
  } else {
    for (int64_t i = 0; i < count; ++i)
      sum += megarl::digest_element(data[i * stride], (index + (uint64_t)i * step) * sizeof(Element));
  }
  return sum;
}

template <class Element>
uint64_t line(const Element* data, int64_t count, int64_t stride, uint64_t index, uint64_t step) {
  constexpr int64_t kPer = 8 / sizeof(Element);
  if (stride != 1 || step != 1) return elements(data, count, stride, index, step);
  const int64_t lead = (int64_t)(-index % kPer), head = lead < count ? lead : count, blocks = (count - head) / kPer;
  const int64_t tail = head + blocks * kPer;
  return elements(data, head, 1, index, 1) +
         whole_blocks(reinterpret_cast<const char*>(data + head), blocks, (index + (uint64_t)head) / kPer, kPer) +
         elements(data + tail, count - tail, 1, index + (uint64_t)tail, 1);
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
