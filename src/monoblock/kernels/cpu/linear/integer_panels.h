// Products of quantized weights with many rows x in 16-bit integers, for processors without matrix tiles.
//
// As in integer_dot.h, x is quantized to 16 bits with one step a group, and the sums of a group are exact.  As in
// panel.h, every row of x has a lane: a vector holds two inputs of LANES rows, and is multiplied by the same two inputs
// of one row of the weight.  Weights are widened to 16 bits a group of a few rows at a time, for several panels.
#pragma once

#include <ATen/Parallel.h>

#include <memory>

#include "linear/matvec.h"
#include "linear/panel.h"
#include "linear/tiles.h"

namespace {

// Whether many rows are multiplied with quantized weights in groups of this size without dequantizing them.
inline bool can_multiply_many_rows(int64_t group) {
  return can_use_tiles() || (HAS_INTEGER_DOT && group <= MAX_PRODUCTS);
}

namespace integer_panels {

using panels::MAX_VECTORS;
using panels::TILE_ROWS;

constexpr int64_t BLOCK_TILES = 4, BLOCK_ROWS = BLOCK_TILES * TILE_ROWS;  // rows of a weight that share their results
constexpr int64_t PAIRS = CHUNK / 2;                                      // pairs of inputs in a chunk
constexpr int64_t PASS_PANELS = 4;                                        // panels for which weights are widened once

// A panel of x: its first vector, and how many it has, at most MAX_VECTORS.
struct PanelVectors {
  int64_t first;
  int count;
};

// Memory for vectors that is kept until more is needed, and not set to anything.
template <class Vector>
class Vectors {
 public:
  Vector* at(int64_t index) const { return reinterpret_cast<Vector*>(memory.get()) + index; }
  void resize(int64_t count) {
    const int64_t lines = (count * int64_t(sizeof(Vector)) + 63) / 64;
    if (lines > size) memory.reset(new CacheLine[lines]), size = lines;
  }

 private:
  std::unique_ptr<CacheLine[]> memory;
  int64_t size = 0;
};

// Rows of x, LANES in each vector: what products read.
struct QuantizedRows {
  int64_t columns = 0, groups = 0, group = 0;
  Vectors<Shorts> pairs;        // of each panel (columns / 2, vectors): two inputs of each row
  Vectors<Floats> steps, sums;  // of each panel (groups, vectors): sums of the rounded x, for formats with an offset

  void resize(int64_t vectors, int64_t columns_, int64_t groups_) {
    columns = columns_, groups = groups_, group = columns / groups;
    pairs.resize(vectors * columns / 2), steps.resize(vectors * groups), sums.resize(vectors * groups);
  }

  // Quantize group g of vector v of a panel from x (inputs, stride), LANES rows; what is behind `live` inputs is zero.
  void quantize_group(const PanelVectors& panel, int v, int64_t g, const float* x, int64_t stride, int64_t live) {
    const float limit = 32767, shift = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
    Floats largest = {}, nonfinite = {};
    for (int64_t i = 0; i < std::min(live, group); ++i) {
      const Floats v = load<Floats>(x + i * stride), size = v < 0.0f ? -v : v;
      largest = size > largest ? size : largest, nonfinite += v - v;
    }
    const int64_t at = panel.first * groups + g * panel.count + v;
    const Floats scale = largest > 1e-30f ? limit / largest : Floats{};
    const auto quantize = [&](int64_t i) {
      if (i >= live) return Ints{};
      return __builtin_convertvector((load<Floats>(x + i * stride) * scale + shift) - shift, Ints);
    };
    Shorts* to = pairs.at((panel.first * columns + g * group * panel.count) / 2 + v);
    Ints total = {};
    for (int64_t i = 0; i < group; i += 2, to += panel.count) {
      const Ints even = quantize(i), odd = quantize(i + 1);
      *to = Shorts((even & 0xffff) | (odd << 16)), total += even + odd;
    }
    *steps.at(at) = largest / limit + nonfinite, *sums.at(at) = to_floats(total) * *steps.at(at);
  }

