// Products of fp32 matrices in tiles of bfloat16.  With x = x1 + x2 + x3 and w likewise (split_numbers.h),
//     x w = x1 w1 + (x1 w2 + x2 w1) + (x1 w3 + x2 w2 + x3 w1)   3 parts: what is left out is below 2^-24 of |x w|
//     x w = x1 w1 + (x1 w2 + x2 w1)                             2 parts: below 2^-16, for quantized weights
// and every sum is in fp32.  Six products in tiles take less than half the time of one in fp32.
#pragma once

#include <ATen/Parallel.h>

#include "linear/split_numbers.h"

#if MONOBLOCK_TILES

namespace {
namespace split {

constexpr int64_t LARGE_OPERAND = 1 << 20;  // bytes: not to be read again for every block of the other operand
constexpr int64_t GROUP_BLOCKS = 4;         // blocks that share one reading of a large operand

inline void load_a(const CacheLine* from) {
  _tile_loadd(4, from, 64);
  _tile_loadd(5, from + TILE, 64);
}

// B is read once for every block of A: it is not to replace A in the cache.
inline void load_b(const CacheLine* from) {
  _tile_stream_loadd(6, from, 64);
  _tile_stream_loadd(7, from + TILE, 64);
}

inline void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Add the product of a block of A and a block of B to the tiles 0 to 3; small parts first.
template <int PARTS>
inline void multiply_block(const CacheLine* a, const CacheLine* b, int64_t steps, Fetch& fetch) {
  constexpr int64_t part = 2 * TILE, size = PARTS * part;
  for (int64_t step = 0; step < steps; ++step, a += size, b += size) {
    fetch.fetch();
    if constexpr (PARTS == 3) {
      load_a(a), load_b(b + 2 * part), add_products();
      load_b(b + part), add_products();
      load_a(a + part), add_products();
      load_b(b), add_products();
      load_a(a + 2 * part), add_products();
      load_a(a), add_products();
    } else {
      load_a(a), load_b(b + part), add_products();
      load_b(b), add_products();
      load_a(a + part), add_products();
    }
  }
}

// Where sums go: y[row of A][row of B], or y[row of B][row of A]; the bias belongs to the last index.
struct Output {
  float* y;
  int64_t a_rows, b_rows, stride;
  const float* bias;
  bool is_transposed;

  void start(int64_t column) const {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (is_transposed || !bias) return;
    alignas(64) float row[BLOCK] = {};
    std::copy_n(bias + column, std::min(BLOCK, b_rows - column), row);
    finish_writes();
    _tile_loadd(0, row, 0);
    _tile_loadd(1, row + TILE, 0);
    _tile_loadd(2, row, 0);
    _tile_loadd(3, row + TILE, 0);
  }

  void store_block(int64_t row, int64_t column) const {
    if (!is_transposed && row + BLOCK <= a_rows && column + BLOCK <= b_rows) {
      float* to = y + row * stride + column;
      _tile_stored(0, to, stride * 4);
      _tile_stored(1, to + TILE, stride * 4);
      _tile_stored(2, to + TILE * stride, stride * 4);
      _tile_stored(3, to + TILE * stride + TILE, stride * 4);
      return;
    }
    alignas(64) Floats sums[4][TILE];
    store_sum_tiles(sums);
    for (int n = 0; n < 4; ++n) store_tile(sums[n], row + n / 2 * TILE, column + n % 2 * TILE);
  }

 private:
  void store_tile(Floats* sums, int64_t row, int64_t column) const {
    int64_t height = std::min(TILE, a_rows - row), width = std::min(TILE, b_rows - column);
    if (height <= 0 || width <= 0) return;
    float* to = y + (is_transposed ? column * stride + row : row * stride + column);
    if (is_transposed) {
      transpose_square(sums);
      const Floats added = bias ? load_masked(bias + row, height) : Floats{};
      std::swap(height, width);
      for (int64_t r = 0; r < height; ++r) sums[r] += added;
    }
    for (int64_t r = 0; r < height; ++r) store_masked(to + r * stride, sums[r], width);
  }
};

// The rows of the next block, spread over so many steps.
template <class A>
Fetch next_rows(const A& a, int64_t row, int64_t steps) {
  const int64_t end = std::min(row + BLOCK, a.rows);
  if (row >= end) return {};
  const int64_t lines = (a.row_address(end) - a.row_address(row)) / 64;
  return {a.row_address(row), lines, lines / steps + 1};
}

// One block of A with the only block of B.
template <int PARTS, class A>
inline void multiply_steps(const A& a, int64_t row, const CacheLine* b, int64_t steps, CacheLine* packed,
                           const Output& out) {
  Fetch fetch = next_rows(a, row + BLOCK, steps);
  out.start(0);
  constexpr int64_t size = PARTS * 2 * TILE;
  pack_block<PARTS, false>(a, row, 0, 1, packed);
  for (int64_t step = 0; step < steps; ++step) {  // tiles cannot read at once what was just written
    if (step + 1 < steps) pack_block<PARTS, false>(a, row, step + 1, 1, packed + (step + 1) % 2 * size);
    finish_writes();
    multiply_block<PARTS>(packed + step % 2 * size, b + step * size, 1, fetch);
  }
  out.store_block(row, 0);
}

// A B' for A by blocks, each packed by the thread that multiplies it, and B packed before.
template <int PARTS, class A, class B>
void multiply(const A& a, const B& b, const Output& out) {
  const int64_t steps = count_steps(std::min(a.inputs, b.inputs)), block = steps * PARTS * 2 * TILE, a_blocks = count_blocks(a.rows),
                b_blocks = count_blocks(b.rows);
  Vectors<CacheLine> b_memory;
  CacheLine* b_packed = b_memory.resize(b_blocks * block);
  at::parallel_for(0, b_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) pack_block<PARTS, true>(b, n * BLOCK, 0, steps, b_packed + n * block);
  });
  const int64_t together = b_blocks * block * 64 > LARGE_OPERAND ? GROUP_BLOCKS : 1;
  at::parallel_for(0, (a_blocks + together - 1) / together, 1, [&](int64_t begin, int64_t end) {
    thread_local Vectors<CacheLine> a_memory;
    CacheLine* a_packed = a_memory.resize(std::max(together * block, PARTS * 4 * TILE));
    const TileScope scope;
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * together, count = std::min(together, a_blocks - first);
      if (b_blocks == 1) {  // each step is multiplied while it is in the cache of the core
        multiply_steps<PARTS>(a, first * BLOCK, b_packed, steps, a_packed, out);
        continue;
      }
      for (int64_t n = 0; n < count; ++n) pack_block<PARTS, false>(a, (first + n) * BLOCK, 0, steps, a_packed + n * block);
      finish_writes();
      Fetch fetch = next_rows(a, (first + count) * BLOCK, count * b_blocks * steps);
      for (int64_t m = 0; m < b_blocks; ++m)
        for (int64_t n = 0; n < count; ++n) {
          out.start(m * BLOCK);
          multiply_block<PARTS>(a_packed + n * block, b_packed + m * block, steps, fetch);
          out.store_block((first + n) * BLOCK, m * BLOCK);
        }
    }
  });
}

}  // namespace split
}  // namespace

#endif
