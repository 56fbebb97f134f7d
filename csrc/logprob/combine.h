// One row's log-prob and entropy from the statistics of all shards: the same code on the CPU and on a GPU.
#pragma once
#include <cmath>
#include <cstdint>

#include "both.h"
#include "megarl.h"

namespace megarl {

struct Combined {
  real logp, entropy, top, log_sum;
};

// stats: [shards, rows, 4], added up in shard order, in double.
MEGARL_BOTH inline Combined combine(const real* stats, int64_t shards, int64_t rows, int64_t row, real temperature) {
  const double infinity = HUGE_VAL, inverse = 1.0 / (double)temperature;
  double top = -infinity;
  for (int64_t r = 0; r < shards; ++r) {
    const double m = stats[(r * rows + row) * 4];
    if (!(m <= top)) top = m;  // NaN goes through
  }
  double s = 0.0, u = 0.0, target = 0.0;
  for (int64_t r = 0; r < shards; ++r) {
    const real* part = stats + (r * rows + row) * 4;
    // A shard of -inf logits only has m = -inf and sums of 0 (or NaN, where a logit is NaN, and that must be seen).
    const bool empty = part[0] == -infinity;
    const double shift = empty ? 0.0 : ((double)part[0] - top) * inverse;
    const double scale = shift == 0.0 ? 1.0 : exp(shift);
    s += scale * part[1];
    u += scale * (part[2] + shift * part[1]);
    target += part[3];
  }
  const double log_sum = log(s);
  return {(real)((target - top) * inverse - log_sum), (real)(log_sum - u / s), (real)top, (real)log_sum};
}

}  // namespace megarl
