#include "combine.h"
#include "isa.h"
#include "parallel.h"

extern "C" void megarl_cpu_logprob_local(const MegarlLogits* x, const int64_t* targets, real* stats, int threads) {
  const auto kernel = megarl::active().logprob_local;
  megarl::parallel(x->rows, x->rows * x->cols, threads,
                   [&](int64_t begin, int64_t end) { kernel(*x, targets, stats, begin, end); });
}

extern "C" void megarl_cpu_logprob_combine(const real* stats, int64_t shards, int64_t rows, const int64_t* targets,
                                           real temperature, real* logp, real* entropy, real* norm, int threads) {
  megarl::parallel(rows, rows * shards * 16, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const bool ignored = targets[row] == MEGARL_IGNORED;
      const megarl::Combined c = ignored ? megarl::Combined{} : megarl::combine(stats, shards, rows, row, temperature);
      logp[row] = c.logp;
      entropy[row] = c.entropy;
      norm[2 * row] = c.top;
      norm[2 * row + 1] = c.log_sum;
    }
  });
}

extern "C" void megarl_cpu_logprob_backward(const MegarlLogits* x, const int64_t* targets, const real* norm,
                                            const real* entropy, const real* grad_logp, const real* grad_entropy,
                                            void* out, int64_t out_stride, int threads) {
  const auto kernel = megarl::active().logprob_backward;
  megarl::parallel(x->rows, x->rows * x->cols, threads, [&](int64_t begin, int64_t end) {
    kernel(*x, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride, begin, end);
  });
}
