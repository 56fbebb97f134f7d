// What a kernel file knows of the instruction set that it is compiled for.
#pragma once

#define MEGARL_INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

}  // namespace
