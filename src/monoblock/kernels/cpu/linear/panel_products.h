// A weight times several panels, a block of its rows at a time, which stays in the cache for all panels.
//
// fp32 weights are multiplied by `tiles` of panel.h.  Quantized weights are multiplied in matrix tiles, where the
// processor has them: they and the panels become sums of two bfloat16 (split_products.h), and the sums of three products
// come out as a panel.  A block of the weight is unpacked while the block before it is multiplied.  fp32 weights could
// be multiplied likewise, in six products, but whether that is faster than `tiles` depends on what else the processor
// does.
#pragma once

#include <vector>

#include "linear/integer_panels.h"
#include "linear/panel.h"
#include "linear/split_products.h"
#include "stack/stack_weights.h"

namespace {
namespace panels {

#if MONOBLOCK_TILES

constexpr int PARTS = 2;                           // bfloat16 that add up to a number
constexpr int64_t STEP_LINES = PARTS * 2 * TILE;   // cache lines of 32 rows and 32 inputs

// Blocks of 32 rows of a weight as A, packed in turn into two buffers: one is multiplied while the other is filled.
template <class Rows>
class WeightBlocks {
 public:
  WeightBlocks(const Rows& rows, const float* bias, int64_t steps, CacheLine* memory)
      : rows(rows), bias(bias), steps(steps), memory(memory) {}

  // Fill the first buffer.
  void start() {
    for (int64_t step = 0; step < steps; ++step) pack_rows(0, step, 0, split::BLOCK);
  }

  // The product of the block at `row` with one packed panel -> y (rows, vectors * LANES).  Meanwhile part `share` of
  // `shares` of the next block is packed.
  void multiply(int64_t row, const CacheLine* b, int vectors, int64_t share, int64_t shares, Fetch& fetch, float* y) {
    const CacheLine* a = buffer(row);
    const int64_t next = row + split::BLOCK, first = split::BLOCK * share / shares,
                  last = next < rows.rows ? split::BLOCK * (share + 1) / shares : first;
    load_bias(row);
    for (int64_t step = 0; step < steps; ++step) {
      if (vectors == MAX_VECTORS)
        split::multiply_block<PARTS>(a + step * STEP_LINES, b + step * STEP_LINES, 1, fetch);
      else
        fetch.fetch(), multiply_half(a + step * STEP_LINES, b + step * STEP_LINES);
      pack_rows(next, step, first, last);
    }
    store_sums(std::min(split::BLOCK, rows.rows - row), vectors, y);
    finish_writes();
  }

 private:
  const Rows rows;
  const float* bias;
  const int64_t steps;
  CacheLine* memory;

  CacheLine* buffer(int64_t row) const {
    return memory + row / split::BLOCK % 2 * steps * STEP_LINES;
  }

  void pack_rows(int64_t row, int64_t step, int64_t first, int64_t last) {
    CacheLine* lines = buffer(row) + step * STEP_LINES;
    for (int64_t r = first; r < last; ++r) {
      Floats low, high;
      __m512i parts[PARTS];
      rows.load_step(row + r, step, low, high);
      split::split_pair<PARTS>(low, high, parts);
      UNROLL for (int p = 0; p < PARTS; ++p) std::memcpy(lines + p * 2 * TILE + r, &parts[p], sizeof(CacheLine));
    }
  }

  // A panel of one vector has only the first of two tiles.
  static void multiply_half(const CacheLine* a, const CacheLine* b) {
    constexpr int64_t part = STEP_LINES / PARTS;
    for (int sum = PARTS - 1; sum >= 0; --sum)  // small parts first
      for (int p = 0; p <= sum; ++p) {
        _tile_loadd(4, a + p * part, 64);
        _tile_loadd(5, a + p * part + TILE, 64);
        _tile_loadd(6, b + (sum - p) * part, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
      }
  }

  // Every row of a sum begins with the bias of its output.
  void load_bias(int64_t row) const {
    if (!bias) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      return;
    }
    alignas(64) Floats values[split::BLOCK];
    for (int64_t r = 0; r < split::BLOCK; ++r) values[r] = all(row + r < rows.rows ? bias[row + r] : 0.0f);
    finish_writes();
    _tile_loadd(0, values, 64);
    _tile_loadd(1, values, 64);
    _tile_loadd(2, values + TILE, 64);
    _tile_loadd(3, values + TILE, 64);
  }

  static void store_sums(int64_t live, int vectors, float* y) {
    const int64_t width = int64_t(vectors) * LANES;
    if (live == split::BLOCK) {
      _tile_stored(0, y, width * 4);
      _tile_stored(2, y + TILE * width, width * 4);
      if (vectors == 1) return;
      _tile_stored(1, y + TILE, width * 4);
      _tile_stored(3, y + TILE * width + TILE, width * 4);
      return;
    }
    alignas(64) Floats sums[4][TILE];
    store_sum_tiles(sums);
    finish_writes();
    for (int64_t r = 0; r < live; ++r)
      for (int v = 0; v < vectors; ++v) store(y + r * width + v * LANES, sums[r / TILE * 2 + v][r % TILE]);
  }
};

#endif

class PanelProducts {
 public:
  // Choose what the next products read: the first of some panels (size, rows).
  void set_inputs(const float* first, int64_t size, Panels rows) { x = first, inputs = size, panels = rows, packed = {}; }

