// Products of an fp32 weight with a few rows of x that have the bits of panel.h, where every sum is added up input by
// input: a vector holds the same input of LANES rows of the weight, which are turned in registers.
#pragma once

#include "linear/matvec_input.h"
#include "linear/panel.h"

namespace {
namespace panels {

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
