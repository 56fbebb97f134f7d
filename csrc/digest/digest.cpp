#include <mutex>

#include "isa.h"
#include "parallel.h"

namespace {

struct Box {
  const char* data;
  int itemsize, dims;
  const int64_t *sizes, *strides;
  const uint64_t* steps;
};

// Elements [begin, end) of the last dimension at the outer position `outer` (row-major over the other dimensions).
uint64_t one_line(const Box& box, uint64_t offset, int64_t outer, int64_t begin, int64_t end) {
  const int last = box.dims - 1;
  int64_t element = begin * box.strides[last];
  uint64_t index = offset + (uint64_t)begin * box.steps[last];
  for (int d = last - 1; d >= 0; --d) {
    const int64_t i = outer % box.sizes[d];
    outer /= box.sizes[d];
    element += i * box.strides[d];
    index += (uint64_t)i * box.steps[d];
  }
  return megarl::active().digest_line(box.data + element * box.itemsize, box.itemsize, end - begin, box.strides[last],
                                      index, box.steps[last]);
}

}  // namespace

extern "C" void megarl_cpu_digest(const void* data, int itemsize, int dims, const int64_t* sizes,
                                  const int64_t* strides, uint64_t offset, const uint64_t* steps, uint64_t* digest,
                                  int threads) {
  const Box box = {static_cast<const char*>(data), itemsize, dims, sizes, strides, steps};
  const int64_t width = sizes[dims - 1];
  int64_t total = 1;
  for (int d = 0; d < dims; ++d) total *= sizes[d];
  uint64_t sum = 0;
  std::mutex lock;
  megarl::parallel(total, total, threads, [&](int64_t begin, int64_t end) {
    uint64_t part = 0;  // addition modulo 2^64 commutes: the split over threads changes nothing
    while (begin < end) {
      const int64_t outer = begin / width, from = begin % width;
      const int64_t to = std::min(width, from + (end - begin));
      part += one_line(box, offset, outer, from, to);
      begin += to - from;
    }
    const std::lock_guard<std::mutex> guard(lock);
    sum += part;
  });
  *digest = sum;
}
