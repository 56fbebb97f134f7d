// One sequence of generalised advantage estimation, from its end. Compiled once per instruction set.
//
// A_t = d_t + c A_{t+1} one token after the other waits for eight cycles a token. Eight tokens at a time, with
// x_j = sum over the block's k >= j of c^(k-j) d_k in three steps, it is A_j = x_j + c^(8-j) A_8: only the block's
// first token waits for the block behind it. The order of every sum is that of the eight, whatever the registers.
#include <cstring>
#include <utility>

#include "isa.h"

namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA) {
namespace {

constexpr int kBlock = 8;
#if defined(__AVX512F__)
constexpr int kWidth = 8;  // doubles of one register
#elif defined(__AVX2__)
constexpr int kWidth = 4;
#else
constexpr int kWidth = 2;
#endif
constexpr int kParts = kBlock / kWidth;

typedef double Part __attribute__((vector_size(sizeof(double) * kWidth)));
typedef real RealPart __attribute__((vector_size(sizeof(real) * kWidth)));

struct Block {
  Part part[kParts];
};

#define MEGARL_INLINE static inline __attribute__((always_inline))

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
    x.part[i] += factor * join<by % kWidth>(a, b, std::make_integer_sequence<int, kWidth>());
  }
}

struct Recursion {
  double gamma, c;
  Block powers;  // c^8 ... c^1
  double behind = 0.0;  // A of the token behind the block

  Recursion(double gamma, double lam) : gamma(gamma), c(gamma * lam) {
    double p[kBlock];
    p[kBlock - 1] = c;
    for (int j = kBlock - 2; j >= 0; --j) p[j] = p[j + 1] * c;
    std::memcpy(&powers, p, sizeof p);
  }

  __attribute__((always_inline)) void block(const real* rewards, const real* values, const real* next_values,
                                            real* advantages, real* returns) {
    const Block v = load(values), next = load(next_values);
    Block x = load(rewards);
    for (int i = 0; i < kParts; ++i) x.part[i] = (x.part[i] + gamma * next.part[i]) - v.part[i];
    const double c2 = c * c;
    add_shifted<1>(x, c);
    add_shifted<2>(x, c2);
    add_shifted<4>(x, c2 * c2);
    for (int i = 0; i < kParts; ++i) x.part[i] += powers.part[i] * behind;
    behind = x.part[0][0];
    store(advantages, x);
    for (int i = 0; i < kParts; ++i) x.part[i] += v.part[i];
    store(returns, x);
  }
};

}  // namespace

void gae_sequence(const real* rewards, const real* values, int64_t count, double bootstrap, double gamma, double lam,
                  real* advantages, real* returns) {
  Recursion recursion(gamma, lam);
  real r[kBlock], v[kBlock + 1], a[kBlock], q[kBlock];
  // The block at the end has no value behind it, that at the start may lack tokens: both go through buffers.
  const auto buffered = [&](int64_t start, int64_t n, real next) {
    std::memset(r, 0, sizeof r);
    std::memset(v, 0, sizeof v);
    std::memcpy(r + kBlock - n, rewards + start, n * sizeof(real));
    std::memcpy(v + kBlock - n, values + start, n * sizeof(real));
    v[kBlock] = next;
    recursion.block(r, v, v + 1, a, q);
    std::memcpy(advantages + start, a + kBlock - n, n * sizeof(real));
    std::memcpy(returns + start, q + kBlock - n, n * sizeof(real));
  };
  if (count <= 0) return;
  const int64_t last = count < kBlock ? count : kBlock;
  int64_t t = count - last;
  buffered(t, last, (real)bootstrap);
  for (; t >= kBlock; t -= kBlock) {
    const int64_t start = t - kBlock;
    recursion.block(rewards + start, values + start, values + start + 1, advantages + start, returns + start);
  }
  if (t > 0) buffered(0, t, values[t]);
}

}  // namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA)
