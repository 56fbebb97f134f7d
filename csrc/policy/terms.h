// A token's share of the policy loss, and what its row needs: the same code on the CPU and on a GPU, in double.
// Equations: megarl/ops/policy.py. Derivatives are those that torch's autograd gives the plain formulas: at a tie
// maximum and minimum give each side half, and clamp passes gradients on its bounds.
#pragma once
#include <cmath>
#include <cstdint>

#include "megarl.h"

#ifndef MEGARL_BOTH
#ifdef __CUDACC__
#define MEGARL_BOTH __host__ __device__
#else
#define MEGARL_BOTH
#endif
#endif

namespace megarl {

struct PolicyTokens {
  const real *logp, *entropy, *old_logp, *ref_logp, *advantages, *is_weight;
  const uint8_t* mask;

  MEGARL_BOTH bool kept(int64_t t) const { return !mask || mask[t]; }
};

// Where row i lies; whatever cu holds, [begin, end) lies in [0, tokens).
struct PolicyRow {
  int64_t begin, end;
};

MEGARL_BOTH inline PolicyRow policy_row(const int64_t* cu, int64_t i, int64_t tokens) {
  const int64_t begin = cu[i] < 0 ? 0 : cu[i], end = cu[i + 1] > tokens ? tokens : cu[i + 1];
  return {begin, end};
}

// What a row's tokens share, from its number of kept tokens and their sum of logp - old_logp.
struct PolicyShared {
  double weight;    // of a token
  double ratio;     // of the sequence; unused where each token has its own
  double by_ratio;  // d ratio / d logp of any of its tokens
};

MEGARL_BOTH inline PolicyShared policy_shared(const MegarlPolicy& how, double kept, double log_ratio) {
  const double n = kept > 1.0 ? kept : 1.0;
  PolicyShared row{how.aggregation == MEGARL_WEIGHT_MEAN ? how.scale / n : how.scale, 1.0, 1.0};
  if (how.importance == MEGARL_TOKEN) return row;
  const double share = how.importance == MEGARL_SEQUENCE_MEAN ? 1.0 / n : 1.0;
  row.ratio = exp(log_ratio * share);
  row.by_ratio = row.ratio * share;
  return row;
}

// Does a row need a pass for {kept tokens, sum of log ratios} before its tokens can be weighed?
MEGARL_BOTH inline bool policy_needs_shared(const MegarlPolicy& how) {
  return how.importance != MEGARL_TOKEN || how.aggregation == MEGARL_WEIGHT_MEAN;
}

// 0 * infinity is 0: a ratio that overflowed counts for nothing where it was clipped away, or the advantage or
// is_weight is 0.
MEGARL_BOTH inline double policy_product(double factor, double ratio) {
  return factor == 0.0 && !(ratio != ratio) ? 0.0 : factor * ratio;
}

// One kept token, unweighted: `loss` is the surrogate with its is_weight; the gradient is by_ratio * d ratio + by_logp.
struct PolicyTerm {
  double ratio, loss, kl, by_ratio, by_logp;
  bool clipped, dual_clipped;
};

MEGARL_BOTH inline PolicyTerm policy_term(const MegarlPolicy& how, const PolicyTokens& x, int64_t t, double row_ratio) {
  const double logp = x.logp[t], a = x.advantages[t];
  const double upper = 1.0 + how.clip_high, lower = 1.0 - how.clip_low;
  PolicyTerm term{row_ratio, 0.0, 0.0, 0.0, 0.0, false, false};
  if (how.importance == MEGARL_TOKEN) term.ratio = exp(logp - (double)x.old_logp[t]);
  if (how.objective == MEGARL_CISPO) {
    term.clipped = term.ratio > upper;
    term.by_logp = policy_product(-a, term.clipped ? upper : term.ratio);
    term.loss = term.by_logp * logp;
  } else {
    const bool above = term.ratio > upper, below = term.ratio < lower;
    const double plain = policy_product(-a, term.ratio);
    const double bounded = above ? -a * upper : below ? -a * lower : plain;
    // Gradient that goes to the unbounded side
    const double take = bounded > plain ? 0.0 : bounded == plain ? 0.5 : 1.0;
    term.clipped = bounded > plain;
    term.loss = term.clipped ? bounded : plain;
    term.by_ratio = -a * (take + (above || below ? 0.0 : 1.0 - take));
    if (how.dual_clip > 0.0 && a < 0.0) {
      const double limit = -how.dual_clip * a;
      term.dual_clipped = term.loss > limit;
      if (term.loss == limit) term.by_ratio *= 0.5;
      if (term.dual_clipped) term.by_ratio = 0.0, term.loss = limit;
    }
  }
  if (x.is_weight) {
    const double weight = x.is_weight[t];
    term.loss = policy_product(weight, term.loss);
    term.by_ratio *= weight;
    term.by_logp = policy_product(weight, term.by_logp);
  }
  if (how.kl) {
    const double d = (double)x.ref_logp[t] - logp;
    double e = how.kl == 3 ? expm1(d) : 0.0;
    term.kl = how.kl == 1 ? -d : how.kl == 2 ? 0.5 * d * d : e - d;
    if (how.kl == 3 && term.kl > MEGARL_K3_MOST) term.kl = MEGARL_K3_MOST, e = 0.0;
    if (how.kl_coef != 0.0) term.by_logp += how.kl_coef * (how.kl == 1 ? 1.0 : how.kl == 2 ? -d : -e);
  }
  return term;
}

// MEGARL_POLICY_SUMS of a row, and behind them the sum of by_ratio, that a sequence's ratio passes on to its tokens.
struct PolicySums {
  double value[MEGARL_POLICY_SUMS + 1];

  MEGARL_BOTH void add(const PolicyTokens& x, int64_t t, const PolicyTerm& term) {
    value[0] += term.loss;
    value[1] += term.kl;
    if (x.entropy) value[2] += x.entropy[t];
    value[3] += 1.0;
    value[4] += term.clipped;
    value[5] += term.dual_clipped;
    value[6] += (double)x.old_logp[t] - (double)x.logp[t];
    value[7] += term.ratio;
    value[8] += term.by_ratio;
  }
};

}  // namespace megarl
