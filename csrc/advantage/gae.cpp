#include <algorithm>
#include <cfloat>
#include <vector>

#include "isa.h"
#include "parallel.h"

// Long sequences are cut into pieces of this many tokens, counted from their end: a matter of the sequence alone, so
// that its bits are too. The pieces' totals are chained, then each piece is done with what lies behind it.
constexpr int64_t kPiece = 1 << 15;

namespace {

struct Piece {
  int64_t start, end;
  double behind;  // A of the token behind it
  real next_value;
  bool first, last;  // of its sequence
};

}  // namespace

// The recursion runs in double: its rounding does not grow with the sequence's length.
extern "C" void megarl_cpu_gae(const real* rewards, const real* values, const int64_t* cu, int64_t sequences,
                               int64_t tokens, const real* bootstrap, double gamma, double lam, real* advantages,
                               real* returns, double* /*scratch*/, int threads) {
  const auto& kernel = megarl::active();
  std::vector<Piece> pieces;  // memory is walked backwards, as within a piece
  pieces.reserve((size_t)sequences);
  for (int64_t i = sequences - 1; i >= 0; --i) {
    const int64_t start = std::max<int64_t>(cu[i], 0), end = std::min(cu[i + 1], tokens);
    for (int64_t to = end; to > start; to -= kPiece) {
      const int64_t from = std::max(start, to - kPiece);
      pieces.push_back({from, to, 0.0, to == end ? bootstrap[i] : values[to], from == start, to == end});
    }
  }
  const auto number = (int64_t)pieces.size();
  megarl::parallel(number, tokens * 2, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Piece& p = pieces[i];
      if (!p.first)
        pieces[i + 1].behind =
            kernel.gae_total(rewards + p.start, values + p.start, kPiece, p.next_value, gamma, lam);
    }
  });
  double power = gamma * lam;
  for (int64_t n = kPiece; n > 1; n /= 2) power *= power;
  // Where the power underflows, an infinity behind the piece must stay one: 0 * inf is NaN.
  if (gamma * lam > 0.0) power = std::max(power, DBL_MIN);
  for (int64_t i = 1; i < number; ++i)
    if (!pieces[i].last) pieces[i].behind += power * pieces[i - 1].behind;
  megarl::parallel(number, tokens * 4, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Piece& p = pieces[i];
      kernel.gae_piece(rewards + p.start, values + p.start, p.end - p.start, p.next_value, p.behind, gamma, lam,
                       advantages + p.start, returns + p.start);
    }
  });
}
