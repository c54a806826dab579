// Many rows at once, side by side: a panel holds LANES or 2 LANES rows feature by feature, x[feature][row].
//
// A product multiplies one weight with all rows of a panel and reads the weights as they are stored; norms, sums and
// exponentials go row by row in their lanes.  Nothing is ever added up across a vector, so that what comes out for a row
// depends on no other row.
#pragma once

#include <cmath>
#include <utility>

#include "attention.h"

namespace {
namespace panels {

constexpr int TALL = LANES == 16 ? 12 : 6;  // rows of a weight at once: as many sums as there are registers for
constexpr int BROAD = 2;                    // vectors of rows in a panel
constexpr int64_t BLOCK = 8 * TALL;         // rows of a weight that stay near while the panels pass
constexpr int64_t LINE = 16;                // weights in a line of memory

// Weights that will be read after these: a few lines of them are fetched for each line that is multiplied.
struct Soon {
  const float* next;
  int64_t lines, each;  // still to be fetched, and how many at a time

  // All of them in the time that `tiles` takes `times`.
  Soon(const float* from, int64_t weights, int64_t rows, int64_t K, int64_t times)
      : next(from), lines((weights + LINE - 1) / LINE) {
    const int64_t steps = std::max<int64_t>(1, rows / TALL * (K / LINE) * times);
    each = (lines + steps - 1) / steps;
  }
  void fetch() {
    for (int64_t n = std::min(each, lines); n > 0; --n, --lines, next += LINE) __builtin_prefetch(next, 0, 2);
  }
};

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

// -- products ---------------------------------------------------------------------------------------------------------

// R rows of a weight (stride K) with a panel x (K, C LANES) -> y (R, C LANES).
template <int R, int C>
inline void tile(const float* weight, int64_t K, const float* x, const float* bias, float* y, Soon& soon) {
  Floats sums[R][C];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int c = 0; c < C; ++c) sums[r][c] = all(bias ? bias[r] : 0.0f);
  const auto add = [&](int64_t k) {
    Floats rows[C];
    UNROLL for (int c = 0; c < C; ++c) rows[c] = load<Floats>(x + (k * C + c) * LANES);
    UNROLL for (int r = 0; r < R; ++r) {
      const float w = weight[r * K + k];
      UNROLL for (int c = 0; c < C; ++c) sums[r][c] += rows[c] * w;
    }
  };
  int64_t k = 0;
  for (; k + LINE <= K; k += LINE) {
    soon.fetch();
    for (int64_t n = k; n < k + LINE; ++n) add(n);
  }
  for (; k < K; ++k) add(k);
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int c = 0; c < C; ++c) store(y + (r * C + c) * LANES, sums[r][c]);
}

template <int C>
inline void tiles(const float* weight, int64_t count, int64_t K, const float* x, const float* bias, float* y, Soon& soon) {
  int64_t n = 0;
  const auto next = [&]<int R>() {
    for (; n + R <= count; n += R)
      tile<R, C>(weight + n * K, K, x, bias ? bias + n : nullptr, y + n * C * LANES, soon);
  };
  next.template operator()<TALL>();
  next.template operator()<4>();
  next.template operator()<1>();
}

inline void tiles(int broad, const float* weight, int64_t count, int64_t K, const float* x, const float* bias, float* y,
                  Soon& soon) {
  broad == BROAD ? tiles<BROAD>(weight, count, K, x, bias, y, soon) : tiles<1>(weight, count, K, x, bias, y, soon);
}

// -- between products -------------------------------------------------------------------------------------------------

