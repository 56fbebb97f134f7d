// The part of CUDA that csrc/**/*.cu uses, on the host: `g++ -x c++ -DMEGARL_EMULATED -I tests/native` compiles the
// kernels as they are and runs them on host memory, so that CI tests them where there is no GPU.
//
// Blocks run one after the other. The threads of a block are fibers that switch at barriers and warp shuffles: odd
// blocks run their threads in descending order, so that a missing barrier shows. A barrier or shuffle that some thread
// does not reach ends the process with a message. Stricter than a GPU: threads that have returned count as missing,
// all threads of a barrier must stand on the same line, atomics are for integers only. Not emulated: dynamic shared
// memory, grid synchronisation, streams (a launch has run when it returns), shuffles among parts of a warp.
#pragma once
#include <math.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <vector>

#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
#define EMULATED_VECTOR(T, name)                                                                       \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                   \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };                   \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                           \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTOR(int, int)
EMULATED_VECTOR(unsigned, uint)
EMULATED_VECTOR(unsigned short, ushort)
EMULATED_VECTOR(float, float)
EMULATED_VECTOR(double, double)
EMULATED_VECTOR(long long, longlong)
EMULATED_VECTOR(unsigned long long, ulonglong)
#undef EMULATED_VECTOR

typedef struct EmulatedStream* cudaStream_t;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };

namespace emulated {

constexpr unsigned kLanes = 32, kMaxThreads = 1024;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStack = 256 << 10;
#else
constexpr size_t kStack = 64 << 10;
#endif

enum class Waits { no, barrier, shuffle };

struct Fiber {
  char* stack = nullptr;
#if defined(__x86_64__)
  void* sp = nullptr;
#else
  ucontext_t context;
#endif
  uint3 thread;
  unsigned number;
  bool done;
  Waits waits;
  uint64_t round;  // of the barrier or shuffle that it waits for
  const char* file;
  int line;
};

struct Warp {
  uint64_t round = 0;
  uint32_t arrived = 0;
  // Two: lanes of the next shuffle may write while others still read this one's values.
  uint64_t values[2][kLanes];
};

struct State {
  std::mutex one_launch;
  std::vector<Fiber> fibers{kMaxThreads};
  std::vector<char*> stacks;
  std::vector<Warp> warps{kMaxThreads / kLanes};
  Fiber* current = nullptr;
#if defined(__x86_64__)
  void* sp = nullptr;
#else
  ucontext_t context;
#endif
  void* fake_stack = nullptr;
  const void* host_stack = nullptr;
  size_t host_stack_size = 0;
  void (*kernel)(const void*) = nullptr;
  const void* arguments = nullptr;
  unsigned threads = 0, arrived = 0;
  uint64_t round = 0;
  uint3 block_index{}, thread_index{};
  dim3 block_dim, grid_dim;
  cudaError_t error = cudaSuccess;
};
inline State state;

[[noreturn]] inline void fail(const char* what, const char* file, int line) {
  std::fprintf(stderr, "emulated CUDA: %s at %s:%d, block (%u, %u, %u) thread (%u, %u, %u)\n", what, file, line,
               state.block_index.x, state.block_index.y, state.block_index.z, state.thread_index.x,
               state.thread_index.y, state.thread_index.z);
  std::fflush(stderr);
  std::abort();
}

#if defined(__x86_64__)
// Callee-saved registers and the stack pointer: all that a call leaves alive. noipa: the compiler must not look inside
// and conclude that other registers survive.
__attribute__((naked, noinline, noipa)) inline void switch_stack(void** /*from*/, void* /*to*/) {
  __asm__(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n retq\n");
}
#endif

inline void to_scheduler(Fiber& f) {
#ifdef __SANITIZE_ADDRESS__
  void* fake;
  __sanitizer_start_switch_fiber(f.done ? nullptr : &fake, state.host_stack, state.host_stack_size);
#endif
#if defined(__x86_64__)
  switch_stack(&f.sp, state.sp);
#else
  swapcontext(&f.context, &state.context);
#endif
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

inline void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &state.host_stack, &state.host_stack_size);
#endif
  Fiber& f = *state.current;
  state.kernel(state.arguments);
  f.done = true;
  to_scheduler(f);
  std::abort();
}

inline void start(Fiber& f) {
  if (state.stacks.empty()) {
    void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for stacks", __FILE__, __LINE__);
    mprotect(memory, 4096, PROT_NONE);  // a stack that overflows must not write into its neighbour
    state.stacks.push_back(static_cast<char*>(memory));
  }
  f.stack = state.stacks.back();
  state.stacks.pop_back();
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(f.stack + 4096, kStack - 4096);  // the frames of the thread before never returned
#endif
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(f.stack + kStack);
  *--top = nullptr;  // where fiber_main would return to; leaves the stack aligned as after a call
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f.sp = top;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack;
  f.context.uc_stack.ss_size = kStack;
  f.context.uc_link = nullptr;
  makecontext(&f.context, fiber_main, 0);
#endif
}

inline void resume(Fiber& f) {
  if (!f.stack) start(f);
  state.current = &f;
  state.thread_index = f.thread;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&state.fake_stack, f.stack, kStack);
#endif
#if defined(__x86_64__)
  switch_stack(&state.sp, f.sp);
#else
  swapcontext(&state.context, &f.context);
#endif
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(state.fake_stack, nullptr, nullptr);
#endif
  if (f.done) {
    state.stacks.push_back(f.stack);
    f.stack = nullptr;
  }
}

