// Vocabulary-parallel log-prob and entropy of one shard, rows [begin, end). Compiled once per instruction set.
// A row is read once, in blocks that stay in the L1 cache; its result depends on nothing but the row.
#include <cmath>
#include <limits>

#include "isa.h"
#include "vec.h"

namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA) {
namespace {

constexpr int64_t kBlock = 1024, kGroup = 8;
constexpr real kNegInf = -std::numeric_limits<real>::infinity();

template <class T>
MEGARL_INLINE vreal load_part(const typename T::Element* p, int64_t count) {
  typename T::Element padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof padded[0]);
  return T::load(padded);
}

template <class T>
MEGARL_INLINE void store_part(typename T::Element* p, vreal v, int64_t count) {
  typename T::Element padded[kLanes];
  T::store(padded, v);
  std::memcpy(p, padded, count * sizeof padded[0]);
}

// Raw logits of one block into `x`, the last vector filled up with -inf; returns the vectors' number.
template <class T>
MEGARL_INLINE int64_t load_block(const typename T::Element* logits, int64_t count, vreal* x, real* top) {
  const int64_t whole = count / kLanes;
  vreal m = splat(kNegInf);
  for (int64_t i = 0; i < whole; ++i) {
    x[i] = T::load(logits + i * kLanes);
    m = select(x[i] > m, x[i], m);
  }
  int64_t vectors = whole;
  if (const int64_t rest = count - whole * kLanes) {
    x[whole] = select(lanes_below(rest), load_part<T>(logits + whole * kLanes, rest), splat(kNegInf));
    m = select(x[whole] > m, x[whole], m);
    ++vectors;
  }
  *top = max(m);
  return vectors;
}

MEGARL_INLINE int64_t valid_cols(const MegarlLogits& x) {
  const int64_t left = x.vocab_size - x.vocab_start;
  return left < 0 ? 0 : left < x.cols ? left : x.cols;
}

// Logits are centred before they are scaled: x - m is exact to half an ulp of itself, so a log-prob's error is relative
// to the log-prob, not to the logits.
template <class T>
void local_rows(const MegarlLogits& x, const int64_t* targets, real* stats, int64_t begin, int64_t end) {
  vreal block[kBlock / kLanes];
  const int64_t cols = valid_cols(x);
  const double inverse = 1.0 / x.temperature;
  const vreal scale_by = splat((real)inverse);
  for (int64_t row = begin; row < end; ++row) {
    const auto* logits = static_cast<const typename T::Element*>(x.data) + row * x.row_stride;
    real* out = stats + row * 4;
    if (targets[row] == MEGARL_IGNORED) {
      out[0] = out[1] = out[2] = out[3] = 0;
      continue;
    }
    if (targets[row] < 0 || targets[row] >= x.vocab_size) {
      out[0] = out[1] = out[2] = out[3] = std::numeric_limits<real>::quiet_NaN();
      continue;
    }
    real m = kNegInf;
    double s = 0.0, u = 0.0;
    for (int64_t start = 0; start < cols; start += kBlock) {
      const int64_t count = cols - start < kBlock ? cols - start : kBlock;
      real top;
      const int64_t vectors = load_block<T>(logits + start, count, block, &top);
      if (top > m) {  // e' = e * exp(shift), and d' = d + shift
        if (m != kNegInf) {
          const double shift = ((double)m - top) * inverse, scale = std::exp(shift);
          u = scale * (u + shift * s);
          s = scale * s;
        }
        m = top;
      }
      const vreal centre = splat(m == kNegInf ? (real)0 : m);
      // A lane that holds the row's peak must not lose what the others are too small to change it by.
      vreal sums = {}, lost_sums = {}, products = {}, lost_products = {};
      for (int64_t i = 0; i < vectors; i += kGroup) {
        vreal group_sum = {}, group_product = {};
        const int64_t stop = i + kGroup < vectors ? i + kGroup : vectors;
        for (int64_t j = i; j < stop; ++j) {
          const vreal d = (block[j] - centre) * scale_by;
          const vreal e = vexp(d);
          group_sum += e;
          group_product = fma(e, select(d < splat(kExpFloor), splat(kExpFloor), d), group_product);  // 0 * -inf is NaN
        }
        add_exactly(group_sum, sums, lost_sums);
        add_exactly(group_product, products, lost_products);
      }
      s += sum(sums) + sum(lost_sums);
      u += sum(products) + sum(lost_products);
    }
    const int64_t target = targets[row] - x.vocab_start;
    out[0] = m;
    out[1] = (real)s;
    out[2] = (real)u;
    out[3] = target >= 0 && target < cols ? first(load_part<T>(logits + target, 1)) : (real)0;
  }
}

// d x_j = (p_j (-g_logp - g_entropy (log p_j + H)) + g_logp [j = target]) / temperature.
struct RowGradient {
  vreal top, log_sum, entropy, g_logp, g_entropy, inverse;
  MEGARL_INLINE vreal of(const RowGradient& g, vreal logits, real at_target) {
    const vreal d = fma(logits - g.top, g.inverse, -g.log_sum);
    const vreal log_p = select(d < splat(kExpFloor), splat(kExpFloor), d);
    const vreal p = vexp(d);
    return fma(p, fma(-g.g_entropy, log_p + g.entropy, -g.g_logp), at_target) * g.inverse;
  }
};

template <class T>
void backward_rows(const MegarlLogits& x, const int64_t* targets, const real* norm, const real* entropy,
                   const real* grad_logp, const real* grad_entropy, void* out, int64_t out_stride, int64_t begin,
                   int64_t end) {
  const int64_t cols = valid_cols(x);
  const vreal inverse = splat((real)(1.0 / x.temperature));
  for (int64_t row = begin; row < end; ++row) {
    const auto* logits = static_cast<const typename T::Element*>(x.data) + row * x.row_stride;
    auto* grad = static_cast<typename T::Element*>(out) + row * out_stride;
    const real g_logp = grad_logp ? grad_logp[row] : (real)0, g_entropy = grad_entropy ? grad_entropy[row] : (real)0;
    if (targets[row] == MEGARL_IGNORED || (g_logp == 0 && g_entropy == 0)) {
      std::memset(grad, 0, x.cols * sizeof *grad);
      continue;
    }
    const RowGradient g = {splat(norm[2 * row]), splat(norm[2 * row + 1]), splat(entropy[row]),
                           splat(g_logp),        splat(g_entropy),         inverse};
    const int64_t target = targets[row] - x.vocab_start;
    const bool here = target >= 0 && target < cols;
    // The target's logit is read before the row is overwritten.
    const vreal at_target = here ? RowGradient::of(g, load_part<T>(logits + target, 1), g_logp) : vreal{};
    int64_t j = 0;
    for (; j + kLanes <= cols; j += kLanes) T::store(grad + j, RowGradient::of(g, T::load(logits + j), 0));
    if (const int64_t rest = cols - j; rest > 0) {
      store_part<T>(grad + j, RowGradient::of(g, load_part<T>(logits + j, rest), 0), rest);
      j += rest;
    }
    std::memset(grad + j, 0, (x.cols - j) * sizeof *grad);
    if (here) store_part<T>(grad + target, at_target, 1);
  }
}

}  // namespace

void logprob_local(const MegarlLogits& x, const int64_t* targets, real* stats, int64_t begin, int64_t end) {
  switch (x.dtype) {
    case MEGARL_REAL_DTYPE: return local_rows<Real>(x, targets, stats, begin, end);
#ifndef MEGARL_DOUBLE
    case MEGARL_BF16: return local_rows<BF16>(x, targets, stats, begin, end);
    case MEGARL_F16: return local_rows<F16>(x, targets, stats, begin, end);
#endif
  }
}

void logprob_backward(const MegarlLogits& x, const int64_t* targets, const real* norm, const real* entropy,
                      const real* grad_logp, const real* grad_entropy, void* out, int64_t out_stride, int64_t begin,
                      int64_t end) {
  switch (x.dtype) {
    case MEGARL_REAL_DTYPE:
      return backward_rows<Real>(x, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride, begin, end);
#ifndef MEGARL_DOUBLE
    case MEGARL_BF16:
      return backward_rows<BF16>(x, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride, begin, end);
    case MEGARL_F16:
      return backward_rows<F16>(x, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride, begin, end);
#endif
  }
}

}  // namespace MEGARL_ISA_NAMESPACE(MEGARL_ISA)