  // Rows of x (batch, inputs), in panels that are full but the last.
  void quantize_rows(const std::vector<PanelVectors>& panels, const float* x, int64_t batch, int64_t inputs) {
    const int64_t vectors = (batch + LANES - 1) / LANES;
    at::parallel_for(0, vectors * groups, 8, [&](int64_t begin, int64_t end) {
      std::vector<float> turned(group * LANES, 0.0f);
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = n / groups * LANES, column = n % groups * group, live = std::min(group, inputs - column);
        const int64_t rows = std::min<int64_t>(LANES, batch - row);
        if (rows < LANES) std::fill(turned.begin(), turned.end(), 0.0f);
        panels::transpose(x + row * inputs + column, rows, live, inputs, turned.data(), LANES);
        const int64_t vector = n / groups;
        quantize_group(panels[vector / MAX_VECTORS], int(vector % MAX_VECTORS), n % groups, turned.data(), LANES, live);
      }
    });
  }
};

// One group of a tile of weights with V vectors of rows.
template <int V>
inline void sum_group(const int16_t* weight, const Shorts* x, int64_t chunks, Fetch& fetch,
                      Ints (&sums)[TILE_ROWS][V]) {
  for (int64_t c = 0; c < chunks; ++c, weight += TILE_ROWS * CHUNK, x += PAIRS * V) {
    fetch.fetch();
    UNROLL for (int64_t p = 0; p < PAIRS; ++p) {
      Shorts rows[V];
      UNROLL for (int v = 0; v < V; ++v) rows[v] = x[p * V + v];
      UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
        int32_t pair;
        std::memcpy(&pair, weight + r * CHUNK + 2 * p, sizeof pair);
        const Shorts w = Shorts(Ints{} + pair);
        UNROLL for (int v = 0; v < V; ++v) sums[r][v] = add_pair_products(sums[r][v], w, rows[v]);
      }
    }
  }
}

// A block of rows of a weight with a few panels.
template <class Format>
class BlockProducts {
 public:
  BlockProducts(const Format& format, const QuantizedRows& x, const float* bias) : format(format), x(x), bias(bias) {}

  // Choose the rows from `row` on.
  void set_block(int64_t row, int64_t rows_left) {
    first = row, count = std::min(BLOCK_ROWS, rows_left);
    read_values([&](int64_t r) { return format.scale(r); }, scales);
    if (Format::offset) read_values([&](int64_t r) { return format.least(r); }, leasts);
  }

  // Multiply them with PASS_PANELS or fewer panels.
  __attribute__((noinline)) void multiply(const PanelVectors* panels, int64_t number, Fetch& fetch) {
    alignas(64) int16_t tile[TILE_ROWS * MAX_PRODUCTS];
    for (int64_t r = 0; r < count; r += TILE_ROWS)
      for (int64_t g = 0; g < x.groups; ++g) {
        widen(r, g, tile);
        for (int64_t i = 0; i < number; ++i) {
          Floats* to = totals + (i * BLOCK_ROWS + r) * MAX_VECTORS;
          panels[i].count == MAX_VECTORS ? add_group<MAX_VECTORS>(tile, r, g, panels[i].first, fetch, to)
                                         : add_group<1>(tile, r, g, panels[i].first, fetch, to);
        }
      }
  }

  // The result of one of these panels -> y (count, vectors * LANES).
  void write(int64_t number, int vectors, float* y) const {
    for (int64_t r = 0; r < count; ++r) {
      const Floats* from = totals + (number * BLOCK_ROWS + r / TILE_ROWS * TILE_ROWS) * MAX_VECTORS;
      for (int v = 0; v < vectors; ++v)
        store(y + (r * vectors + v) * LANES, from[r % TILE_ROWS * vectors + v] + (bias ? bias[first + r] : 0.0f));
    }
  }

  int64_t size() const { return count; }

 private:
  const Format format;
  const QuantizedRows& x;
  const float* bias;
  int64_t first = 0, count = 0;
  std::vector<float> scales, leasts, by_row;  // (groups, BLOCK_ROWS)
  Floats totals[PASS_PANELS * BLOCK_ROWS * MAX_VECTORS];

  template <class Values>
  void read_values(Values values, std::vector<float>& to) {
    by_row.assign(BLOCK_ROWS * x.groups, 0.0f), to.resize(BLOCK_ROWS * x.groups);
    for (int64_t r = 0; r < count; ++r) bf16_to_fp32(values(first + r), x.groups, by_row.data() + r * x.groups);
    panels::transpose(by_row.data(), BLOCK_ROWS, x.groups, x.groups, to.data(), BLOCK_ROWS);
  }

