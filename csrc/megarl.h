// The torch-free core: plain C functions over raw host pointers. Python (megarl/ops) checks every argument.
#pragma once
#include <cstdint>

// Element types of a logits buffer.
enum MegarlDtype : int { MEGARL_F32 = 0, MEGARL_BF16 = 1, MEGARL_F16 = 2 };

constexpr int64_t MEGARL_IGNORED = -100;  // target of a row that has no loss

// A [rows, cols] block of logits: columns [vocab_start, vocab_start + cols) of the vocabulary. Column j counts only
// when j < valid_cols (Megatron pads the vocabulary). row_stride is in elements; columns are contiguous.
struct MegarlLogits {
  void* data;
  int dtype;
  int64_t rows, cols, row_stride;
  int64_t vocab_start, valid_cols;
  float temperature;
};

extern "C" {
// Per row {m, sum e, sum e*(z-m), z_target}, z = logit / temperature, e = exp(z - m), m = max z of this shard.
// z_target is 0 where the target lies in another shard. stats: [rows, 4].
void megarl_logprob_local(const MegarlLogits* x, const int64_t* targets, float* stats, int threads);

// Combines [shards, rows, 4] in shard order. logp, entropy: [rows]; norm: [rows, 2] = {max, log sum e}.
// Ignored rows get logp = entropy = 0.
void megarl_logprob_combine(const float* stats, int64_t shards, int64_t rows, const int64_t* targets, float* logp,
                            float* entropy, float* norm);

// Gradient with respect to the logits into out (may be x.data itself). grad_logp and grad_entropy may be null (zero).
void megarl_logprob_backward(const MegarlLogits* x, const int64_t* targets, const float* norm, const float* entropy,
                             const float* grad_logp, const float* grad_entropy, void* out, int64_t out_stride,
                             int threads);

// Generalised advantage estimation over packed sequences [cu[i], cu[i+1]); bootstrap[i] = value after the last token.
void megarl_gae(const float* rewards, const float* values, const int64_t* cu, int64_t sequences,
                const float* bootstrap, double gamma, double lam, float* advantages, float* returns, int threads);

// Additive digest of a box with `dims` sizes and strides (elements) whose element (0,..,0) has flat index `offset` in
// the logical tensor, and whose step along dimension d is steps[d] flat indices.
uint64_t megarl_digest(const void* data, int itemsize, int dims, const int64_t* sizes, const int64_t* strides,
                       uint64_t offset, const uint64_t* steps, int threads);

// The instruction set in use; megarl_use_isa returns false where this machine or build does not have it.
const char* megarl_isa();
bool megarl_use_isa(const char* name);
}