  // For a block of rows from n on, and each panel: y = where(panel, n), then y (count, rows) is filled, then done(panel,
  // n, count, y).  TOGETHER panels that follow each other are filled at once, so their y must not overlap.
  template <class Where, class Done>
  void multiply(const WeightMatrix& m, Where where, Done done) {
#if MONOBLOCK_TILES
    if (m.is_quantized()) return with_format(m, [&](const auto& format) { multiply_in_tiles(format, m, where, done); });
#endif
    const float* weight = static_cast<const float*>(m.weight);
    for (int64_t n = 0; n < m.rows; n += BLOCK_ROWS) {
      const int64_t count = std::min(BLOCK_ROWS, m.rows - n), next = std::min(BLOCK_ROWS, m.rows - n - count);
      const int64_t lines = (next * m.columns + LINE_FLOATS - 1) / LINE_FLOATS;
      const int64_t times = std::max<int64_t>(1, count / TILE_ROWS * (m.columns / LINE_FLOATS) * panels.count());
      Fetch fetch{reinterpret_cast<const char*>(weight + (n + count) * m.columns), lines, (lines + times - 1) / times};
      const float *rows = weight + n * m.columns, *bias = m.bias ? m.bias + n : nullptr;
      for (int64_t i = 0, together; i < panels.count(); i += together) {
        together = (i + TOGETHER) * PANEL <= panels.vectors() * LANES ? TOGETHER : 1;
        ForPanels<const float> from = {};
        ForPanels<float> y = {};
        for (int64_t p = 0; p < together; ++p) from[p] = panel(i + p), y[p] = where(i + p, n);
        if (together == TOGETHER)
          tiles<MAX_VECTORS, TOGETHER>(rows, count, m.columns, from, bias, y, fetch);
        else if (panels.vectors_of(i) == MAX_VECTORS)
          tiles<MAX_VECTORS, 1>(rows, count, m.columns, from, bias, y, fetch);
        else
          tiles<1, 1>(rows, count, m.columns, from, bias, y, fetch);
        for (int64_t p = 0; p < together; ++p) done(i + p, n, count, y[p]);
      }
    }
  }

 private:
  const float* x = nullptr;
  int64_t inputs = 0;
  Panels panels;
  WeightMatrix::Packing packed;  // of the panels for the last product: those of the same x mostly need the same

  const float* panel(int64_t number) const { return x + number * PANEL * inputs; }

#if MONOBLOCK_TILES
  std::vector<float> rounded;

  // A panel rounded to the integers of a group times their step.
  const float* round_panel(int64_t number, const WeightMatrix& m) {
    const int64_t width = panels.step(number), group = m.columns / m.groups;
    rounded.resize(inputs * width);
    for (int64_t i = 0; i < inputs; i += group)
      for (int64_t lane = 0; lane < width; lane += LANES)
        integer_panels::round_group(panel(number) + i * width + lane, width, std::min(group, inputs - i), m.limit,
                                    rounded.data() + i * width + lane);
    return rounded.data();
  }

  template <class Format, class Where, class Done>
  void multiply_in_tiles(const Format& format, const WeightMatrix& m, Where where, Done done) {
    const split::QuantizedRows<Format> rows{format, m.rows, m.columns, m.columns / m.groups};
    thread_local Vectors<CacheLine> a_memory, b_memory;  // kept between products
    const int64_t steps = split::count_steps(m.columns), block = steps * STEP_LINES;
    CacheLine* b = b_memory.resize(panels.count() * block);
    if (packed != m.packing()) {
      for (int64_t i = 0; i < panels.count(); ++i) {
        const int64_t width = panels.step(i);
        const float* from = m.limit == LIMIT_8_BITS ? round_panel(i, m) : panel(i);
        split::pack_block<PARTS, true>(split::DenseColumns{from, width, inputs, width}, 0, 0, steps, b + i * block);
      }
      packed = m.packing();
    }
    const TileScope scope;
    WeightBlocks blocks(rows, m.bias, steps, a_memory.resize(2 * block));
    blocks.start();
    finish_writes();
    for (int64_t n = 0; n < m.rows; n += split::BLOCK) {
      Fetch fetch = split::next_rows(rows, n + 2 * split::BLOCK, panels.count() * steps);
      for (int64_t i = 0; i < panels.count(); ++i) {
        float* y = where(i, n);
        blocks.multiply(n, b + i * block, panels.vectors_of(i), i, panels.count(), fetch, y);
        done(i, n, std::min(split::BLOCK, m.rows - n), y);
      }
    }
  }
#endif
};

}  // namespace panels
}  // namespace
