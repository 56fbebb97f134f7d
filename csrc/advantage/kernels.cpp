// Generalised advantage estimation of a piece of a sequence, from its end. Compiled once per instruction set.
//
// A_t = d_t + c A_{t+1} one token after the other waits for eight cycles a token. Eight tokens at a time, with
// x_j = sum over the block's k >= j of c^(k-j) d_k in three steps, it is A_j = x_j + c^(8-j) A_8: only the block's
// first token waits for the block behind it. The order of every sum is that of the eight, whatever the registers.
#include <cmath>
#include <cstring>
#include <utility>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "isa.h"
#include "registers.h"

namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA) {
namespace {

constexpr int kBlock = 8;
constexpr int kWidth = kRegisterBytes / sizeof(double);
constexpr int kParts = kBlock / kWidth;

typedef double Part __attribute__((vector_size(sizeof(double) * kWidth)));
typedef real RealPart __attribute__((vector_size(sizeof(real) * kWidth)));

struct Block {
  Part part[kParts];
};

// Fused everywhere, by the C library where the machine cannot: the same bits.
MEGARL_INLINE Part fma(Part a, Part b, Part c) {
#if defined(__AVX512F__)
  return (Part)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Part)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  for (int i = 0; i < kWidth; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}
MEGARL_INLINE Part fma(double a, Part b, Part c) { return fma(a - Part{}, b, c); }

MEGARL_INLINE Block load(const real* p) {
  Block b;
  for (int i = 0; i < kParts; ++i) {
    RealPart x;
    std::memcpy(&x, p + i * kWidth, sizeof x);
    b.part[i] = __builtin_convertvector(x, Part);
  }
  return b;
}
MEGARL_INLINE void store(real* p, const Block& b) {
  for (int i = 0; i < kParts; ++i) {
    const RealPart x = __builtin_convertvector(b.part[i], RealPart);
    std::memcpy(p + i * kWidth, &x, sizeof x);
  }
}

template <int by, int... lane>
MEGARL_INLINE Part join(Part a, Part b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane + by)...);
}
// x_j += factor * x_{j + by}, where x is 0 behind the block.
template <int by>
MEGARL_INLINE void add_shifted(Block& x, double factor) {
  for (int i = 0; i < kParts; ++i) {
    const int from = i + by / kWidth;
    const Part a = from < kParts ? x.part[from] : Part{}, b = from + 1 < kParts ? x.part[from + 1] : Part{};
    x.part[i] = fma(factor, join<by % kWidth>(a, b, std::make_integer_sequence<int, kWidth>()), x.part[i]);
  }
}

struct Factors {
  double gamma, c, c2, c4, c8;
  Block powers;  // c^8 ... c^1
};

// Returns A of the block's first token, given that of the token behind the block.
MEGARL_INLINE double step(const Factors& f, const real* rewards, const real* values, const real* next_values,
                          double behind, real* advantages, real* returns) {
  const Block v = load(values), next = load(next_values);
  Block x = load(rewards);
  for (int i = 0; i < kParts; ++i) x.part[i] = fma(f.gamma, next.part[i], x.part[i]) - v.part[i];
  add_shifted<1>(x, f.c);
  add_shifted<2>(x, f.c2);
  add_shifted<4>(x, f.c4);
  const double first = std::fma(f.c8, behind, x.part[0][0]);  // the only thing that the block in front waits for
  for (int i = 0; i < kParts; ++i) x.part[i] = fma(behind, f.powers.part[i], x.part[i]);
  store(advantages, x);
  for (int i = 0; i < kParts; ++i) x.part[i] += v.part[i];
  store(returns, x);
  return first;
}

MEGARL_INLINE Factors factors(double gamma, double lam) {
  const double c = gamma * lam, c2 = c * c;
  double powers[kBlock];
  for (int j = kBlock - 1; j >= 0; --j) powers[j] = j == kBlock - 1 ? c : powers[j + 1] * c;
  Factors f{gamma, c, c2, c2 * c2, powers[0], {}};
  std::memcpy(&f.powers, powers, sizeof powers);
  return f;
}

}  // namespace

// next_value: of the token behind the piece; behind: A of that token.
void gae_piece(const real* rewards, const real* values, int64_t count, real next_value, double behind, double gamma,
               double lam, real* advantages, real* returns) {
  const Factors f = factors(gamma, lam);
  // The block at the end may lack the value behind it, that at the start tokens: both go through buffers.
  const auto buffered = [=](int64_t start, int64_t n, real next, double after) {
    real r[kBlock] = {}, v[kBlock + 1] = {}, a[kBlock], q[kBlock];
    std::memcpy(r + kBlock - n, rewards + start, n * sizeof(real));
    std::memcpy(v + kBlock - n, values + start, n * sizeof(real));
    v[kBlock] = next;
    const double first = step(f, r, v, v + 1, after, a, q);
    std::memcpy(advantages + start, a + kBlock - n, n * sizeof(real));
    std::memcpy(returns + start, q + kBlock - n, n * sizeof(real));
    return first;
  };
  int64_t t = count - (count < kBlock ? count : kBlock);
  behind = buffered(t, count - t, next_value, behind);
  for (; t >= kBlock; t -= kBlock) {
    const int64_t start = t - kBlock;
    behind = step(f, rewards + start, values + start, values + start + 1, behind, advantages + start, returns + start);
  }
  if (t > 0) buffered(0, t, values[t], behind);
}

// A of the piece's first token, were A behind the piece 0. count is a multiple of eight; values[count] is not read.
double gae_total(const real* rewards, const real* values, int64_t count, real next_value, double gamma, double lam) {
  const Factors f = factors(gamma, lam);
  Block sum{};  // lane j: over the blocks, c^8 from one to the next
  for (int64_t t = count - kBlock; t >= 0; t -= kBlock) {
    real last[kBlock];
    if (t + kBlock == count) {
      std::memcpy(last, values + t + 1, (kBlock - 1) * sizeof(real));
      last[kBlock - 1] = next_value;
    }
    const Block next = load(t + kBlock == count ? last : values + t + 1), r = load(rewards + t), v = load(values + t);
    for (int i = 0; i < kParts; ++i)
      sum.part[i] = fma(f.c8, sum.part[i], fma(f.gamma, next.part[i], r.part[i]) - v.part[i]);
  }
  double lane[kBlock], total = 0.0;
  std::memcpy(lane, &sum, sizeof lane);
  for (int j = kBlock - 1; j >= 0; --j) total = lane[j] + f.c * total;
  return total;
}

}  // namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA)