  // One group of TILE_ROWS rows -> (group / CHUNK, TILE_ROWS, CHUNK), zero behind the last row.
  void widen(int64_t r, int64_t g, int16_t* to) const {
    const int64_t live = std::min<int64_t>(TILE_ROWS, count - r);
    for (int64_t c = g * x.group; c < (g + 1) * x.group; c += CHUNK, to += TILE_ROWS * CHUNK) {
      for (int64_t n = 0; n < live; ++n) format.unpack(first + r + n, c, reinterpret_cast<Shorts*>(to + n * CHUNK));
      if (live < TILE_ROWS) std::fill(to + live * CHUNK, to + TILE_ROWS * CHUNK, int16_t(0));
    }
  }

  template <int V>
  __attribute__((noinline)) void add_group(const int16_t* tile, int64_t r, int64_t g, int64_t vector, Fetch& fetch,
                                           Floats* to) const {
    Ints sums[TILE_ROWS][V] = {};
    sum_group<V>(tile, x.pairs.at((vector * x.columns + g * x.group * V) / 2), x.group / CHUNK, fetch, sums);
    const Floats *step = x.steps.at(vector * x.groups + g * V), *sum = x.sums.at(vector * x.groups + g * V);
    const float *scale = scales.data() + g * BLOCK_ROWS + r, *least = leasts.data() + g * BLOCK_ROWS + r;
    UNROLL for (int n = 0; n < TILE_ROWS; ++n)
      UNROLL for (int v = 0; v < V; ++v) {
        Floats total = g ? to[n * V + v] : Floats{};
        if (Format::offset) total += sum[v] * least[n];
        to[n * V + v] = total + to_floats(sums[n][v]) * (step[v] * scale[n]);  // only this waits for the sums
      }
  }
};

// The cache lines of the block from `row` on, spread over `times` calls.
template <class Format>
inline Fetch next_block(const Format& format, int64_t row, int64_t rows, int64_t times) {
  const int64_t bytes = format.columns / (Format::offset ? 2 : 1);
  const int64_t lines = std::max<int64_t>(0, std::min(BLOCK_ROWS, rows - row)) * bytes / 64;
  return {reinterpret_cast<const char*>(format.weight) + row * bytes, lines, lines / times + 1};
}

// The rows from begin to end of a weight with all panels: for every block and panel, done(panel, row, block) may write
// the result of `block`, which is number panel % PASS_PANELS there.
template <class Format, class Done>
void multiply_rows(const Format& format, const QuantizedRows& x, const std::vector<PanelVectors>& panels,
                   int64_t begin, int64_t end, const float* bias, Done done) {
  BlockProducts<Format> block(format, x, bias);
  const int64_t number = int64_t(panels.size());
  for (int64_t n = begin; n < end; n += BLOCK_ROWS) {
    Fetch fetch = next_block(format, n + BLOCK_ROWS, end, number * format.columns / CHUNK * BLOCK_TILES);
    block.set_block(n, end - n);
    for (int64_t i = 0; i < number; i += PASS_PANELS) {
      const int64_t together = std::min(PASS_PANELS, number - i);
      block.multiply(panels.data() + i, together, fetch);
      for (int64_t j = 0; j < together; ++j) done(i + j, n, block);
    }
  }
}

// y (batch, rows) = x W' + bias for x (batch, inputs).
template <class Format>
void multiply(const Format& format, const float* x, int64_t batch, int64_t inputs, int64_t rows, const float* bias,
              float* y) {
  const int64_t vectors = (batch + LANES - 1) / LANES;
  QuantizedRows quantized;
  std::vector<PanelVectors> panels;
  for (int64_t v = 0; v < vectors; v += MAX_VECTORS)
    panels.push_back({v, int(std::min<int64_t>(MAX_VECTORS, vectors - v))});
  quantized.resize(vectors, format.columns, format.groups);
  quantized.quantize_rows(panels, x, batch, inputs);
  at::parallel_for(0, (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float out[BLOCK_ROWS * MAX_VECTORS * LANES];
    const auto write = [&](int64_t i, int64_t n, const BlockProducts<Format>& block) {
      const int64_t width = panels[i].count * LANES, row = panels[i].first * LANES;
      block.write(i % PASS_PANELS, panels[i].count, out);
      panels::transpose(out, block.size(), std::min(width, batch - row), width, y + row * rows + n, rows);
    };
    multiply_rows(format, quantized, panels, begin * BLOCK_ROWS, std::min(end * BLOCK_ROWS, rows), bias, write);
  });
}

}  // namespace integer_panels
}  // namespace
