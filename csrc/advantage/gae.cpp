#include "megarl.h"
#include "parallel.h"

// The recursion runs in double: its rounding does not grow with the sequence's length.
extern "C" void megarl_cpu_gae(const real* rewards, const real* values, const int64_t* cu, int64_t sequences,
                               int64_t tokens, const real* bootstrap, double gamma, double lam, real* advantages,
                               real* returns, int threads) {
  megarl::parallel(sequences, tokens * 8, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double next_value = bootstrap[i], advantage = 0.0;
      for (int64_t t = cu[i + 1] - 1; t >= cu[i]; --t) {
        const double value = values[t];
        advantage = (rewards[t] + gamma * next_value - value) + gamma * lam * advantage;
        advantages[t] = (real)advantage;
        returns[t] = (real)(advantage + value);
        next_value = value;
      }
    }
  });
}