inline bool ready(const Fiber& f) {
  if (f.done) return false;
  if (f.waits == Waits::barrier) return f.round != state.round;
  if (f.waits == Waits::shuffle) return f.round != state.warps[f.number / kLanes].round;
  return true;
}

inline void run_block(bool descending) {
  state.arrived = 0;
  for (unsigned i = 0; i < state.threads; ++i) {
    Fiber& f = state.fibers[i];
    const dim3& n = state.block_dim;
    f.thread = {i % n.x, i / n.x % n.y, i / n.x / n.y};
    f.number = i;
    f.done = false;
    f.waits = Waits::no;
    if (i % kLanes == 0) state.warps[i / kLanes].arrived = 0;
  }
  unsigned left = state.threads;
  while (left) {
    const unsigned before = left;
    bool moved = false;
    for (unsigned k = 0; k < state.threads; ++k) {
      Fiber& f = state.fibers[descending ? state.threads - 1 - k : k];
      if (!ready(f)) continue;
      moved = true;
      f.waits = Waits::no;
      resume(f);
      left -= f.done;
    }
    if (left && (!moved || before != left)) {
      // Who returned is missed by a barrier, unless nobody waits for one.
      for (unsigned i = 0; i < state.threads; ++i) {
        const Fiber& f = state.fibers[i];
        const bool stuck = !f.done && (f.waits == Waits::barrier || (!moved && f.waits == Waits::shuffle));
        if (!stuck || (moved && f.round != state.round)) continue;
        state.thread_index = f.thread;
        fail(f.waits == Waits::barrier ? "not every thread of the block reaches the __syncthreads()"
                                       : "not every lane of the warp reaches the shuffle or __syncwarp()",
             f.file, f.line);
      }
    }
  }
}

template <class Kernel>
void launch(dim3 grid, dim3 block, const Kernel& kernel) {
  const std::lock_guard<std::mutex> guard(state.one_launch);
  const uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (!threads || threads > kMaxThreads || block.z > 64 || !grid.x || grid.x > 0x7fffffffu || !grid.y ||
      grid.y > 65535 || !grid.z || grid.z > 65535) {
    state.error = cudaErrorInvalidConfiguration;
    return;
  }
  state.kernel = [](const void* k) { (*static_cast<const Kernel*>(k))(); };
  state.arguments = &kernel;
  state.threads = (unsigned)threads;
  state.block_dim = block;
  state.grid_dim = grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        state.block_index = {x, y, z};
        run_block((x + y + z) % 2 != 0);
      }
}

// All 32 lanes leave a value; returns the values of the warp, good until the lane's next exchange.
inline const uint64_t* exchange(unsigned mask, uint64_t value, const char* file, int line) {
  Fiber& f = *state.current;
  if (mask != 0xffffffffu) fail("only shuffles of whole warps are emulated", file, line);
  if (state.threads % kLanes) fail("a block that uses shuffles must consist of whole warps", file, line);
  Warp& warp = state.warps[f.number / kLanes];
  const uint64_t round = warp.round;
  warp.values[round % 2][f.number % kLanes] = value;
  warp.arrived |= 1u << (f.number % kLanes);
  if (warp.arrived == 0xffffffffu) {
    warp.arrived = 0;
    ++warp.round;
  } else {
    f.waits = Waits::shuffle;
    f.round = round;
    f.file = file;
    f.line = line;
    to_scheduler(f);
  }
  return warp.values[round % 2];
}

