// Vocabulary-parallel log-prob and entropy on a GPU; the equations are those of kernels.cpp, its CPU twin.
// Which thread sees which column depends on the number of columns only, not on a row's address: a row has the same bits
// wherever it lies and whatever surrounds it. Work is done in powers of two: d2 = (x - m) log2(e) / temperature.
#include "combine.h"
#include "cuda/element.h"

namespace megarl {
namespace {

constexpr int kLoads = 4;  // vectors of 16 bytes that a thread has on the way at once

// Running sums of one thread: m the largest logit so far, s = sum 2^d2, u = sum 2^d2 d2. In double: a thread that has
// seen the row's peak must not lose what the others are too small to change it by.
struct Partial {
  real m;
  double s, u;
};

__device__ __forceinline__ real shift_of(real from, real to, real scale) {
  return at_least((from - to) * scale, kExp2Floor);  // finite where `from` is -inf: s and u are 0 then
}

// Adds the first `count` of kLoads vectors; the maximum moves at most once for all of them.
template <class T, bool All>
__device__ __forceinline__ void add(Partial& p, const uint4 (&v)[kLoads], int count, real scale) {
  typename T::Top top = T::lowest();
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    if (All || i < count) top = T::higher(top, v[i]);
  const real m = T::top_of(top);
  if (m > p.m) {
    const real shift = shift_of(p.m, m, scale), by = exp2_of(shift);
    p.u = by * ((double)shift * p.s + p.u);
    p.s *= by;
    p.m = m;
  }
  const real centre = p.m == -(real)HUGE_VAL ? (real)0 : p.m;
  real s = 0, u = 0;  // short sums first: a long row's rounding errors stay small
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (!All && i >= count) continue;
    // Never true: a border that exponentials of float32 are not moved across, where they would take more registers than
    // there are.
    if (sizeof(typename T::Stored) == sizeof(float) && i == kLoads / 2 && s < 0) break;
    real x[T::kPerVector], vs = 0, vu = 0;
    T::unpack(v[i], x);
#pragma unroll
    for (int j = 0; j < T::kPerVector; ++j) {
      const real d2 = at_least((x[j] - centre) * scale, kExp2Floor);  // 2^d2 is 0 there; 0 * -inf would be NaN
      const real e = exp2_of(d2);
      vs += e;
      vu = multiply_add(e, d2, vu);
    }
    s += vs;
    u += vu;
  }
  p.s += s;
  p.u += u;
}

// Elements [first, cols) that do not fill a vector.
template <class T>
__device__ __forceinline__ uint4 load_rest(const typename T::Stored* row, int first, int cols) {
  typename T::Stored x[T::kPerVector];
#pragma unroll
  for (int i = 0; i < T::kPerVector; ++i) x[i] = first + i < cols ? row[first + i] : T::neg_inf();
  return vector_of(x);
}

template <class T, int Threads, bool Aligned>
__device__ __forceinline__ Partial thread_sums(const typename T::Stored* row, int cols, real scale) {
  Partial p = {-(real)HUGE_VAL, 0, 0};
  uint4 v[kLoads];
  const int whole = cols / T::kPerVector, vectors = (cols + T::kPerVector - 1) / T::kPerVector;
  const int rounds = whole / (Threads * kLoads);
  const typename T::Stored* next = row + (int64_t)threadIdx.x * T::kPerVector;
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = load_vector<T, Aligned>(next + i * (Threads * T::kPerVector));
    next += Threads * kLoads * T::kPerVector;
    add<T, true>(p, v, kLoads, scale);
  }
  const int first = rounds * Threads * kLoads + (int)threadIdx.x;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int vector = first + i * Threads;
    if (vector >= vectors) continue;
    v[i] = vector < whole ? load_vector<T, Aligned>(row + (int64_t)vector * T::kPerVector)
                          : load_rest<T>(row, vector * T::kPerVector, cols);
    count = i + 1;
  }
  if (count) add<T, false>(p, v, count, scale);
  return p;
}

// One block a row. `cols` are the columns that count.
template <class T, int Threads, bool Aligned>
__global__ void __launch_bounds__(Threads, Threads == 512 ? 3 : 1536 / Threads < 24 ? 1536 / Threads : 24)
    local_kernel(const MegarlLogits x, int cols, real scale, const int64_t* targets, real* stats) {
  constexpr int kWarps = Threads / kWarp;
  __shared__ real tops[kWarps];
  __shared__ double sums[kWarps], products[kWarps];
  const int64_t row = blockIdx.x, target = targets[row];
  real* out = stats + row * 4;
  if (target < 0 || target >= x.vocab_size) {
    if (threadIdx.x < 4) out[threadIdx.x] = target == MEGARL_IGNORED ? (real)0 : (real)NAN;
    return;
  }
  const auto* logits = static_cast<const typename T::Stored*>(x.data) + row * x.row_stride;
  const Partial p = thread_sums<T, Threads, Aligned>(logits, cols, scale);

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  real top = warp_reduce(p.m, [](real a, real b) { return greater(a, b); });
  if (kWarps > 1) {
    if (lane == 0) tops[warp] = top;
    __syncthreads();
    for (int i = 0; i < kWarps; ++i) top = greater(top, tops[i]);
  }
  const real shift = p.m == top ? (real)0 : shift_of(p.m, top, scale), by = exp2_of(shift);
  const auto plus = [](double a, double b) { return a + b; };
  double s = warp_reduce((double)by * p.s, plus);
  double u = warp_reduce((double)by * (p.u + (double)shift * p.s), plus);
  if (kWarps > 1) {
    if (lane == 0) {
      sums[warp] = s;
      products[warp] = u;
    }
    __syncthreads();
    s = u = 0;
    for (int i = 0; i < kWarps; ++i) {
      s += sums[i];
      u += products[i];
    }
  }
  if (threadIdx.x == 0) {
    const int64_t here = target - x.vocab_start;
    out[0] = top;
    out[1] = (real)s;
    out[2] = (real)(u * kLn2);
    out[3] = here >= 0 && here < cols ? (real)T::value(logits[here]) : (real)0;
  }
}

