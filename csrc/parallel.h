// Splits [0, count) into contiguous parts over OpenMP threads. Parts never share a result, so the split changes no
// bits.
// torch brings libgomp.so.1 along; linked by that name, torch's threads are ours too and do not fight for the cores.
#pragma once
#include <algorithm>
#include <cstdint>

namespace megarl {

// Another thread is worth waking from this many elements of work on.
constexpr int64_t kElementsPerThread = 1 << 15;

template <class Body>
void parallel(int64_t count, int64_t elements, int threads, const Body& body) {
  const int64_t wanted = std::min<int64_t>({threads, count, elements / kElementsPerThread});
  if (wanted <= 1) {
    body(int64_t{0}, count);
    return;
  }
#pragma omp parallel for num_threads(static_cast<int>(wanted)) schedule(static, 1)
  for (int64_t i = 0; i < wanted; ++i) body(count * i / wanted, count * (i + 1) / wanted);
}

}  // namespace megarl
