// Many rows at once: a panel holds LANES or 2 LANES rows of x feature by feature, x[feature][row].
//
// A product multiplies each weight, read as it is stored, with all rows of a panel; norms, sums and exponentials have
// one row in each lane.  Nothing is added up across a vector, so the result of a row depends on no other row.
#pragma once

#include <array>
#include <cmath>
#include <utility>

#include "attention/attention.h"

namespace {
namespace panels {

constexpr int TILE_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 8;  // rows of a weight in a tile: what registers hold
constexpr int MAX_VECTORS = 2;                   // vectors of rows in a panel
constexpr int TOGETHER = LANES == 16 ? 2 : 1;    // panels that are multiplied at once by a tile of an fp32 weight
constexpr int64_t BLOCK_ROWS = 8 * TILE_ROWS;    // rows of a weight that stay in the cache for all panels
constexpr int64_t LINE_FLOATS = 16;              // floats in a cache line

// The weights of the next block: a few of their cache lines are fetched for each line that is multiplied.
struct Prefetch {
  const float* next;
  int64_t lines, each;  // still to be fetched, and how many at a time

  // Spread over `times` calls of `tiles`.
  Prefetch(const float* from, int64_t weights, int64_t rows, int64_t K, int64_t times)
      : next(from), lines((weights + LINE_FLOATS - 1) / LINE_FLOATS) {
    const int64_t steps = std::max<int64_t>(1, rows / TILE_ROWS * (K / LINE_FLOATS) * times);
    each = (lines + steps - 1) / steps;
  }
  void fetch() {
    for (int64_t n = std::min(each, lines); n > 0; --n, --lines, next += LINE_FLOATS) __builtin_prefetch(next, 0, 2);
  }
};

// -- products ---------------------------------------------------------------------------------------------------------

#if defined(__ARM_NEON)
// Four inputs of R rows of a weight (stride K) with those of a panel x: a lane of each weight is multiplied as it is.
template <int R, int C>
inline void add_inputs(const float* weight, int64_t K, const float* x, Floats (&sums)[R][C]) {
  float32x4_t w[R];
  UNROLL for (int r = 0; r < R; ++r) w[r] = vld1q_f32(weight + r * K);
  const auto add = [&]<int LANE>() {
    UNROLL for (int c = 0; c < C; ++c) {
      const float32x4_t rows = vld1q_f32(x + (LANE * C + c) * LANES);
      UNROLL for (int r = 0; r < R; ++r) sums[r][c] = vfmaq_laneq_f32(sums[r][c], rows, w[r], LANE);
    }
  };
  add.template operator()<0>(), add.template operator()<1>(), add.template operator()<2>(), add.template operator()<3>();
}
#endif

template <class T>
using ForPanels = std::array<T*, TOGETHER>;  // a pointer for each of the panels that are multiplied together

// R rows of a weight (stride K) with P panels x (K, C LANES) -> y (R, C LANES).
template <int R, int C, int P>
inline void tile(const float* weight, int64_t K, ForPanels<const float> x, const float* bias, ForPanels<float> y,
                 Prefetch& prefetch) {
  Floats sums[P][R][C];
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int c = 0; c < C; ++c) sums[p][r][c] = all(bias ? bias[r] : 0.0f);
  const auto add = [&](int64_t k) {
    Floats rows[P][C];
    UNROLL for (int p = 0; p < P; ++p)
      UNROLL for (int c = 0; c < C; ++c) rows[p][c] = load<Floats>(x[p] + (k * C + c) * LANES);
    UNROLL for (int r = 0; r < R; ++r) {
      const float w = weight[r * K + k];
      UNROLL for (int p = 0; p < P; ++p)
        UNROLL for (int c = 0; c < C; ++c) sums[p][r][c] += rows[p][c] * w;
    }
  };
  int64_t k = 0;
  for (; k + LINE_FLOATS <= K; k += LINE_FLOATS) {
    prefetch.fetch();
#if defined(__ARM_NEON)
    for (int64_t n = k; n < k + LINE_FLOATS; n += LANES) add_inputs<R, C>(weight + n, K, x[0] + n * C * LANES, sums[0]);
#else
    for (int64_t n = k; n < k + LINE_FLOATS; ++n) add(n);
#endif
  }
  for (; k < K; ++k) add(k);
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int c = 0; c < C; ++c) store(y[p] + (r * C + c) * LANES, sums[p][r][c]);
}