__global__ void combine_kernel(const real* stats, int64_t shards, int64_t rows, const int64_t* targets,
                               real temperature, real* logp, real* entropy, real* norm) {
  const int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const Combined c =
      targets[row] == MEGARL_IGNORED ? Combined{} : combine(stats, shards, rows, row, temperature);
  logp[row] = c.logp;
  entropy[row] = c.entropy;
  norm[2 * row] = c.top;
  norm[2 * row + 1] = c.log_sum;
}

// d x = p (a + b log2 p), and g_target more at the target.
struct RowGradient {
  real top, log2_sum, scale, a, b;
  __device__ __forceinline__ real of(real x) const {
    const real log2_p = at_least(multiply_add(x - top, scale, -log2_sum), kExp2Floor);
    return exp2_of(log2_p) * multiply_add(b, log2_p, a);
  }
};

// `per_row` blocks a row. Every element is read by the thread that writes it, so `out` may be x itself.
template <class T, int Threads, bool Aligned>
__global__ void __launch_bounds__(Threads)
    backward_kernel(const MegarlLogits x, int cols, unsigned per_row, real scale, const int64_t* targets,
                    const real* norm, const real* entropy, const real* grad_logp, const real* grad_entropy, void* out,
                    int64_t out_stride) {
  using Stored = typename T::Stored;
  constexpr int kPer = T::kPerVector;
  const int64_t row = blockIdx.x / per_row;
  const int first = (int)(blockIdx.x % per_row) * (Threads * kLoads) + (int)threadIdx.x, all = (int)x.cols;
  const auto* logits = static_cast<const Stored*>(x.data) + row * x.row_stride;
  auto* grad = static_cast<Stored*>(out) + row * out_stride;
  const real g_logp = grad_logp ? grad_logp[row] : (real)0, g_entropy = grad_entropy ? grad_entropy[row] : (real)0;
  const bool none = targets[row] == MEGARL_IGNORED || (g_logp == 0 && g_entropy == 0);
  const int whole = none ? 0 : cols / kPer, whole_zero = none ? all / kPer : 0;

  uint4 v[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    if (first + i * Threads < whole) v[i] = load_vector<T, Aligned>(logits + (int64_t)(first + i * Threads) * kPer);

  const real inverse = (real)1 / x.temperature;
  const RowGradient g = {norm[2 * row], (real)(norm[2 * row + 1] * (real)kLog2E), scale,
                         (-g_logp - g_entropy * entropy[row]) * inverse, -g_entropy * (real)kLn2 * inverse};
  const real more = g_logp * inverse;
  const int64_t target = targets[row] - x.vocab_start;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int vector = first + i * Threads, column = vector * kPer;
    if (vector < whole) {
      real y[kPer];
      T::unpack(v[i], y);
#pragma unroll
      for (int j = 0; j < kPer; ++j) y[j] = g.of(y[j]);
      if (target >= column && target < column + kPer) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) y[j] += target == column + j ? more : (real)0;
      }
      store_vector<T, Aligned>(grad + column, T::pack(y));
    } else if (vector < whole_zero) {
      store_vector<T, Aligned>(grad + column, uint4{});
    } else {  // a row's last columns, padding among them
      for (int j = column; j < all && j < column + kPer; ++j) {
        const bool counts = !none && j < cols;
        grad[j] = T::stored(counts ? g.of(T::value(logits[j])) + (target == j ? more : (real)0) : (real)0);
      }
    }
  }
}

constexpr int64_t kMaxGrid = 0x7fffffff;

int64_t valid_cols(const MegarlLogits& x) {
  const int64_t left = x.vocab_size - x.vocab_start;
  return left < 0 ? 0 : left < x.cols ? left : x.cols;
}

bool aligned(const void* data, int64_t row_stride, size_t item) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * (int64_t)item % 16 == 0;
}

real scale_of(const MegarlLogits& x) { return (real)(kLog2E / (double)x.temperature); }

