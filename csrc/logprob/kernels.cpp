// Vocabulary-parallel log-prob and entropy of one shard, rows [begin, end). Compiled once per instruction set.
// A row is read once, in blocks that stay in the L1 cache; its result depends on nothing but the row.
#include <cmath>

#include "isa.h"
#include "vec.h"

namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA) {
namespace {

constexpr int64_t kBlock = 1024;
constexpr float kNegInf = -__builtin_inff();

template <class T>
MEGARL_INLINE vfloat load_part(const typename T::Element* p, int64_t count) {
  typename T::Element padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof padded[0]);
  return T::load(padded);
}

template <class T>
MEGARL_INLINE void store_part(typename T::Element* p, vfloat v, int64_t count) {
  typename T::Element padded[kLanes];
  T::store(padded, v);
  std::memcpy(p, padded, count * sizeof padded[0]);
}

// Scaled logits of one block into `z`, the last vector filled up with -inf; returns the vectors' number.
template <class T>
MEGARL_INLINE int64_t load_block(const typename T::Element* x, int64_t count, float temperature, vfloat* z, float* top) {
  const int64_t whole = count / kLanes;
  vfloat m = splat(kNegInf);
  for (int64_t i = 0; i < whole; ++i) {
    z[i] = T::load(x + i * kLanes) / temperature;
    m = select(z[i] > m, z[i], m);
  }
  int64_t vectors = whole;
  if (const int64_t rest = count - whole * kLanes) {
    z[whole] = select(lanes_below(rest), load_part<T>(x + whole * kLanes, rest) / temperature, splat(kNegInf));
    m = select(z[whole] > m, z[whole], m);
    ++vectors;
  }
  *top = max(m);
  return vectors;
}

template <class T>
void local_rows(const MegarlLogits& x, const int64_t* targets, float* stats, int64_t begin, int64_t end) {
  vfloat z[kBlock / kLanes];
  for (int64_t row = begin; row < end; ++row) {
    const auto* logits = static_cast<const typename T::Element*>(x.data) + row * x.row_stride;
    float* out = stats + row * 4;
    if (targets[row] == MEGARL_IGNORED) {
      out[0] = out[1] = out[2] = out[3] = 0.0f;
      continue;
    }
    float m = kNegInf;
    double s = 0.0, u = 0.0;
    for (int64_t start = 0; start < x.valid_cols; start += kBlock) {
      const int64_t count = x.valid_cols - start < kBlock ? x.valid_cols - start : kBlock;
      float top;
      const int64_t vectors = load_block<T>(logits + start, count, x.temperature, z, &top);
      if (top > m) {  // e' = e * exp(m - top), and (z - top) = (z - m) + (m - top)
        if (m != kNegInf) {
          const double shift = (double)m - top, scale = __builtin_exp(shift);
          u = scale * (u + shift * s);
          s = scale * s;
        }
        m = top;
      }
      const vfloat centre = splat(m == kNegInf ? 0.0f : m);
      vfloat sums = {}, products = {};
      for (int64_t i = 0; i < vectors; ++i) {
        const vfloat d = z[i] - centre;
        const vfloat e = vexp(d);
        sums += e;
        products += e * select(d < splat(kExpFloor), splat(kExpFloor), d);  // e is 0 there; 0 * -inf would be NaN
      }
      s += sum(sums);
      u += sum(products);
    }
    const int64_t target = targets[row] - x.vocab_start;
    out[0] = m;
    out[1] = (float)s;
    out[2] = (float)u;
    out[3] = target >= 0 && target < x.valid_cols ? first(load_part<T>(logits + target, 1) / x.temperature) : 0.0f;
  }
}

// d z_j = p_j (-g_logp - g_entropy (log p_j + H)) + g_logp [j = target], then / temperature.
struct RowGradient {
  vfloat top, log_sum, entropy, g_logp, g_entropy;
  float temperature;
  MEGARL_INLINE vfloat of(const RowGradient& g, vfloat logits, float at_target) {
    const vfloat d = (logits / g.temperature - g.top) - g.log_sum;
    const vfloat log_p = select(d < splat(kExpFloor), splat(kExpFloor), d);
    const vfloat p = vexp(d);
    return (p * (-g.g_logp - g.g_entropy * (log_p + g.entropy)) + at_target) / g.temperature;
  }
};

template <class T>
void backward_rows(const MegarlLogits& x, const int64_t* targets, const float* norm, const float* entropy,
                   const float* grad_logp, const float* grad_entropy, void* out, int64_t out_stride, int64_t begin,
                   int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const auto* logits = static_cast<const typename T::Element*>(x.data) + row * x.row_stride;
    auto* grad = static_cast<typename T::Element*>(out) + row * out_stride;
    const float g_logp = grad_logp ? grad_logp[row] : 0.0f, g_entropy = grad_entropy ? grad_entropy[row] : 0.0f;
    if (targets[row] == MEGARL_IGNORED || (g_logp == 0.0f && g_entropy == 0.0f)) {
      std::memset(grad, 0, x.cols * sizeof *grad);
      continue;
    }
    const RowGradient g = {splat(norm[2 * row]), splat(norm[2 * row + 1]), splat(entropy[row]),
                           splat(g_logp),        splat(g_entropy),         x.temperature};
    const int64_t target = targets[row] - x.vocab_start;
    const bool here = target >= 0 && target < x.valid_cols;
    // The target's logit is read before the row is overwritten.
    const vfloat at_target = here ? RowGradient::of(g, load_part<T>(logits + target, 1), g_logp) : vfloat{};
    int64_t j = 0;
    for (; j + kLanes <= x.valid_cols; j += kLanes) T::store(grad + j, RowGradient::of(g, T::load(logits + j), 0.0f));
    if (const int64_t rest = x.valid_cols - j; rest > 0) {
      store_part<T>(grad + j, RowGradient::of(g, load_part<T>(logits + j, rest), 0.0f), rest);
      j += rest;
    }
    std::memset(grad + j, 0, (x.cols - j) * sizeof *grad);
    if (here) store_part<T>(grad + target, at_target, 1);
  }
}

}  // namespace

void logprob_local(const MegarlLogits& x, const int64_t* targets, float* stats, int64_t begin, int64_t end) {
  switch (x.dtype) {
    case MEGARL_F32: return local_rows<F32>(x, targets, stats, begin, end);
    case MEGARL_BF16: return local_rows<BF16>(x, targets, stats, begin, end);
    case MEGARL_F16: return local_rows<F16>(x, targets, stats, begin, end);
  }
}

void logprob_backward(const MegarlLogits& x, const int64_t* targets, const float* norm, const float* entropy,
                      const float* grad_logp, const float* grad_entropy, void* out, int64_t out_stride, int64_t begin,
                      int64_t end) {
  switch (x.dtype) {
    case MEGARL_F32:
      return backward_rows<F32>(x, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride, begin, end);
    case MEGARL_BF16:
      return backward_rows<BF16>(x, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride, begin, end);
    case MEGARL_F16:
      return backward_rows<F16>(x, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride, begin, end);
  }
}

}  // namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA)
