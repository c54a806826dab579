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

// ROWS rows and N vectors of c = a b, or of c += a b.
template <int N, bool ACCUMULATE>
inline void tile(const LeftFactor& a, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_step) {
  Floats sums[ROWS][N];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int n = 0; n < N; ++n) sums[r][n] = ACCUMULATE ? load<Floats>(c + r * c_step + n * LANES) : Floats{};
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[N];
    UNROLL for (int n = 0; n < N; ++n) right[n] = load<Floats>(b + k * b_step + n * LANES);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const float left = a.data[r * a.down + k * a.along];
      UNROLL for (int n = 0; n < N; ++n) sums[r][n] += left * right[n];
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int n = 0; n < N; ++n) std::memcpy(c + r * c_step + n * LANES, &sums[r][n], sizeof(Floats));
}

// c (rows, columns) = a (rows, depth) b (depth, columns), or c += a b; rows and columns are rounded up to
// whole tiles.
template <bool ACCUMULATE = false>
void multiply(const LeftFactor& a, Scratch& b, int64_t rows, int64_t depth, int64_t columns, Scratch& c) {
  for (int64_t n = 0; n < columns; n += 2 * LANES)  // a strip of b stays in the cache for all rows
    for (int64_t m = 0; m < rows; m += ROWS) {
      const LeftFactor from{a.data + m * a.down, a.down, a.along};
      if (n + LANES < columns)
        tile<2, ACCUMULATE>(from, b.row(0) + n, b.step, depth, c.row(m) + n, c.step);
      else
        tile<1, ACCUMULATE>(from, b.row(0) + n, b.step, depth, c.row(m) + n, c.step);
    }
}

LeftFactor plain(Scratch& a) { return {a.row(0), a.step, 1}; }
LeftFactor transposed(Scratch& a) { return {a.row(0), 1, a.step}; }

}  // namespace causal
}  // namespace
