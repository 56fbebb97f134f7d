// One table of kernels per instruction set; active() is the best this machine runs unless a test chose another.
#pragma once
#include <cstdint>

#include "megarl.h"

struct MegarlKernels {
  const char* name;
  void (*logprob_local)(const MegarlLogits&, const int64_t* targets, real* stats, int64_t begin, int64_t end);
  void (*logprob_backward)(const MegarlLogits&, const int64_t* targets, const real* norm, const real* entropy,
                           const real* grad_logp, const real* grad_entropy, void* out, int64_t out_stride,
                           int64_t begin, int64_t end);
  // Digest of `count` elements, `stride` elements apart, flat indices index, index + step, ...
  uint64_t (*digest_line)(const void* data, int itemsize, int64_t count, int64_t stride, uint64_t index, uint64_t step);
  void (*gae_piece)(const real* rewards, const real* values, int64_t count, real next_value, double behind,
                    double gamma, double lam, real* advantages, real* returns);
  double (*gae_total)(const real* rewards, const real* values, int64_t count, real next_value, double gamma,
                      double lam);
};

namespace megarl {
const MegarlKernels& active();
}

#define MEGARL_DECLARE_ISA(isa)                                                                                     \
  namespace megarl_##isa {                                                                                          \
  void logprob_local(const MegarlLogits&, const int64_t*, real*, int64_t, int64_t);                                \
  void logprob_backward(const MegarlLogits&, const int64_t*, const real*, const real*, const real*,              \
                        const real*, void*, int64_t, int64_t, int64_t);                                            \
  uint64_t digest_line(const void*, int, int64_t, int64_t, uint64_t, uint64_t);                                     \
  void gae_piece(const real*, const real*, int64_t, real, double, double, double, real*, real*);                    \
  double gae_total(const real*, const real*, int64_t, real, double, double);                                        \
  }
#define MEGARL_ISA_NAMESPACE_(isa) megarl_##isa
#define MEGARL_ISA_NAMESPACE(isa) MEGARL_ISA_NAMESPACE_(isa)

MEGARL_DECLARE_ISA(generic)
MEGARL_DECLARE_ISA(avx2)
MEGARL_DECLARE_ISA(avx512)
