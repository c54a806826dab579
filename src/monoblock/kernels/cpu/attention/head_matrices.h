// Small matrices in a core's cache: heads that are copied in, some of them transposed, and their products.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "linear/matvec.h"

namespace {
namespace causal {

constexpr int64_t BLOCK = 32;          // queries at a time
constexpr int64_t PREFETCH_ROWS = 32;  // rows that are fetched ahead

constexpr int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// (rows, columns) in rows of whole vectors, filled up with zeros; one more vector between rows avoids cache conflicts
// between columns.
struct Scratch {
  int64_t rows, columns, step;
  std::vector<float> memory;
  Scratch(int64_t r, int64_t c) : rows(r), columns(round_up(c, LANES)), step(columns + LANES) {
    memory.assign(round_up(rows, BLOCK) * step, 0.0f);
  }
  float* row(int64_t n) { return memory.data() + n * step; }
  void clear() { std::fill(memory.begin(), memory.end(), 0.0f); }
};

// One head of a tensor (B, H, T, size) with a contiguous last axis.
struct Head {
  float* data;
  int64_t step, size;
  Head(const at::Tensor& t, int64_t b, int64_t h)
      : data(static_cast<float*>(t.data_ptr()) + b * t.stride(0) + h * t.stride(1)), step(t.stride(2)),
        size(t.size(3)) {}
  float* row(int64_t n) const { return data + n * step; }
  // Rows lie far apart, perhaps each on a page of its own, so hardware prefetchers do not find them.
  void fetch(int64_t first, int64_t count) const {
    for (int64_t n = first; n < first + count; ++n)
      for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(row(n) + i);
  }
};

inline void copy_scaled(const float* from, int64_t count, float scale, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * scale;
}

void copy_rows(const Head& from, int64_t first, int64_t count, float scale, Scratch& to) {
  for (int64_t n = 0; n < count; ++n) {
    from.fetch(first + n + PREFETCH_ROWS, 1);
    copy_scaled(from.row(first + n), from.size, scale, to.row(n));
  }
}

void copy_transposed(const Head& from, int64_t count, Scratch& to) {
  for (int64_t first = 0; first < count; first += LANES) {  // few rows at a time, which stay in the cache
    from.fetch(first + PREFETCH_ROWS, LANES);
    for (int64_t i = 0; i < from.size; ++i)
      for (int64_t n = first; n < std::min(first + LANES, count); ++n) to.row(i)[n] = from.row(n)[i];
  }
}

// The left factor: its entry (m, k) is at data[m * down + k * along], so that it can be read transposed.
struct LeftFactor {
  const float* data;
  int64_t down, along;
};

#if defined(__ARM_NEON)

constexpr int STRIP = 3;  // vectors of c in a tile, as many as registers hold

// Add the products of the steps in which the numbers of a lie side by side, four of a row or one of each row, and are
// multiplied from the lanes of a vector; return the number of these steps.
template <int N>
INLINED int64_t add_lanes(const LeftFactor& a, const float* b, int64_t b_step, int64_t depth, Floats (&sums)[ROWS][N]) {
  static_assert(LANES == 4 && ROWS == 4);
  int64_t k = 0;
  for (; a.along == 1 && k + LANES <= depth; k += LANES) {
    float32x4_t left[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) left[r] = vld1q_f32(a.data + r * a.down + k);
    const auto add_step = [&]<int LANE>() {
      UNROLL for (int n = 0; n < N; ++n) {
        const float32x4_t right = vld1q_f32(b + (k + LANE) * b_step + n * LANES);
        UNROLL for (int r = 0; r < ROWS; ++r) sums[r][n] = vfmaq_laneq_f32(sums[r][n], right, left[r], LANE);
      }
    };
    add_step.template operator()<0>(), add_step.template operator()<1>();
    add_step.template operator()<2>(), add_step.template operator()<3>();
  }
  for (; a.down == 1 && k < depth; ++k) {
    const float32x4_t left = vld1q_f32(a.data + k * a.along);
    UNROLL for (int n = 0; n < N; ++n) {
      const float32x4_t right = vld1q_f32(b + k * b_step + n * LANES);
      sums[0][n] = vfmaq_laneq_f32(sums[0][n], right, left, 0);
      sums[1][n] = vfmaq_laneq_f32(sums[1][n], right, left, 1);
      sums[2][n] = vfmaq_laneq_f32(sums[2][n], right, left, 2);
      sums[3][n] = vfmaq_laneq_f32(sums[3][n], right, left, 3);
    }
  }
  return k;
}

#else

constexpr int STRIP = 2;

template <int N>
inline int64_t add_lanes(const LeftFactor&, const float*, int64_t, int64_t, Floats (&)[ROWS][N]) {
  return 0;  // here a number of a is broadcast from memory
}

#endif

// ROWS rows and N vectors of c = a b, or of c += a b.
template <int N, bool ACCUMULATE>
inline void tile(const LeftFactor& a, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_step) {
  Floats sums[ROWS][N];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int n = 0; n < N; ++n) sums[r][n] = ACCUMULATE ? load<Floats>(c + r * c_step + n * LANES) : Floats{};
  for (int64_t k = add_lanes(a, b, b_step, depth, sums); k < depth; ++k) {
    Floats right[N];
    UNROLL for (int n = 0; n < N; ++n) right[n] = load<Floats>(b + k * b_step + n * LANES);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const float left = a.data[r * a.down + k * a.along];
      UNROLL for (int n = 0; n < N; ++n) sums[r][n] += left * right[n];
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int n = 0; n < N; ++n) store(c + r * c_step + n * LANES, sums[r][n]);
}

// c (rows, columns) = a (rows, depth) b (depth, columns), or c += a b; rows and columns are rounded up to
// whole tiles.
template <bool ACCUMULATE = false>
void multiply(const LeftFactor& a, Scratch& b, int64_t rows, int64_t depth, int64_t columns, Scratch& c) {
  const auto multiply_strip = [&]<int N>(int64_t column) {  // a strip of b stays in the cache for all rows
    for (int64_t m = 0; m < rows; m += ROWS)
      tile<N, ACCUMULATE>({a.data + m * a.down, a.down, a.along}, b.row(0) + column, b.step, depth, c.row(m) + column,
                          c.step);
  };
  const int64_t end = round_up(columns, LANES);
  int64_t column = 0;
  for (; column + STRIP * LANES <= end; column += STRIP * LANES) multiply_strip.template operator()<STRIP>(column);
  for (; column < end; column += LANES) multiply_strip.template operator()<1>(column);
}

LeftFactor plain(Scratch& a) { return {a.row(0), a.step, 1}; }
LeftFactor transposed(Scratch& a) { return {a.row(0), 1, a.step}; }

}  // namespace causal
}  // namespace
