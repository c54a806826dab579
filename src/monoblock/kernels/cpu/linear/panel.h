// Many rows at once: a panel holds LANES or 2 LANES rows of x feature by feature, x[feature][row].
//
// A product multiplies each weight, read as it is stored, with all rows of a panel.  Nothing is added up across a vector,
// so the result of a row depends on no other row.
#pragma once

#include <array>

#include "linear/matvec.h"
#include "linear/tiles.h"

namespace {
namespace panels {

constexpr int TILE_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 8;  // rows of a weight in a tile: what registers hold
constexpr int MAX_VECTORS = 2;                   // vectors of rows in a panel
constexpr int TOGETHER = LANES == 16 ? 2 : 1;    // panels that are multiplied at once by a tile of an fp32 weight
constexpr int64_t BLOCK_ROWS = 8 * TILE_ROWS;    // rows of a weight that stay in the cache for all panels
constexpr int64_t LINE_FLOATS = 16;              // floats in a cache line
constexpr int64_t PANEL = MAX_VECTORS * LANES;   // rows in a panel

// How rows lie in panels: one of numbers (columns, rows) begins PANEL * columns floats behind the one before.
struct Panels {
  int64_t batch = 0;  // of all rows
  int64_t vectors() const { return (batch + LANES - 1) / LANES; }
  int64_t count() const { return (batch + PANEL - 1) / PANEL; }
  int vectors_of(int64_t panel) const { return int(std::min<int64_t>(MAX_VECTORS, vectors() - panel * MAX_VECTORS)); }
  int64_t step(int64_t panel) const { return vectors_of(panel) * LANES; }
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
                 Fetch& fetch) {
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
    fetch.fetch();
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
                  ForPanels<float> y, Fetch& fetch) {
  int64_t n = 0;
  const auto next = [&]<int R>() {
    for (; n + R <= count; n += R) {
      tile<R, C, P>(weight + n * K, K, x, bias ? bias + n : nullptr, y, fetch);
      for (int p = 0; p < P; ++p) y[p] += R * C * LANES;
    }
  };
  next.template operator()<TILE_ROWS / P>();
  if constexpr (TILE_ROWS / P > 4) next.template operator()<4>();
  next.template operator()<1>();
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

// -- a few rows of x with the same bits -------------------------------------------------------------------------------

// Every sum is added up input by input, as above: a vector holds the same input of LANES rows of an fp32 weight, which
// are turned in registers.

constexpr int GROUPS = 2;  // vectors of rows of the weight at a time

// Some rows of the weight, at most GROUPS * LANES, with B rows of x -> y (B, y_step).
template <int B>
inline void few_rows_tile(const float* weight, const WeightRows& band, int64_t K, const float* x, int64_t x_step,
                          const float* bias, float* y, int64_t y_step) {
  Floats sums[GROUPS][B];
  const float* rows[GROUPS * LANES];
  for (int n = 0; n < GROUPS * LANES; ++n) rows[n] = weight + band[std::min(n, band.count - 1)] * K;
  UNROLL for (int g = 0; g < GROUPS; ++g) {
    Floats start = {};
    for (int n = 0; bias && n < LANES && g * LANES + n < band.count; ++n) start[n] = bias[band[g * LANES + n]];
    UNROLL for (int b = 0; b < B; ++b) sums[g][b] = start;
  }
  const auto add = [&](int64_t k, int count, auto read) {  // `count` inputs
    Floats w[GROUPS][LANES];
    UNROLL for (int g = 0; g < GROUPS; ++g) {
      UNROLL for (int n = 0; n < LANES; ++n) w[g][n] = read(rows[g * LANES + n] + k);
      transpose_square(w[g]);
    }
    UNROLL for (int n = 0; n < count; ++n)
      UNROLL for (int b = 0; b < B; ++b)
        UNROLL for (int g = 0; g < GROUPS; ++g) sums[g][b] += w[g][n] * x[b * x_step + k + n];
  };
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES)
    add(k, LANES, [](const float* from) {
      prefetch(from);
      return load<Floats>(from);
    });
  if (k < K) add(k, int(K - k), [&](const float* from) { return load_lanes(from, int(K - k)); });
  for (int b = 0; b < B; ++b)
    for (int n = 0; n < band.count; ++n) y[b * y_step + band[n]] = sums[n / LANES][b][n % LANES];
}

// The rows from low to high of a weight with all rows of x -> y (batch, y_step).
inline void multiply_few_rows(const float* weight, int64_t low, int64_t high, int64_t K, const float* x, int64_t batch,
                              int64_t x_step, const float* bias, float* y, int64_t y_step) {
  constexpr int SIZE = GROUPS * LANES;
  const auto multiply = [&](const WeightRows& band) {
    const auto tile = [&]<int B>(int64_t b) {
      few_rows_tile<B>(weight, band, K, x + b * x_step, x_step, bias, y + b * y_step, y_step);
    };
    int64_t b = 0;
    for (; b + 8 <= batch; b += 8) tile.template operator()<8>(b);
    if (b + 4 <= batch) tile.template operator()<4>(b), b += 4;
    if (b + 2 <= batch) tile.template operator()<2>(b), b += 2;
    if (b < batch) tile.template operator()<1>(b);
  };
  const int64_t apart = (high - low) / SIZE, rest = low + apart * SIZE;
  for (int64_t n = 0; n < apart; ++n) multiply({low + n, apart, SIZE});
  if (rest < high) multiply({rest, 1, int(high - rest)});
}

}  // namespace panels
}  // namespace
