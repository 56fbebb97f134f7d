#include "megarl.h"
#include "parallel.h"

// The recursion runs in double: its rounding does not grow with the sequence's length.
extern "C" void megarl_gae(const float* rewards, const float* values, const int64_t* cu, int64_t sequences,
                           const float* bootstrap, double gamma, double lam, float* advantages, float* returns,
                           int threads) {
  megarl::parallel(sequences, cu[sequences] * 8, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double next_value = bootstrap[i], advantage = 0.0;
      for (int64_t t = cu[i + 1] - 1; t >= cu[i]; --t) {
        const double value = values[t];
        advantage = (rewards[t] + gamma * next_value - value) + gamma * lam * advantage;
        advantages[t] = (float)advantage;
        returns[t] = (float)(advantage + value);
        next_value = value;
      }
    }
  });
}
