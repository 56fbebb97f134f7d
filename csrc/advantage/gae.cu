// Segmented scan of A_t = d_t + c A_{t+1}, each sequence cut into tiles from its own end.
//
// Lane l of a warp takes tokens l, l + 32, ...: every access is coalesced, whatever the alignment of a sequence. Within
// 32 tokens the sum over k >= l of c^(k-l) d_k comes from five shuffles; then groups, warps and tiles are chained, last
// first, as total + c^size * behind. Two ways to chain the tiles, with the same operations in the same order:
// one block walks all tiles of a sequence (many sequences), or every tile is reduced by a block of its own, the totals
// are chained, and every tile is done again with what lies behind it (few long ones). fma is written out, so that no
// compiler contracts one of the two otherwise than the other.
#include <cfloat>

#include "cuda/device.h"

namespace {

using namespace megarl;

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kGroups = (int)MEGARL_GAE_TILE / kThreads;
constexpr int kSteps = 5;  // log2(kWarp)
static_assert(kGroups * kThreads == MEGARL_GAE_TILE && (1 << kSteps) == kWarp, "whole groups of a warp's tokens");

struct Gae {
  const real *rewards, *values, *bootstrap;
  const int64_t* cu;
  int64_t sequences, tokens;
  double gamma;
  double step[kSteps];       // c^1, c^2, c^4, c^8, c^16
  double group, warp, tile;  // c^32, c^tokens of a warp, c^tokens of a tile
  double least;              // of any power: 0 only where c is, lest an infinity that is far behind become NaN
  real *advantages, *returns;
};

struct Range {
  int64_t begin, end;
};

__device__ Range sequence(const Gae& x, int64_t i) {
  const int64_t begin = x.cu[i] < 0 ? 0 : x.cu[i], end = x.cu[i + 1] > x.tokens ? x.tokens : x.cu[i + 1];
  return {begin, end};
}

// What a thread knows of its tile: its tokens' values and scans within their 32, and what the warp multiplies by.
struct Tile {
  double scan[kGroups];
  real value[kGroups];
};

__device__ double chain(const Gae& x, const Tile& tile, double behind) {
#pragma unroll
  for (int k = kGroups - 1; k >= 0; --k) behind = fma(x.group, behind, __shfl_sync(kAllLanes, tile.scan[k], 0));
  return behind;
}

// Loads the tile [base, base + MEGARL_GAE_TILE) of a sequence and scans each group of 32 tokens. Tokens in front of
// the sequence count as 0: nothing lies in front of them that could see it.
__device__ Tile load(const Gae& x, Range at, int64_t base, double bootstrap) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = base + warp * (kGroups * kWarp) + lane;
  Tile tile;
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    const int64_t t = first + k * kWarp;
    const bool real_token = t >= at.begin;
    tile.value[k] = real_token ? x.values[t] : (real)0;
    const double next = !real_token ? 0.0 : t + 1 < at.end ? (double)x.values[t + 1] : bootstrap;
    tile.scan[k] = real_token ? fma(x.gamma, next, (double)x.rewards[t]) - (double)tile.value[k] : 0.0;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const double other = __shfl_down_sync(kAllLanes, tile.scan[k], 1 << s);
      if (lane + (1 << s) < kWarp) tile.scan[k] = fma(x.step[s], other, tile.scan[k]);
    }
  }
  return tile;
}

// The tile's total, as if nothing lay behind it, for every thread; before[w] is then what lies behind warp w within the
// tile. Two barriers apart, `totals` may be used again.
__device__ double combine(const Gae& x, const Tile& tile, double (&totals)[kWarps], double& behind_warp) {
  const int warp = threadIdx.x / kWarp;
  const double total = chain(x, tile, 0.0);
  if (threadIdx.x % kWarp == 0) totals[warp] = total;
  __syncthreads();
  double sum = 0.0;
  for (int w = kWarps - 1; w >= 0; --w) {
    if (w == warp) behind_warp = sum;
    sum = fma(x.warp, sum, totals[w]);
  }
  return sum;
}

// Writes the tile's results. behind: A of the token behind the tile; behind_warp: as combine() left it.
__device__ void store(const Gae& x, Range at, int64_t base, const Tile& tile, double behind, double behind_warp) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  double to_end = 1.0, to_group = 1.0;  // c^tokens from the warp's end to the tile's, from the lane to its group's end
  for (int w = warp + 1; w < kWarps; ++w) to_end = fmax(to_end * x.warp, x.least);
  for (int s = 0; s < kSteps; ++s)
    if ((kWarp - lane) >> s & 1) to_group *= x.step[s];
  if (lane == 0) to_group = x.group;
  double next = fma(to_end, behind, behind_warp);
  const int64_t first = base + warp * (kGroups * kWarp) + lane;
