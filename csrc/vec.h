// Sixteen lanes of float, whatever the machine's registers: the order of every sum is fixed by this width, so all
// instruction sets give the same bits. Everything here is forced inline: one copy per instruction set, none shared.
#pragma once
#include <cstdint>
#include <cstring>

#define MEGARL_INLINE static inline __attribute__((always_inline))

namespace {

constexpr int kLanes = 16;
typedef float vfloat __attribute__((vector_size(4 * kLanes)));
typedef int32_t vint __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vuint __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vhalf __attribute__((vector_size(2 * kLanes)));

MEGARL_INLINE vfloat splat(float x) { return x - vfloat{}; }
template <class To, class From>
MEGARL_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
MEGARL_INLINE vfloat select(vint mask, vfloat yes, vfloat no) {
  return bits<vfloat>((mask & bits<vint>(yes)) | (~mask & bits<vint>(no)));
}
MEGARL_INLINE vuint select(vint mask, vuint yes, vuint no) {
  return ((vuint)mask & yes) | (~(vuint)mask & no);
}

// Pairwise, in a fixed order.
MEGARL_INLINE float sum(vfloat v) {
  float a[kLanes];
  std::memcpy(a, &v, sizeof a);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) a[i] += a[i + n];
  return a[0];
}
// NaN lanes are not seen (they reach the sums instead).
MEGARL_INLINE float max(vfloat v) {
  float a[kLanes];
  std::memcpy(a, &v, sizeof a);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) a[i] = a[i] > a[i + n] ? a[i] : a[i + n];
  return a[0];
}

// Where exp is taken as 0: e^-87.33 is the smallest normal float.
constexpr float kExpFloor = -87.33f;

// exp(x) for x <= about 0.5, 0 below kExpFloor, NaN for NaN. Relative error <= 2e-7 (Cephes polynomial, no FMA).
MEGARL_INLINE vfloat vexp(vfloat x) {
  const vint zero = x < splat(kExpFloor);
  const vfloat y = select(zero, vfloat{}, x);
  const vfloat magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const vfloat shifted = y * 1.44269504088896341f + magic;
  const vfloat n = shifted - magic;
  const vfloat r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  vfloat p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const vuint scale = (bits<vuint>(shifted) - bits<vuint>(magic) + 127u) << 23;
  return select(zero, vfloat{}, p * bits<vfloat>(scale));
}

// Stored element types. Conversions are done on the bits, so that they too are the same everywhere.
struct F32 {
  using Element = float;
  MEGARL_INLINE vfloat load(const Element* p) { vfloat v; std::memcpy(&v, p, sizeof v); return v; }
  MEGARL_INLINE void store(Element* p, vfloat v) { std::memcpy(p, &v, sizeof v); }
};

struct BF16 {
  using Element = uint16_t;
  MEGARL_INLINE vfloat load(const Element* p) {
    vhalf h;
    std::memcpy(&h, p, sizeof h);
    return bits<vfloat>(__builtin_convertvector(h, vuint) << 16);
  }
  MEGARL_INLINE void store(Element* p, vfloat v) {  // nearest, ties to even; NaN stays NaN
    const vuint u = bits<vuint>(v);
    const vuint rounded = (u + (0x7fffu + ((u >> 16) & 1u))) >> 16;
    const vhalf h = __builtin_convertvector(select(v != v, (u >> 16) | 0x40u, rounded), vhalf);
    std::memcpy(p, &h, sizeof h);
  }
};

struct F16 {
  using Element = uint16_t;
  MEGARL_INLINE vfloat load(const Element* p) {
    vhalf h;
    std::memcpy(&h, p, sizeof h);
    const vuint u = __builtin_convertvector(h, vuint);
    const vuint magnitude = (u & 0x7fffu) << 13;
    // Times 2^112 moves the exponent's bias and normalises subnormals; infinity and NaN need all exponent bits set.
    const vuint scaled = bits<vuint>(bits<vfloat>(magnitude) * 5.192296858534828e33f);
    const vint special = (vint)(magnitude >= (0x7c00u << 13));
    return bits<vfloat>(select(special, scaled | 0x7f800000u, scaled) | ((u & 0x8000u) << 16));
  }
  MEGARL_INLINE void store(Element* p, vfloat v) {  // nearest, ties to even
    const vuint u = bits<vuint>(v);
    const vuint a = u & 0x7fffffffu;
    const vuint normal = (a - (112u << 23) + (0xfffu + ((a >> 13) & 1u))) >> 13;
    // Adding 0.5 leaves the subnormal half's bits, correctly rounded, at the bottom of the sum.
    const vuint small = bits<vuint>(bits<vfloat>(a) + 0.5f) - 0x3f000000u;
    vuint h = select((vint)(a < (113u << 23)), small, normal);
    h = select((vint)(a >= 0x477ff000u), vuint{} + 0x7c00u, h);
    h = select((vint)(a > 0x7f800000u), vuint{} + 0x7e00u, h);
    const vhalf out = __builtin_convertvector(h | ((u >> 16) & 0x8000u), vhalf);
    std::memcpy(p, &out, sizeof out);
  }
};

}  // namespace
