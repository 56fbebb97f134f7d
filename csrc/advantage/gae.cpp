#include "isa.h"
#include "parallel.h"

// The recursion runs in double: its rounding does not grow with the sequence's length.
extern "C" void megarl_cpu_gae(const real* rewards, const real* values, const int64_t* cu, int64_t sequences,
                               int64_t tokens, const real* bootstrap, double gamma, double lam, real* advantages,
                               real* returns, double* /*scratch*/, int threads) {
  const auto& kernel = megarl::active();
  megarl::parallel(sequences, tokens * 4, threads, [&](int64_t begin, int64_t end) {
    // Backwards, as within a sequence: memory is walked in one direction.
    for (int64_t i = end - 1; i >= begin; --i)
      kernel.gae_sequence(rewards + cu[i], values + cu[i], cu[i + 1] - cu[i], bootstrap[i], gamma, lam,
                          advantages + cu[i], returns + cu[i]);
  });
}
