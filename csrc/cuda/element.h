// Stored element types on the device, 16 bytes at a time, and the few instructions that C++ has no name for.
#pragma once
#include <math.h>

#include "cuda/device.h"

namespace megarl {

template <class To, class From>
__device__ __forceinline__ To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

// Sixteen bytes of elements as one vector.
template <class Stored, int N>
__device__ __forceinline__ uint4 vector_of(const Stored (&x)[N]) {
  uint4 v;
  static_assert(sizeof v == sizeof x, "sixteen bytes");
  memcpy(&v, x, sizeof v);
  return v;
}

constexpr double kLog2E = 1.4426950408889634074, kLn2 = 0.69314718055994530942;

#ifdef MEGARL_DOUBLE
constexpr real kExp2Floor = -1100.0;  // 2^-1100 is 0
__device__ __forceinline__ real exp2_of(real x) { return exp2(x); }
__device__ __forceinline__ real at_least(real x, real floor) { return x < floor ? floor : x; }
#else
// From here down 2^x is 0: what lies below the smallest normal float is flushed.
constexpr real kExp2Floor = -150.0f;

// 2^x, relative error 2^-22; 0 for x < -126.
__device__ __forceinline__ float exp2_of(float x) {
#ifdef MEGARL_EMULATED
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : bits<float>(bits<uint32_t>(y) & ~1u);  // no better than the device
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// max(x, floor), but NaN for NaN.
__device__ __forceinline__ float at_least(float x, float floor) {
#ifdef MEGARL_EMULATED
  return x < floor ? floor : x;
#else
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(floor));
  return y;
#endif
}
#endif

__device__ __forceinline__ float greater(float a, float b) { return fmaxf(a, b); }  // NaN is not seen
__device__ __forceinline__ double greater(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

constexpr uint32_t kFloatNegInf = 0xff800000u;

// Every type has: Stored, kPerVector elements in 16 bytes, unpack and pack of such a vector, and Top, the running
// maximum of vectors in whatever form is cheapest.
struct Real {
  using Stored = real;
  using Top = real;
  static constexpr int kPerVector = 16 / sizeof(real);
  static __device__ __forceinline__ Stored neg_inf() { return -HUGE_VAL; }
  static __device__ __forceinline__ real value(Stored x) { return x; }
  static __device__ __forceinline__ Stored stored(real x) { return x; }
  static __device__ __forceinline__ void unpack(const uint4& v, real (&x)[kPerVector]) { memcpy(x, &v, sizeof v); }
  static __device__ __forceinline__ uint4 pack(const real (&x)[kPerVector]) { return vector_of(x); }
  static __device__ __forceinline__ Top lowest() { return neg_inf(); }
  static __device__ __forceinline__ Top higher(Top top, const uint4& v) {
    real x[kPerVector];
    unpack(v, x);
    for (int i = 0; i < kPerVector; ++i) top = greater(top, x[i]);
    return top;
  }
  static __device__ __forceinline__ real top_of(Top top) { return top; }
};

#ifndef MEGARL_DOUBLE
// Two elements to a 32-bit word; Half gives the conversions.
template <class Half>
struct Pairs {
  using Stored = uint16_t;
  using Top = uint32_t;  // the maxima of the even and of the odd elements
  static constexpr int kPerVector = 8;
  static __device__ __forceinline__ float value(Stored x) { return Half::low(x); }
  static __device__ __forceinline__ Stored stored(float x) { return (Stored)Half::pair(x, x); }
  static __device__ __forceinline__ Stored neg_inf() { return (Stored)Half::kNegInf; }
  static __device__ __forceinline__ void unpack(const uint4& v, float (&x)[8]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = Half::low(words[i]);
      x[2 * i + 1] = Half::high(words[i]);
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&x)[8]) {
    return {Half::pair(x[0], x[1]), Half::pair(x[2], x[3]), Half::pair(x[4], x[5]), Half::pair(x[6], x[7])};
  }
  static __device__ __forceinline__ Top lowest() { return Half::kNegInf | Half::kNegInf << 16; }
  static __device__ __forceinline__ Top higher(Top top, const uint4& v) {
    return Half::max2(Half::max2(top, v.x), Half::max2(Half::max2(v.y, v.z), v.w));
  }
  static __device__ __forceinline__ float top_of(Top top) { return greater(Half::low(top), Half::high(top)); }
};

#ifdef MEGARL_EMULATED
// NaN is not seen unless both are NaN, as on the device.
template <class Half>
uint32_t emulated_max2(uint32_t a, uint32_t b) {
  const auto pick = [](float x, float y, uint32_t p, uint32_t q) { return x > y || y != y ? p : q; };
  return (pick(Half::low(a), Half::low(b), a, b) & 0xffffu) | (pick(Half::high(a), Half::high(b), a, b) & 0xffff0000u);
}
#endif

struct BF16 : Pairs<BF16> {
  static constexpr uint32_t kNegInf = 0xff80u;
  static __device__ __forceinline__ float low(uint32_t w) { return bits<float>(w << 16); }
  static __device__ __forceinline__ float high(uint32_t w) { return bits<float>(w & 0xffff0000u); }
#ifdef MEGARL_EMULATED
  static uint32_t one(float x) {
    const uint32_t u = bits<uint32_t>(x);
    return x != x ? 0x7fffu : (u + ((u >> 16 & 1u) + 0x7fffu)) >> 16;
  }
  static uint32_t pair(float low, float high) { return one(low) | one(high) << 16; }
  static uint32_t max2(uint32_t a, uint32_t b) { return emulated_max2<BF16>(a, b); }
#else
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
  }
  static __device__ __forceinline__ uint32_t max2(uint32_t a, uint32_t b) {
    uint32_t w;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
    return w;
  }
#endif
};