// The sums of a tile fill the registers: with P panels it has TILE_ROWS / P rows.
template <int C, int P>
inline void tiles(const float* weight, int64_t count, int64_t K, ForPanels<const float> x, const float* bias,
                  ForPanels<float> y, Prefetch& prefetch) {
  int64_t n = 0;
  const auto next = [&]<int R>() {
    for (; n + R <= count; n += R) {
      tile<R, C, P>(weight + n * K, K, x, bias ? bias + n : nullptr, y, prefetch);
      for (int p = 0; p < P; ++p) y[p] += R * C * LANES;
    }
  };
  next.template operator()<TILE_ROWS / P>();
  if constexpr (TILE_ROWS / P > 4) next.template operator()<4>();
  next.template operator()<1>();
}

// -- between products -------------------------------------------------------------------------------------------------

// Norm each row of a panel of `size` features.
inline void apply_norm(const Norm& norm, const float* x, int64_t size, int vectors, float* to) {
  const int64_t step = int64_t(vectors) * LANES;
  for (int c = 0; c < vectors; ++c) {
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
    Floats scale = square / float(size) + norm.eps;
    for (int lane = 0; lane < LANES; ++lane) scale[lane] = 1.0f / std::sqrt(scale[lane]);
    for (int64_t k = 0; k < size; ++k) {
      Floats v = (load<Floats>(from + k * step) - mean) * scale;
      if (norm.weight) v *= norm.weight[k] + (norm.offset ? 1.0f : 0.0f);
      if (norm.bias) v += norm.bias[k];
      store(to + k * step + c * LANES, v);
    }
  }
}

// Exchange lanes of two vectors that are S apart: one step of transposing a square of LANES by LANES numbers.
template <int S, size_t... I>
inline void exchange(Floats& low, Floats& high, std::index_sequence<I...>) {
  const Floats a = low, b = high;
  low = __builtin_shufflevector(a, b, (I & S ? LANES + I - S : I)...);
  high = __builtin_shufflevector(a, b, (I & S ? LANES + I : I + S)...);
}

template <int S>
inline void exchange_all(Floats* v) {
  UNROLL for (int i = 0; i < LANES; ++i)
    if (!(i & S)) exchange<S>(v[i], v[i + S], std::make_index_sequence<LANES>());
}

inline void transpose_square(Floats* v) {
  exchange_all<1>(v), exchange_all<2>(v);
  if constexpr (LANES >= 8) exchange_all<4>(v);
  if constexpr (LANES == 16) exchange_all<8>(v);
}

// The largest lane of a vector.
inline float max_lane(Floats v) {
#if defined(__AVX512F__)
  const auto first = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
             second = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), e = first > second ? first : second;
#else
  const Floats e = v;
#endif
#if defined(__ARM_NEON)
  const Floats f = e;
#else
  const auto low = __builtin_shufflevector(e, e, 0, 1, 2, 3), high = __builtin_shufflevector(e, e, 4, 5, 6, 7),
             f = low > high ? low : high;
#endif
  return std::max(std::max(f[0], f[1]), std::max(f[2], f[3]));
}

// The first `count` lanes as they are, `rest` in the others.
inline Floats keep_first(Floats v, int64_t count, float rest) {
  Ints lane;
  UNROLL for (int n = 0; n < LANES; ++n) lane[n] = n;
  return lane < int32_t(count) ? v : all(rest);
}

// The sums of LANES vectors, each in its lane.
template <int S>
inline void fold(Floats* v) {
  UNROLL for (int i = 0; i < LANES; i += 2 * S) {
    exchange<S>(v[i], v[i + S], std::make_index_sequence<LANES>());
    v[i] += v[i + S];
  }
}

inline Floats sum_each(Floats* v) {
  fold<1>(v), fold<2>(v);
  if constexpr (LANES >= 8) fold<4>(v);
  if constexpr (LANES == 16) fold<8>(v);
  return v[0];
}

// (height, width) with rows `from_step` apart -> (width, height) with rows `to_step` apart.
inline void transpose(const float* from, int64_t height, int64_t width, int64_t from_step, float* to, int64_t to_step) {
  Floats square[LANES];
  for (int64_t i = 0; i < height; i += LANES)
    for (int64_t j = 0; j < width; j += LANES) {
      if (i + LANES <= height && j + LANES <= width) {
        UNROLL for (int n = 0; n < LANES; ++n) square[n] = load<Floats>(from + (i + n) * from_step + j);
        transpose_square(square);
        UNROLL for (int n = 0; n < LANES; ++n) store(to + (j + n) * to_step + i, square[n]);
        continue;
      }
      for (int64_t m = i; m < std::min<int64_t>(height, i + LANES); ++m)
        for (int64_t n = j; n < std::min<int64_t>(width, j + LANES); ++n) to[n * to_step + m] = from[m * from_step + n];
    }
}

}  // namespace panels
}  // namespace