#pragma unroll
  for (int k = kGroups - 1; k >= 0; --k) {
    const int64_t t = first + k * kWarp;
    const double advantage = fma(to_group, next, tile.scan[k]);
    next = fma(x.group, next, __shfl_sync(kAllLanes, tile.scan[k], 0));
    if (t >= at.begin) {
      x.advantages[t] = (real)advantage;
      x.returns[t] = (real)(advantage + (double)tile.value[k]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 4) gae_sequences(Gae x) {
  __shared__ double totals[2][kWarps];  // in turns: one barrier a tile is enough
  int turn = 0;
  for (int64_t i = blockIdx.x; i < x.sequences; i += gridDim.x) {
    const Range at = sequence(x, i);
    const double bootstrap = x.bootstrap[i];
    double behind = 0.0;
    for (int64_t end = at.end; end > at.begin; end -= MEGARL_GAE_TILE, turn ^= 1) {
      const int64_t base = end - MEGARL_GAE_TILE;
      const Tile tile = load(x, at, base, bootstrap);
      double behind_warp = 0.0;
      const double total = combine(x, tile, totals[turn], behind_warp);
      store(x, at, base, tile, behind, behind_warp);
      behind = fma(x.tile, behind, total);
    }
  }
}

// Tiles of sequence i have the slots from cu[i] / MEGARL_GAE_TILE + i on, its last tile first: at least as many as it
// has tiles, without a pass over cu that adds up tiles. Slots of other sequences are not among them as long as cu
// rises.
__device__ int64_t first_slot(const Gae& x, int64_t i) { return sequence(x, i).begin / MEGARL_GAE_TILE + i; }

struct Place {
  Range at;
  int64_t sequence, base;
  bool used;
};

__device__ Place place(const Gae& x, int64_t slot) {
  int64_t low = 0, high = x.sequences;  // the last sequence whose first slot is not behind this one
  while (low + 1 < high) {
    const int64_t middle = low + (high - low) / 2;
    if (first_slot(x, middle) <= slot) low = middle;
    else high = middle;
  }
  const Range at = sequence(x, low);
  const int64_t number = slot - first_slot(x, low);
  const int64_t end = at.end - number * MEGARL_GAE_TILE;
  return {at, low, end - MEGARL_GAE_TILE, number >= 0 && end > at.begin};
}

template <bool apply>
__global__ void __launch_bounds__(kThreads, 4) gae_tiles(Gae x, double* scratch, int64_t slots) {
  __shared__ double totals[2][kWarps];
  int turn = 0;
  for (int64_t slot = blockIdx.x; slot < slots; slot += gridDim.x) {
    const Place p = place(x, slot);
    if (!p.used) continue;  // for all threads of the block
    const Tile tile = load(x, p.at, p.base, x.bootstrap[p.sequence]);
    double behind_warp = 0.0;
    const double total = combine(x, tile, totals[turn], behind_warp);
    turn ^= 1;
    if (apply) store(x, p.at, p.base, tile, scratch[slot], behind_warp);
    else if (threadIdx.x == 0) scratch[slot] = total;
  }
}

// One warp per sequence turns the totals of its tiles into what lies behind each.
__global__ void __launch_bounds__(kWarp) gae_chain(Gae x, double* scratch, int64_t slots) {
  const int lane = threadIdx.x;
  for (int64_t i = blockIdx.x; i < x.sequences; i += gridDim.x) {
    const Range at = sequence(x, i);
    const int64_t tiles = at.end > at.begin ? (at.end - at.begin + MEGARL_GAE_TILE - 1) / MEGARL_GAE_TILE : 0;
    double* mine = scratch + first_slot(x, i);
    double behind = 0.0;
    for (int64_t start = 0; start < tiles; start += kWarp) {
      const bool used = start + lane < tiles && first_slot(x, i) + start + lane < slots;
      const double total = used ? mine[start + lane] : 0.0;
      double kept = 0.0;
      for (int l = 0; l < kWarp; ++l) {
        if (l == lane) kept = behind;
        behind = fma(x.tile, behind, __shfl_sync(kAllLanes, total, l));
      }
      if (used) mine[start + lane] = kept;
    }
  }
}

unsigned blocks(int64_t count) { return count < (1 << 30) ? (unsigned)count : 1u << 30; }

}  // namespace

extern "C" int megarl_cuda_gae(const real* rewards, const real* values, const int64_t* cu, int64_t sequences,
                               int64_t tokens, const real* bootstrap, double gamma, double lam, real* advantages,
                               real* returns, double* scratch, void* stream) {
  if (sequences == 0 || tokens == 0) return 0;
  Gae x{rewards, values, bootstrap, cu, sequences, tokens, gamma, {}, 0.0, 0.0, 0.0, 0.0, advantages, returns};
  double power = gamma * lam;
  if (power > 0.0) x.least = DBL_MIN;
  const auto square = [&](double y) { return fmax(y * y, x.least); };
  for (double& step : x.step) step = power, power = square(power);
  x.group = x.warp = power;
  for (int n = kGroups; n > 1; n /= 2) x.warp = square(x.warp);
  x.tile = x.warp;
  for (int n = kWarps; n > 1; n /= 2) x.tile = square(x.tile);
  if (!scratch) {
    MEGARL_LAUNCH(gae_sequences, blocks(sequences), kThreads, stream, x);
  } else {
    const int64_t slots = megarl_gae_slots(sequences, tokens);
    MEGARL_LAUNCH(gae_tiles<false>, blocks(slots), kThreads, stream, x, scratch, slots);
    MEGARL_LAUNCH(gae_chain, blocks(sequences), kWarp, stream, x, scratch, slots);
    MEGARL_LAUNCH(gae_tiles<true>, blocks(slots), kThreads, stream, x, scratch, slots);
  }
  return (int)cudaGetLastError();
}