struct F16 : Pairs<F16> {
  static constexpr uint32_t kNegInf = 0xfc00u;
#ifdef MEGARL_EMULATED
  static float low(uint32_t w) {
    _Float16 h;
    const uint16_t u = (uint16_t)w;
    memcpy(&h, &u, 2);
    return (float)h;
  }
  static float high(uint32_t w) { return low(w >> 16); }
  static uint32_t one(float x) { return x != x ? 0x7fffu : bits<uint16_t>((_Float16)x); }
  static uint32_t pair(float low, float high) { return one(low) | one(high) << 16; }
  static uint32_t max2(uint32_t a, uint32_t b) { return emulated_max2<F16>(a, b); }
#else
  static __device__ __forceinline__ float low(uint32_t w) {
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(w));
    return x;
  }
  static __device__ __forceinline__ float high(uint32_t w) {
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(w));
    return x;
  }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
  }
  static __device__ __forceinline__ uint32_t max2(uint32_t a, uint32_t b) {
    uint32_t w;
    asm("max.f16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
    return w;
  }
#endif
};
#endif

// 16 bytes at p, which will not be used again soon. Not aligned: element by element, into the same places.
template <class T, bool Aligned>
__device__ __forceinline__ uint4 load_vector(const typename T::Stored* p) {
  if constexpr (Aligned) {
    return __ldcs(reinterpret_cast<const uint4*>(p));
  } else {
    typename T::Stored x[T::kPerVector];
#pragma unroll
    for (int i = 0; i < T::kPerVector; ++i) x[i] = p[i];  // neighbours find theirs in the cache
    return vector_of(x);
  }
}

template <class T, bool Aligned>
__device__ __forceinline__ void store_vector(typename T::Stored* p, const uint4& v) {
  if constexpr (Aligned) {
    __stcs(reinterpret_cast<uint4*>(p), v);
  } else {
    typename T::Stored x[T::kPerVector];
    memcpy(x, &v, sizeof v);
#pragma unroll
    for (int i = 0; i < T::kPerVector; ++i) p[i] = x[i];
  }
}

}  // namespace megarl
