// The digest's arithmetic, modulo 2^64: the same on the CPU (T also a vector of 64-bit integers) and on a GPU.
//
// The logical tensor is read as blocks of 8 bytes, in row-major order. A block of bits v (little endian; elements that
// are not there are 0) with n elements adds (v + (v >> 32) + n) * key. The first factor is linear in the elements, so
// each may add its own part; no two blocks of n elements have the same one unless their upper word is all ones, and a
// changed high bit changes low bits of it too. Keys are odd, so a change within one block is always seen.
#pragma once
#include <cstdint>

#include "both.h"

namespace megarl {

constexpr uint64_t kSpread = 0x9e3779b97f4a7c15ull;  // 2^64 / golden ratio

// From (block + 1) * kSpread. The constant is one of Pelle Evensen's (rrmxmx).
template <class T>
MEGARL_BOTH inline __attribute__((always_inline)) T digest_key(T spread) {
  spread ^= spread >> 32;
  spread = spread * 0xd6e8feb86659fd93ull;
  spread ^= spread >> 29;
  return spread | 1;
}

template <class T>
MEGARL_BOTH inline __attribute__((always_inline)) T digest_content(T bits, uint64_t elements) {
  return bits + (bits >> 32) + elements;
}

// What one element adds. `byte` is its flat index times its size.
MEGARL_BOTH inline uint64_t digest_element(uint64_t bits, uint64_t byte) {
  return digest_content(bits << (byte % 8 * 8), 1) * digest_key((byte / 8 + 1) * kSpread);
}

}  // namespace megarl
