#include <algorithm>
#include <mutex>
#include <vector>

#include "digest/box.h"
#include "isa.h"
#include "parallel.h"

namespace megarl {
namespace {

// Leaves out dimensions of size 1, puts the others into the order of memory (sums do not mind) and joins neighbours
// that are one run both in memory and in the flat index.
void fold(int dims, const int64_t* sizes, const int64_t* strides, const int64_t* steps, Box* box) {
  int order[kMaxDims], count = 0;
  for (int d = 0; d < dims; ++d) {
    if (sizes[d] == 1) continue;
    int at = count++;
    for (; at > 0 && strides[order[at - 1]] < strides[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  box->dims = 0;
  for (int i = 0; i < count; ++i) {
    const int d = order[i], last = box->dims - 1;
    if (last >= 0 && box->strides[last] == sizes[d] * strides[d] &&
        box->steps[last] == (uint64_t)sizes[d] * (uint64_t)steps[d]) {
      box->sizes[last] *= sizes[d];
      box->strides[last] = strides[d];
      box->steps[last] = (uint64_t)steps[d];
      continue;
    }
    box->sizes[box->dims] = sizes[d];
    box->strides[box->dims] = strides[d];
    box->steps[box->dims++] = (uint64_t)steps[d];
  }
  if (box->dims == 0) {
    box->sizes[0] = box->strides[0] = 1;
    box->steps[0] = 1;
    box->dims = 1;
  }
}

// Units of work in a line: elements, or of runs the blocks that a line touches at most.
int64_t units_of(const Box& box) {
  if (box.width() == 0 || !box.runs()) return box.width();
  const uint64_t per = (uint64_t)box.per_block();
  uint64_t phase = box.offset % per;  // elements of a line's first block that come before the line
  for (int d = 0; d + 1 < box.dims; ++d)
    if (box.steps[d] % per) phase = per - 1;  // lines differ in it
  return (int64_t)((phase + (uint64_t)box.width() - 1) / per + 1);
}

// Elements [begin, end) of a box, counted line by line.
uint64_t part_of(const Box& box, int64_t begin, int64_t end) {
  const auto digest_line = active().digest_line;
  uint64_t sum = 0;
  while (begin < end) {
    const int64_t outer = begin / box.width(), from = begin % box.width();
    const int64_t count = std::min(box.width() - from, end - begin);
    int64_t element = from * box.stride();
    uint64_t index = box.offset + (uint64_t)from * box.step();
    box.line((uint32_t)outer, &element, &index);
    sum += digest_line(static_cast<const char*>(box.data) + element * box.itemsize, box.itemsize, count, box.stride(),
                       index, box.step());
    begin += count;
  }
  return sum;
}

}  // namespace
}  // namespace megarl

extern "C" int64_t megarl_digest_table(const int64_t* boxes, int64_t count, void* table) {
  int64_t pieces = 0;
  for (int64_t i = 0; i < count; ++i) {
    megarl::Box& box = static_cast<megarl::Box*>(table)[i];
    const int dims = (int)boxes[3];
    const int64_t *sizes = boxes + 4, *strides = sizes + dims, *steps = strides + dims;
    box.data = reinterpret_cast<const void*>(boxes[0]);
    box.itemsize = (int16_t)boxes[1];
    box.shift = boxes[1] == 8 ? 0 : boxes[1] == 4 ? 1 : boxes[1] == 2 ? 2 : 3;
    box.offset = (uint64_t)boxes[2];
    box.first = pieces;
    megarl::fold(dims, sizes, strides, steps, &box);
    box.lines = 1;
    for (int d = 0; d + 1 < box.dims; ++d) box.lines *= box.sizes[d];
    if (box.lines > UINT32_MAX) return -1;
    box.units = megarl::units_of(box);
    pieces += (box.lines * box.units + megarl::kPiece - 1) / megarl::kPiece;
    boxes = steps + dims;
  }
  return pieces;
}

extern "C" void megarl_cpu_digests(const void* table, int64_t count, int64_t, uint64_t* digests, int threads) {
  const auto* boxes = static_cast<const megarl::Box*>(table);
  std::vector<int64_t> first(count + 1);  // elements of the boxes before
  for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + boxes[i].lines * boxes[i].width();
  std::fill(digests, digests + count, 0);
  std::mutex lock;
  megarl::parallel(first[count], first[count], threads, [&](int64_t begin, int64_t end) {
    int64_t i = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
    for (; begin < end; begin = first[++i]) {
      const uint64_t part = megarl::part_of(boxes[i], begin - first[i], std::min(end, first[i + 1]) - first[i]);
      const std::lock_guard<std::mutex> guard(lock);
      digests[i] += part;  // addition modulo 2^64 commutes: the split over threads changes nothing
    }
  });
}
