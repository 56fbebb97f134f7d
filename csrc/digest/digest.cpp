#include <mutex>

#include "digest/box.h"
#include "isa.h"
#include "parallel.h"

extern "C" void megarl_cpu_digest(const void* data, int itemsize, int dims, const int64_t* sizes,
                                  const int64_t* strides, uint64_t offset, const uint64_t* steps, uint64_t* digest,
                                  int threads) {
  megarl::Box box;
  if (!megarl::fold(dims, sizes, strides, steps, &box)) return;  // megarl/ops/digest.py lets no such box through
  int64_t total = 1;
  for (int d = 0; d < box.dims; ++d) total *= box.sizes[d];
  const auto digest_line = megarl::active().digest_line;
  uint64_t sum = 0;
  std::mutex lock;
  megarl::parallel(total, total, threads, [&](int64_t begin, int64_t end) {
    uint64_t part = 0;  // addition modulo 2^64 commutes: the split over threads changes nothing
    while (begin < end) {
      const int64_t outer = begin / box.width(), from = begin % box.width();
      const int64_t count = std::min(box.width() - from, end - begin);
      int64_t element = from * box.stride();
      uint64_t index = offset + (uint64_t)from * box.step();
      box.line(outer, &element, &index);
      part += digest_line(static_cast<const char*>(data) + element * itemsize, itemsize, count, box.stride(), index,
                          box.step());
      begin += count;
    }
    const std::lock_guard<std::mutex> guard(lock);
    sum += part;
  });
  *digest = sum;
}
