#include <cmath>
#include <limits>

#include "isa.h"
#include "parallel.h"

extern "C" void megarl_logprob_local(const MegarlLogits* x, const int64_t* targets, float* stats, int threads) {
  const auto kernel = megarl::active().logprob_local;
  megarl::parallel(x->rows, x->rows * x->cols, threads,
                   [&](int64_t begin, int64_t end) { kernel(*x, targets, stats, begin, end); });
}

extern "C" void megarl_logprob_combine(const float* stats, int64_t shards, int64_t rows, const int64_t* targets,
                                       float* logp, float* entropy, float* norm) {
  const double kNegInf = -std::numeric_limits<double>::infinity();
  for (int64_t row = 0; row < rows; ++row) {
    if (targets[row] == MEGARL_IGNORED) {
      logp[row] = entropy[row] = norm[2 * row] = norm[2 * row + 1] = 0.0f;
      continue;
    }
    double top = kNegInf;
    for (int64_t r = 0; r < shards; ++r) {
      const double m = stats[(r * rows + row) * 4];
      if (m > top) top = m;
    }
    double s = 0.0, u = 0.0, z = 0.0;
    for (int64_t r = 0; r < shards; ++r) {
      const float* part = stats + (r * rows + row) * 4;
      const double shift = part[0] - top;
      // A shard of -inf logits only has m = -inf and sums of 0 (or NaN, where a logit is NaN, and that must be seen).
      const bool empty = part[0] == kNegInf;
      const double scale = empty ? 1.0 : std::exp(shift);
      s += scale * part[1];
      u += scale * (part[2] + (empty ? 0.0 : shift * part[1]));
      z += part[3];
    }
    const double log_sum = std::log(s);
    logp[row] = (float)((z - top) - log_sum);
    entropy[row] = (float)(log_sum - u / s);
    norm[2 * row] = (float)top;
    norm[2 * row + 1] = (float)log_sum;
  }
}

extern "C" void megarl_logprob_backward(const MegarlLogits* x, const int64_t* targets, const float* norm,
                                        const float* entropy, const float* grad_logp, const float* grad_entropy,
                                        void* out, int64_t out_stride, int threads) {
  const auto kernel = megarl::active().logprob_backward;
  megarl::parallel(x->rows, x->rows * x->cols, threads, [&](int64_t begin, int64_t end) {
    kernel(*x, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride, begin, end);
  });
}
