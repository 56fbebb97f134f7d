// Splits [0, count) into contiguous parts over threads. Parts never share a result, so the split changes no bits.
#pragma once
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace megarl {

// A thread costs about 20 us to start: it is worth it from this many elements of work on.
constexpr int64_t kElementsPerThread = 1 << 17;

template <class Body>
void parallel(int64_t count, int64_t elements, int threads, const Body& body) {
  const int64_t wanted = std::min<int64_t>({threads, count, elements / kElementsPerThread});
  if (wanted <= 1) {
    body(int64_t{0}, count);
    return;
  }
  std::vector<std::thread> pool;
  pool.reserve(wanted - 1);
  for (int64_t i = 1; i < wanted; ++i) pool.emplace_back([&, i] { body(count * i / wanted, count * (i + 1) / wanted); });
  body(int64_t{0}, count / wanted);
  for (auto& thread : pool) thread.join();
}

}  // namespace megarl