// A panel of `size` features normed row by row.
inline void normed(const Norm& norm, const float* x, int64_t size, int broad, float* to) {
  const int64_t step = int64_t(broad) * LANES;
  for (int c = 0; c < broad; ++c) {
    const float* from = x + c * LANES;
    Floats mean = {}, square = {};
    if (norm.kind == 1) {
      for (int64_t k = 0; k < size; ++k) mean += load<Floats>(from + k * step);
      mean /= float(size);
    }
    for (int64_t k = 0; k < size; ++k) {
      const Floats v = load<Floats>(from + k * step) - mean;
      square += v * v;
    }
    Floats by = square / float(size) + norm.eps;
    for (int lane = 0; lane < LANES; ++lane) by[lane] = 1.0f / std::sqrt(by[lane]);
    for (int64_t k = 0; k < size; ++k) {
      Floats v = (load<Floats>(from + k * step) - mean) * by;
      if (norm.weight) v *= norm.weight[k] + (norm.offset ? 1.0f : 0.0f);
      if (norm.bias) v += norm.bias[k];
      store(to + k * step + c * LANES, v);
    }
  }
}

// Lanes of two vectors that are S apart exchanged: one step of turning a square of LANES by LANES numbers over.
template <int S, size_t... I>
inline void exchange(Floats& one, Floats& two, std::index_sequence<I...>) {
  const Floats a = one, b = two;
  one = __builtin_shufflevector(a, b, (I & S ? LANES + I - S : I)...);
  two = __builtin_shufflevector(a, b, (I & S ? LANES + I : I + S)...);
}

template <int S>
inline void exchanged(Floats* v) {
  UNROLL for (int i = 0; i < LANES; ++i)
    if (!(i & S)) exchange<S>(v[i], v[i + S], std::make_index_sequence<LANES>());
}

inline void turn_square(Floats* v) {
  exchanged<1>(v), exchanged<2>(v), exchanged<4>(v);
  if constexpr (LANES == 16) exchanged<8>(v);
}

// The largest of a vector.
inline float largest_of(Floats v) {
  using Eight = float __attribute__((vector_size(32)));
  using Four = float __attribute__((vector_size(16)));
#if defined(__AVX512F__)
  const Eight one = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const Eight two = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), e = one > two ? one : two;
#else
  const Eight e = v;
#endif
  const Four low = __builtin_shufflevector(e, e, 0, 1, 2, 3), high = __builtin_shufflevector(e, e, 4, 5, 6, 7);
  const Four f = low > high ? low : high;
  return std::max(std::max(f[0], f[1]), std::max(f[2], f[3]));
}

// The lanes before `count` as they are, `rest` in the others.
inline Floats before(Floats v, int64_t count, float rest) {
  Words lane;
  UNROLL for (int n = 0; n < LANES; ++n) lane[n] = n;
  return lane < int32_t(count) ? v : all(rest);
}

// The sums of LANES vectors, each in its lane.
template <int S>
inline void folded(Floats* v) {
  UNROLL for (int i = 0; i < LANES; i += 2 * S) {
    exchange<S>(v[i], v[i + S], std::make_index_sequence<LANES>());
    v[i] += v[i + S];
  }
}

inline Floats all_sums(Floats* v) {
  folded<1>(v), folded<2>(v), folded<4>(v);
  if constexpr (LANES == 16) folded<8>(v);
  return v[0];
}

// (height, width) numbers, `from_step` apart from row to row, as (width, height), `to_step` apart.
inline void transposed(const float* from, int64_t height, int64_t width, int64_t from_step, float* to, int64_t to_step) {
  Floats square[LANES];
  for (int64_t i = 0; i < height; i += LANES)
    for (int64_t j = 0; j < width; j += LANES) {
      if (i + LANES <= height && j + LANES <= width) {
        UNROLL for (int n = 0; n < LANES; ++n) square[n] = load<Floats>(from + (i + n) * from_step + j);
        turn_square(square);
        UNROLL for (int n = 0; n < LANES; ++n) store(to + (j + n) * to_step + i, square[n]);
        continue;
      }
      for (int64_t m = i; m < std::min<int64_t>(height, i + LANES); ++m)
        for (int64_t n = j; n < std::min<int64_t>(width, j + LANES); ++n) to[n * to_step + m] = from[m * from_step + n];
    }
}

}  // namespace panels
}  // namespace
