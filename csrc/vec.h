// Sixteen lanes of float, whatever the machine's registers: the order of every sum is fixed by this width, so all
// instruction sets give the same bits. Everything here is forced inline: one copy per instruction set, none shared.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "megarl.h"
#include "registers.h"

namespace {

constexpr int kLanes = 16;
// Lanes of one register. (GCC computes vectors that are wider than a register one element at a time.)
constexpr int kWidth = kRegisterBytes / sizeof(float);
constexpr int kParts = kLanes / kWidth;

template <class T>
struct Lanes {
  typedef T Part __attribute__((vector_size(sizeof(T) * kWidth)));
  Part part[kParts];
};
using vreal = Lanes<real>;
#ifdef MEGARL_DOUBLE
using vmask = Lanes<int64_t>;  // -1 where true
using vuint = Lanes<uint64_t>;
#else
using vmask = Lanes<int32_t>;
using vuint = Lanes<uint32_t>;
#endif
using vhalf = Lanes<uint16_t>;

template <class T>
MEGARL_INLINE Lanes<T> splat(T x) {
  Lanes<T> v;
  for (int i = 0; i < kParts; ++i) v.part[i] = x - typename Lanes<T>::Part{};
  return v;
}
template <class To, class From>
MEGARL_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

#define MEGARL_BINARY(op)                                              \
  template <class T>                                                   \
  MEGARL_INLINE Lanes<T> operator op(Lanes<T> a, Lanes<T> b) {         \
    for (int i = 0; i < kParts; ++i) a.part[i] = a.part[i] op b.part[i]; \
    return a;                                                          \
  }                                                                    \
  template <class T>                                                   \
  MEGARL_INLINE Lanes<T> operator op(Lanes<T> a, T b) {                \
    return a op splat(b);                                              \
  }
MEGARL_BINARY(+)
MEGARL_BINARY(-)
MEGARL_BINARY(*)
MEGARL_BINARY(/)
MEGARL_BINARY(&)
MEGARL_BINARY(|)
MEGARL_BINARY(^)
#undef MEGARL_BINARY

#define MEGARL_COMPARE(op)                                                     \
  template <class T>                                                           \
  MEGARL_INLINE vmask operator op(Lanes<T> a, Lanes<T> b) {                     \
    vmask mask;                                                                 \
    for (int i = 0; i < kParts; ++i) mask.part[i] = (vmask::Part)(a.part[i] op b.part[i]); \
    return mask;                                                               \
  }
MEGARL_COMPARE(<)
MEGARL_COMPARE(>)
MEGARL_COMPARE(>=)
MEGARL_COMPARE(!=)
#undef MEGARL_COMPARE

template <class T>
MEGARL_INLINE Lanes<T>& operator+=(Lanes<T>& a, Lanes<T> b) { return a = a + b; }
MEGARL_INLINE vreal operator-(vreal a) {
  for (int i = 0; i < kParts; ++i) a.part[i] = -a.part[i];
  return a;
}
MEGARL_INLINE vuint operator<<(vuint a, int n) {
  for (int i = 0; i < kParts; ++i) a.part[i] <<= n;
  return a;
}
MEGARL_INLINE vuint operator>>(vuint a, int n) {
  for (int i = 0; i < kParts; ++i) a.part[i] >>= n;
  return a;
}
template <class T>
MEGARL_INLINE Lanes<T> select(vmask mask, Lanes<T> yes, Lanes<T> no) {
  for (int i = 0; i < kParts; ++i) yes.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
  return yes;
}
// a * b + c, rounded once: on every machine the same bits (slow where it has no such instruction).
MEGARL_INLINE vreal fma(vreal a, vreal b, vreal c) {
  for (int i = 0; i < kParts; ++i) {
#if defined(__AVX512F__) && !defined(MEGARL_DOUBLE)
    c.part[i] = (vreal::Part)_mm512_fmadd_ps((__m512)a.part[i], (__m512)b.part[i], (__m512)c.part[i]);
#elif defined(__FMA__) && !defined(MEGARL_DOUBLE)
    c.part[i] = (vreal::Part)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#else
    vreal::Part sum = c.part[i];
    for (int j = 0; j < kWidth; ++j) sum[j] = std::fma(a.part[i][j], b.part[i][j], sum[j]);
    c.part[i] = sum;
#endif
  }
  return c;
}
MEGARL_INLINE vreal fma(vreal a, real b, vreal c) { return fma(a, splat(b), c); }
MEGARL_INLINE vreal fma(vreal a, vreal b, real c) { return fma(a, b, splat(c)); }
MEGARL_INLINE vuint widen(vhalf h) {
  vuint v;
  for (int i = 0; i < kParts; ++i) v.part[i] = __builtin_convertvector(h.part[i], vuint::Part);
  return v;
}
MEGARL_INLINE vhalf narrow(vuint v) {
  vhalf h;
  for (int i = 0; i < kParts; ++i) h.part[i] = __builtin_convertvector(v.part[i], vhalf::Part);
  return h;
}
MEGARL_INLINE real first(vreal v) { return v.part[0][0]; }
MEGARL_INLINE vmask lanes_below(int64_t count) {
  using Lane = decltype(vmask::Part{}[0] + 0);
  const Lane number[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vmask lane;
  std::memcpy(&lane, number, sizeof lane);
  return lane < splat((Lane)count);
}

// In lane order.
MEGARL_INLINE double sum(vreal v) {
  real a[kLanes];
  std::memcpy(a, &v, sizeof a);
  double total = 0.0;
  for (int i = 0; i < kLanes; ++i) total += a[i];
  return total;
}
// Adds x to high and what the rounding lost to low (Knuth's two-sum).
MEGARL_INLINE void add_exactly(vreal x, vreal& high, vreal& low) {
  const vreal s = high + x, back = s - high;
  low += (high - (s - back)) + (x - back);
  high = s;
}
// NaN lanes are not seen (they reach the sums instead).
MEGARL_INLINE real max(vreal v) {
  real a[kLanes];
  std::memcpy(a, &v, sizeof a);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) a[i] = a[i] > a[i + n] ? a[i] : a[i + n];
  return a[0];
}

#ifdef MEGARL_DOUBLE
constexpr real kExpFloor = -708.0;
MEGARL_INLINE vreal vexp(vreal x) {
  for (int i = 0; i < kParts; ++i)
    for (int j = 0; j < kWidth; ++j) x.part[i][j] = x.part[i][j] < kExpFloor ? 0.0 : std::exp(x.part[i][j]);
  return x;
}
#else
// Where exp is taken as 0: e^-87.33 is the smallest normal float.
constexpr real kExpFloor = -87.33f;

// exp(x) for x <= about 0.5, 0 below kExpFloor, NaN for NaN. Relative error <= 2e-7 (Cephes polynomial).
MEGARL_INLINE vreal vexp(vreal x) {
  const vmask zero = x < splat(kExpFloor);
  const vreal y = select(zero, vreal{}, x);
  const vreal magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const vreal shifted = fma(y, 1.44269504088896341f, magic);
  const vreal n = shifted - magic;
  const vreal r = fma(n, 2.12194440e-4f, fma(n, -0.693359375f, y));
  vreal p = fma(r, 1.9875691500e-4f, splat(1.3981999507e-3f));
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  p = fma(p, r * r, r) + 1.0f;
  const vuint scale = (bits<vuint>(shifted) - bits<vuint>(magic) + 127u) << 23;
  return select(zero, vreal{}, p * bits<vreal>(scale));
}
#endif

// Stored element types. Conversions are done on the bits, so that they too are the same everywhere.
struct Real {
  using Element = real;
  MEGARL_INLINE vreal load(const Element* p) { vreal v; std::memcpy(&v, p, sizeof v); return v; }
  MEGARL_INLINE void store(Element* p, vreal v) { std::memcpy(p, &v, sizeof v); }
};

#ifndef MEGARL_DOUBLE
struct BF16 {
  using Element = uint16_t;
  MEGARL_INLINE vreal load(const Element* p) {
    vhalf h;
    std::memcpy(&h, p, sizeof h);
    return bits<vreal>(widen(h) << 16);
  }
  MEGARL_INLINE void store(Element* p, vreal v) {  // nearest, ties to even; NaN stays NaN
    const vuint u = bits<vuint>(v);
    const vuint rounded = (u + (((u >> 16) & 1u) + 0x7fffu)) >> 16;
    const vhalf h = narrow(select(v != v, (u >> 16) | 0x40u, rounded));
    std::memcpy(p, &h, sizeof h);
  }
};

struct F16 {
  using Element = uint16_t;
  MEGARL_INLINE vreal load(const Element* p) {
    vhalf h;
    std::memcpy(&h, p, sizeof h);
    const vuint u = widen(h);
    const vuint magnitude = (u & 0x7fffu) << 13;
    // Times 2^112 moves the exponent's bias and normalises subnormals; infinity and NaN need all exponent bits set.
    const vuint scaled = bits<vuint>(bits<vreal>(magnitude) * 5.192296858534828e33f);
    const vmask special = magnitude >= splat(0x7c00u << 13);
    return bits<vreal>(select(special, scaled | 0x7f800000u, scaled) | ((u & 0x8000u) << 16));
  }
  MEGARL_INLINE void store(Element* p, vreal v) {  // nearest, ties to even
    const vuint u = bits<vuint>(v);
    const vuint a = u & 0x7fffffffu;
    const vuint normal = (a - (112u << 23) + (((a >> 13) & 1u) + 0xfffu)) >> 13;
    // Adding 0.5 leaves the subnormal half's bits, correctly rounded, at the bottom of the sum.
    const vuint small = bits<vuint>(bits<vreal>(a) + 0.5f) - 0x3f000000u;
    vuint h = select(a < splat(113u << 23), small, normal);
    h = select(a >= splat(0x477ff000u), splat(0x7c00u), h);
    h = select(a > splat(0x7f800000u), splat(0x7e00u), h);
    const vhalf out = narrow(h | ((u >> 16) & 0x8000u));
    std::memcpy(p, &out, sizeof out);
  }
};

#endif

}  // namespace
