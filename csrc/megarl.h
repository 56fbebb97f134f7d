// The torch-free core: plain C functions over raw pointers. Python (megarl/ops) checks every argument.
// Every function exists twice: megarl_cpu_* runs on host memory with `threads` threads; megarl_cuda_* (built when nvcc
// is there) enqueues on `stream` over device memory and returns a cudaError_t, 0 when all is well.
#pragma once
#include <cstdint>

// The type of everything that is not a logit. Always float, except in the build that gradient checks run on.
#ifdef MEGARL_DOUBLE
typedef double real;
#else
typedef float real;
#endif

// Element types of a logits buffer; MEGARL_REAL_DTYPE is `real` itself.
enum MegarlDtype : int { MEGARL_REAL_DTYPE = 0, MEGARL_BF16 = 1, MEGARL_F16 = 2 };

constexpr int64_t MEGARL_IGNORED = -100;  // target of a row that has no loss

// A [rows, cols] block of logits: columns [vocab_start, vocab_start + cols) of the vocabulary. Column j counts only
// when vocab_start + j < vocab_size (Megatron pads the vocabulary). row_stride is in elements; columns are contiguous.
struct MegarlLogits {
  void* data;
  int dtype;
  int64_t rows, cols, row_stride;
  int64_t vocab_start, vocab_size;
  real temperature;
};

// How a token's loss is made; see megarl/ops/policy.py for the equations.
enum MegarlImportance : int { MEGARL_TOKEN = 0, MEGARL_SEQUENCE_MEAN = 1, MEGARL_SEQUENCE_PRODUCT = 2 };
enum MegarlObjective : int { MEGARL_PPO_CLIP = 0, MEGARL_CISPO = 1 };
enum MegarlAggregation : int { MEGARL_WEIGHT_ONE = 0, MEGARL_WEIGHT_MEAN = 1 };
// Per row: {pg, kl, entropy, tokens, clipped, clipped by dual clip, old - logp, ratio}.
constexpr int MEGARL_POLICY_SUMS = 8;
constexpr double MEGARL_K3_MOST = 10.0;  // largest k3 of a token, K3_MOST of ops/policy.py
struct MegarlPolicy {
  int importance, objective, kl, aggregation;  // kl: 0 none, 1..3 the estimators k1..k3
  double clip_low, clip_high, dual_clip;       // dual_clip <= 0: none
  double kl_coef, entropy_coef, scale;         // scale multiplies every weight
};

constexpr int64_t MEGARL_GAE_TILE = 2048;  // tokens that a CUDA block takes at a time
// Doubles of scratch for megarl_cuda_gae: each tile of each sequence finds a place of its own.
constexpr int64_t megarl_gae_slots(int64_t sequences, int64_t tokens) { return tokens / MEGARL_GAE_TILE + sequences; }

constexpr int64_t MEGARL_DIGEST_BOX_BYTES = 240;  // of a table for megarl_*_digests, for each box
// Writes such a table into host memory. Of each box `boxes` has, one after another: the address of element (0,..,0);
// bytes of an element; that element's flat index in the logical tensor; the number of dimensions, at most 8; sizes,
// strides (elements) and steps (flat indices) along each. Returns the pieces of work of all boxes, or -1
// where one has 2^32 lines (runs of elements that are evenly spaced both in memory and in the flat index) or more.
extern "C" int64_t megarl_digest_table(const int64_t* boxes, int64_t count, void* table);

#define MEGARL_API(where, result, extra)                                                                             \
  /* Per row {m, sum e, sum e*d, x_target}: m the largest raw logit of this shard, d = (x - m) / temperature,       \
     e = exp(d), x_target the raw target logit or 0 where the target lies in another shard. stats: [rows, 4]. A     \
     target outside [0, vocab_size) makes the row NaN; an ignored row is {0, 0, 0, 0}. */                           \
  result megarl_##where##_logprob_local(const MegarlLogits* x, const int64_t* targets, real* stats, extra);          \
  /* Combines [shards, rows, 4] in shard order. logp, entropy: [rows]; norm: [rows, 2] = {m, log sum e}. Ignored    \
     rows get 0. */                                                                                                 \
  result megarl_##where##_logprob_combine(const real* stats, int64_t shards, int64_t rows, const int64_t* targets,   \
                                          real temperature, real* logp, real* entropy, real* norm, extra);           \
  /* Gradient with respect to the logits into out (may be x->data itself). grad_logp, grad_entropy may be null. */  \
  result megarl_##where##_logprob_backward(const MegarlLogits* x, const int64_t* targets, const real* norm,          \
                                           const real* entropy, const real* grad_logp, const real* grad_entropy,     \
                                           void* out, int64_t out_stride, extra);                                    \
  /* Generalised advantage estimation over packed sequences [cu[i], cu[i+1]) of `tokens` tokens; bootstrap[i] =     \
     value after the last token. scratch: with megarl_gae_slots(sequences, tokens) doubles the CUDA kernels work on  \
     all of a long sequence at once, with null from its end to its start; the bits are the same. */                 \
  result megarl_##where##_gae(const real* rewards, const real* values, const int64_t* cu, int64_t sequences,         \
                              int64_t tokens, const real* bootstrap, double gamma, double lam, real* advantages,     \
                              real* returns, double* scratch, extra);                                                \
  /* Loss and gradient of packed tokens; entropy, ref_logp, is_weight, mask and grad_entropy may be null. A token   \
     whose mask is 0 is not read and gets gradient 0. sums: [sequences, MEGARL_POLICY_SUMS], the first three        \
     weighted. */                                                                                                   \
  result megarl_##where##_policy(const MegarlPolicy* how, const real* logp, const real* entropy,                     \
                                 const real* old_logp, const real* ref_logp, const real* advantages,                 \
                                 const real* is_weight, const uint8_t* mask, const int64_t* cu, int64_t sequences,   \
                                 int64_t tokens, real* grad_logp, real* grad_entropy, double* sums, extra);          \
  /* Additive digests (megarl/ops/digest.py) of `count` boxes, in one launch: digests[i] is that of box i. `table`    \
     was written by megarl_digest_table, which returned `pieces`. It lies where the data lies; that of one box alone  \
     in host memory. */                                                                                              \
  result megarl_##where##_digests(const void* table, int64_t count, int64_t pieces, uint64_t* digests, extra);

extern "C" {
MEGARL_API(cpu, void, int threads)
MEGARL_API(cuda, int, void* stream)

const char* megarl_cuda_error(int status);

// The instruction set in use; megarl_use_isa returns false where this machine or build does not have it.
const char* megarl_isa();
bool megarl_use_isa(const char* name);
}