template <class T, bool Aligned>
void launch_local(const MegarlLogits& x, const int64_t* targets, real* stats, void* stream) {
  const dim3 grid((unsigned)x.rows);
  const int cols = (int)valid_cols(x);
  // By the shard's columns only; about four rounds of loads for each thread at least.
  if (x.cols <= 2048) {
    MEGARL_LAUNCH((local_kernel<T, 32, Aligned>), grid, dim3(32), stream, x, cols, scale_of(x), targets, stats);
  } else if (x.cols <= 32768) {
    MEGARL_LAUNCH((local_kernel<T, 128, Aligned>), grid, dim3(128), stream, x, cols, scale_of(x), targets, stats);
  } else {
    MEGARL_LAUNCH((local_kernel<T, 512, Aligned>), grid, dim3(512), stream, x, cols, scale_of(x), targets, stats);
  }
}

template <class T, int Threads, bool Aligned, class... Rest>
void launch_backward_with(const MegarlLogits& x, void* stream, Rest... rest) {
  const int64_t step = (int64_t)Threads * kLoads * T::kPerVector, per_row = (x.cols + step - 1) / step;
  // An impossible grid is refused by the launch.
  const dim3 grid(per_row * x.rows > kMaxGrid ? 0u : (unsigned)(per_row * x.rows));
  MEGARL_LAUNCH((backward_kernel<T, Threads, Aligned>), grid, dim3(Threads), stream, x, (int)valid_cols(x),
                (unsigned)per_row, scale_of(x), rest...);
}

template <class T, bool Aligned, class... Rest>
void launch_backward(const MegarlLogits& x, void* stream, Rest... rest) {
  if (x.cols <= 2048) {
    launch_backward_with<T, 32, Aligned>(x, stream, rest...);
  } else {
    launch_backward_with<T, 256, Aligned>(x, stream, rest...);
  }
}

template <class T>
int local(const MegarlLogits& x, const int64_t* targets, real* stats, void* stream) {
  if (aligned(x.data, x.row_stride, sizeof(typename T::Stored))) {
    launch_local<T, true>(x, targets, stats, stream);
  } else {
    launch_local<T, false>(x, targets, stats, stream);
  }
  return cudaGetLastError();
}

template <class T, class... Rest>
int backward(const MegarlLogits& x, void* stream, const int64_t* targets, const real* norm, const real* entropy,
             const real* grad_logp, const real* grad_entropy, void* out, int64_t out_stride) {
  constexpr size_t item = sizeof(typename T::Stored);
  if (aligned(x.data, x.row_stride, item) && aligned(out, out_stride, item)) {
    launch_backward<T, true>(x, stream, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride);
  } else {
    launch_backward<T, false>(x, stream, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride);
  }
  return cudaGetLastError();
}

// Columns are counted in 32 bits, rows in a grid; offsets of elements in 64 bits.
bool too_large(const MegarlLogits& x) { return x.cols > kMaxGrid - (1 << 16) || x.rows > kMaxGrid; }

}  // namespace
}  // namespace megarl

extern "C" int megarl_cuda_logprob_local(const MegarlLogits* x, const int64_t* targets, real* stats, void* stream) {
  if (x->rows == 0) return cudaSuccess;
  if (megarl::too_large(*x)) return cudaErrorInvalidValue;
  switch (x->dtype) {
    case MEGARL_REAL_DTYPE: return megarl::local<megarl::Real>(*x, targets, stats, stream);
#ifndef MEGARL_DOUBLE
    case MEGARL_BF16: return megarl::local<megarl::BF16>(*x, targets, stats, stream);
    case MEGARL_F16: return megarl::local<megarl::F16>(*x, targets, stats, stream);
#endif
  }
  return cudaErrorInvalidValue;
}

extern "C" int megarl_cuda_logprob_combine(const real* stats, int64_t shards, int64_t rows, const int64_t* targets,
                                           real temperature, real* logp, real* entropy, real* norm, void* stream) {
  if (rows == 0) return cudaSuccess;
  constexpr int kThreads = 128;
  const dim3 grid((unsigned)((rows + kThreads - 1) / kThreads));
  MEGARL_LAUNCH(megarl::combine_kernel, grid, dim3(kThreads), stream, stats, shards, rows, targets, temperature, logp,
                entropy, norm);
  return cudaGetLastError();
}

extern "C" int megarl_cuda_logprob_backward(const MegarlLogits* x, const int64_t* targets, const real* norm,
                                            const real* entropy, const real* grad_logp, const real* grad_entropy,
                                            void* out, int64_t out_stride, void* stream) {
  if (x->rows == 0 || x->cols == 0) return cudaSuccess;
  if (megarl::too_large(*x)) return cudaErrorInvalidValue;
#define MEGARL_BACKWARD(T) \
  megarl::backward<megarl::T>(*x, stream, targets, norm, entropy, grad_logp, grad_entropy, out, out_stride)
  switch (x->dtype) {
    case MEGARL_REAL_DTYPE: return MEGARL_BACKWARD(Real);
#ifndef MEGARL_DOUBLE
    case MEGARL_BF16: return MEGARL_BACKWARD(BF16);
    case MEGARL_F16: return MEGARL_BACKWARD(F16);
#endif
  }
#undef MEGARL_BACKWARD
  return cudaErrorInvalidValue;
}
