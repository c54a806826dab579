// Small matrices in a core's cache: heads copied in, some of them turned, and their products.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "product.h"

namespace {
namespace causal {

constexpr int64_t BLOCK = 32;  // queries at a time
constexpr int64_t SOON = 32;   // rows fetched in advance

constexpr int64_t whole(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Numbers (rows, columns) by rows of whole vectors, zero beyond; one vector more apart, so that columns do not collide.
struct Matrix {
  int64_t rows, columns, step;
  std::vector<float> memory;
  Matrix(int64_t r, int64_t c) : rows(r), columns(whole(c, LANES)), step(columns + LANES) {
    memory.assign(whole(rows, BLOCK) * step, 0.0f);
  }
  float* row(int64_t n) { return memory.data() + n * step; }
  void clear() { std::fill(memory.begin(), memory.end(), 0.0f); }
};

// One head of a tensor (batch, heads, length, size), its last axis in one piece.
struct Head {
  float* data;
  int64_t step, size;
  Head(const at::Tensor& given, int64_t b, int64_t h)
      : data(static_cast<float*>(given.data_ptr()) + b * given.stride(0) + h * given.stride(1)),
        step(given.stride(2)),
        size(given.size(3)) {}
  float* row(int64_t n) const { return data + n * step; }
  // Rows lie far apart, each on a page of its own; those told of in advance come in time.
  void fetch(int64_t first, int64_t count) const {
    for (int64_t n = first; n < first + count; ++n)
      for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(row(n) + i);
  }
};

inline void scaled(const float* from, int64_t count, float by, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * by;
}

void copied(const Head& from, int64_t first, int64_t count, float by, Matrix& to) {
  for (int64_t n = 0; n < count; ++n) {
    from.fetch(first + n + SOON, 1);
    scaled(from.row(first + n), from.size, by, to.row(n));
  }
}

void turned(const Head& from, int64_t count, Matrix& to) {
  for (int64_t first = 0; first < count; first += LANES) {  // few rows at a time, which stay at hand
    from.fetch(first + SOON, LANES);
    for (int64_t i = 0; i < from.size; ++i)
      for (int64_t n = first; n < std::min(first + LANES, count); ++n) to.row(i)[n] = from.row(n)[i];
  }
}

// The left factor: its entry (m, k) is at data[m * down + k * along], so that it may as well be read turned.
struct Left {
  const float* data;
  int64_t down, along;
};

// ROWS rows and N vectors of c = a b, or added to it.
template <int N, bool ADDED>
inline void tile(const Left& a, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_step) {
  Floats sums[ROWS][N];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int n = 0; n < N; ++n) sums[r][n] = ADDED ? load<Floats>(c + r * c_step + n * LANES) : Floats{};
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

// c (rows, columns) = a (rows, depth) b (depth, columns), or added to it; rows and columns are made whole.
template <bool ADDED = false>
void product(const Left& a, Matrix& b, int64_t rows, int64_t depth, int64_t columns, Matrix& c) {
  for (int64_t n = 0; n < columns; n += 2 * LANES)  // a strip of b stays at hand for all rows
    for (int64_t m = 0; m < rows; m += ROWS) {
      const Left from{a.data + m * a.down, a.down, a.along};
      if (n + LANES < columns)
        tile<2, ADDED>(from, b.row(0) + n, b.step, depth, c.row(m) + n, c.step);
      else
        tile<1, ADDED>(from, b.row(0) + n, b.step, depth, c.row(m) + n, c.step);
    }
}

Left as_is(Matrix& a) { return {a.row(0), a.step, 1}; }
Left as_turned(Matrix& a) { return {a.row(0), 1, a.step}; }

}  // namespace causal
}  // namespace