inline void barrier(const char* file, int line) {
  Fiber& f = *state.current;
  static const char* first_file;
  static int first_line;
  if (state.arrived == 0) {
    first_file = file;
    first_line = line;
  } else if (first_line != line || std::strcmp(first_file, file)) {
    fail("threads of one block stand at different __syncthreads()", file, line);
  }
  if (++state.arrived == state.threads) {
    state.arrived = 0;
    ++state.round;
    return;
  }
  f.waits = Waits::barrier;
  f.round = state.round;
  f.file = file;
  f.line = line;
  to_scheduler(f);
}

template <class T>
uint64_t to_word(T value) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "shuffles move at most 8 bytes");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <class T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline unsigned lane() { return state.current->number % kLanes; }

}  // namespace emulated

#define threadIdx (emulated::state.thread_index)
#define blockIdx (emulated::state.block_index)
#define blockDim (emulated::state.block_dim)
#define gridDim (emulated::state.grid_dim)
constexpr int warpSize = 32;

#define EMULATED_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(EMULATED_SITE) { emulated::barrier(file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATED_SITE) { emulated::exchange(mask, 0, file, line); }

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, EMULATED_SITE) {
  const unsigned lane = emulated::lane(), base = lane & ~(width - 1u);
  const uint64_t* words = emulated::exchange(mask, emulated::to_word(value), file, line);
  return emulated::from_word<T>(words[base + ((unsigned)from & (width - 1u))]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32, EMULATED_SITE) {
  const unsigned lane = emulated::lane(), from = lane ^ (unsigned)other;
  const uint64_t* words = emulated::exchange(mask, emulated::to_word(value), file, line);
  return from / width > lane / width ? value : emulated::from_word<T>(words[from]);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATED_SITE) {
  const unsigned lane = emulated::lane(), from = lane + delta;
  const uint64_t* words = emulated::exchange(mask, emulated::to_word(value), file, line);
  return from / width != lane / width ? value : emulated::from_word<T>(words[from]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATED_SITE) {
  const unsigned lane = emulated::lane();
  const uint64_t* words = emulated::exchange(mask, emulated::to_word(value), file, line);
  return lane % width < delta ? value : emulated::from_word<T>(words[lane - delta]);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATED_SITE) {
  const uint64_t* words = emulated::exchange(mask, predicate != 0, file, line);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i) votes |= (unsigned)words[i] << i;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate, EMULATED_SITE) { return __ballot_sync(mask, predicate, file, line) != 0; }
inline int __all_sync(unsigned mask, int predicate, EMULATED_SITE) { return __ballot_sync(mask, predicate, file, line) == 0xffffffffu; }
#undef EMULATED_SITE
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
void __stcs(T* p, T value) { *p = value; }
template <class T>
T atomicAdd(T* p, T value) {
  static_assert(std::is_integral<T>::value, "floating-point atomics are not deterministic");
  const T old = *p;
  *p = old + value;
  return old;
}

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __uint_as_float(unsigned u) { return emulated::from_word<float>(u); }
inline unsigned __float_as_uint(float x) { return (unsigned)emulated::to_word(x); }
inline float __int_as_float(int i) { return emulated::from_word<float>((unsigned)i); }
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline double __longlong_as_double(long long i) { return emulated::from_word<double>((uint64_t)i); }
inline long long __double_as_longlong(double x) { return (long long)emulated::to_word(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
#define EMULATED_MINMAX(T)                                      \
  inline T min(T a, T b) { return b < a ? b : a; }              \
  inline T max(T a, T b) { return a < b ? b : a; }
EMULATED_MINMAX(int)
EMULATED_MINMAX(unsigned)
EMULATED_MINMAX(long)
EMULATED_MINMAX(unsigned long)
EMULATED_MINMAX(long long)
EMULATED_MINMAX(unsigned long long)
#undef EMULATED_MINMAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = emulated::state.error;
  emulated::state.error = cudaSuccess;
  return error;
}
inline cudaError_t cudaPeekAtLastError() { return emulated::state.error; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
                                                                                    : "invalid argument";
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t = nullptr) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}
