// A weight times several panels, a block of its rows at a time, which stays in the cache for all panels.
//
// fp32 weights are multiplied by `tiles` of panel.h.  Quantized weights are multiplied in matrix tiles where the
// processor has them: they and the panels become sums of two bfloat16 (split_numbers.h), and the sums of three products
// come out as a panel.  A block of the weight is unpacked while the block before it is multiplied.  fp32 weights could
// be multiplied likewise, in six products, but whether that is faster than `tiles` depends on what else the processor
// does.  Without matrix tiles quantized weights are multiplied in integers (integer_panels.h).
#pragma once

#include <vector>

#include "linear/integer_panels.h"
#include "linear/panel.h"
#include "linear/split_products.h"
#include "stack/stack_weights.h"

namespace {
namespace panels {

struct PanelRows {
  const float* x;  // (inputs, vectors * LANES)
  int vectors;
};

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
  // Choose the panels (inputs, rows) that the next products read.
  void set_inputs(std::vector<PanelRows> rows, int64_t size) {
    panels = std::move(rows), inputs = size, packed = {};
  }

  // For a block of rows from n on, and each panel: y = where(panel, n), then y (count, rows) is filled, then done(panel,
  // n, count, y).  TOGETHER panels that follow each other are filled at once, so their y must not overlap.
  template <class Where, class Done>
  void multiply(const WeightMatrix& m, Where where, Done done) {
    if (m.is_quantized())
      return with_format(m, [&](const auto& format) { multiply_quantized(format, m, where, done); });
    const float* weight = static_cast<const float*>(m.weight);
    for (int64_t n = 0; n < m.rows; n += BLOCK_ROWS) {
      const int64_t count = std::min(BLOCK_ROWS, m.rows - n), left = m.rows - n - count;
      Prefetch prefetch(weight + (n + count) * m.columns, std::min(BLOCK_ROWS, left) * m.columns, count, m.columns,
                        panels.size());
      const float *rows = weight + n * m.columns, *bias = m.bias ? m.bias + n : nullptr;
      for (size_t i = 0, together; i < panels.size(); i += together) {
        together = are_full(i, TOGETHER) ? TOGETHER : 1;
        ForPanels<const float> x = {};
        ForPanels<float> y = {};
        for (size_t p = 0; p < together; ++p) x[p] = panels[i + p].x, y[p] = where(i + p, n);
        if (together == TOGETHER)
          tiles<MAX_VECTORS, TOGETHER>(rows, count, m.columns, x, bias, y, prefetch);
        else if (panels[i].vectors == MAX_VECTORS)
          tiles<MAX_VECTORS, 1>(rows, count, m.columns, x, bias, y, prefetch);
        else
          tiles<1, 1>(rows, count, m.columns, x, bias, y, prefetch);
        for (size_t p = 0; p < together; ++p) done(i + p, n, count, y[p]);
      }
    }
  }

 private:
  std::vector<PanelRows> panels;
  int64_t inputs = 0;

  WeightMatrix::Packing packed;  // of the panels for the last product: those of the same x mostly need the same

  // Whether there are `count` panels from the first on, all with MAX_VECTORS vectors.
  bool are_full(size_t first, size_t count) const {
    if (first + count > panels.size()) return false;
    return std::all_of(panels.begin() + first, panels.begin() + first + count,
                       [](const PanelRows& p) { return p.vectors == MAX_VECTORS; });
  }

  template <class Format, class Where, class Done>
  void multiply_quantized(const Format& format, const WeightMatrix& m, Where where, Done done) {
#if MONOBLOCK_TILES
    if (can_use_tiles()) return in_tiles(format, m, where, done);
#endif
    using namespace integer_panels;
    if (HAS_BYTE_PRODUCTS && m.limit == LIMIT_8_BITS) return in_integers<ByteElements>(format, m, where, done);
    in_integers<ShortElements>(format, m, where, done);
  }

  template <class Elements, class Format, class Where, class Done>
  void in_integers(const Format& format, const WeightMatrix& m, Where where, Done done) {
    using namespace integer_panels;
    thread_local integer_panels::QuantizedRows<Elements> x;  // its memory is kept between products
    std::vector<PanelVectors> vectors;
    for (const PanelRows& p : panels)
      vectors.push_back({vectors.empty() ? 0 : vectors.back().first + vectors.back().count, p.vectors});
    if (packed != m.packing()) quantize_panels(x, vectors, m);
    const auto write = [&](int64_t i, int64_t n, const BlockProducts<Format, Elements>& block) {
      const int64_t width = int64_t(panels[i].vectors) * LANES;
      const float* from = block.result(i % PASS_PANELS);
      float* y = where(size_t(i), n);
      for (int64_t r = 0; r < block.size(); ++r) std::copy_n(from + r * MAX_VECTORS * LANES, width, y + r * width);
      done(size_t(i), n, block.size(), y);
    };
    multiply_rows(format, x, vectors, 0, m.rows, m.bias, write);
  }

  template <class Elements>
  void quantize_panels(integer_panels::QuantizedRows<Elements>& x,
                       const std::vector<integer_panels::PanelVectors>& vectors, const WeightMatrix& m) {
    const int64_t group = m.columns / m.groups;
    x.resize(vectors.back().first + vectors.back().count, m.columns, m.groups, m.limit);
    for (size_t i = 0; i < panels.size(); ++i)
      for (int v = 0; v < panels[i].vectors; ++v)
        for (int64_t g = 0; g < m.groups; ++g) {
          const int64_t step = int64_t(panels[i].vectors) * LANES;
          x.quantize_group(vectors[i], v, g, panels[i].x + g * group * step + v * LANES, step, inputs - g * group);
        }
    packed = m.packing();
  }

#if MONOBLOCK_TILES
  std::vector<float> rounded;

  // A panel rounded to the integers of a group times their step.
  const float* round_panel(const PanelRows& panel, const WeightMatrix& m) {
    const int64_t width = int64_t(panel.vectors) * LANES, group = m.columns / m.groups;
    rounded.resize(inputs * width);
    for (int64_t i = 0; i < inputs; i += group)
      for (int64_t lane = 0; lane < width; lane += LANES)
        integer_panels::round_group(panel.x + i * width + lane, width, std::min(group, inputs - i), m.limit,
                                    rounded.data() + i * width + lane);
    return rounded.data();
  }

  template <class Format, class Where, class Done>
  void in_tiles(const Format& format, const WeightMatrix& m, Where where, Done done) {
    const split::QuantizedRows<Format> rows{format, m.rows, m.columns, m.columns / m.groups};
    thread_local TileMemory a_memory, b_memory;  // kept between products
    const int64_t steps = split::count_steps(m.columns), block = steps * STEP_LINES;
    CacheLine* b = b_memory.lines(int64_t(panels.size()) * block);
    if (packed != m.packing()) {
      for (size_t i = 0; i < panels.size(); ++i) {
        const int64_t width = int64_t(panels[i].vectors) * LANES;
        const float* x = m.limit == LIMIT_8_BITS ? round_panel(panels[i], m) : panels[i].x;
        split::pack_block<PARTS, true>(split::DenseColumns{x, width, inputs, width}, 0, 0, steps, b + i * block);
      }
      packed = m.packing();
    }
    const TileScope scope;
    WeightBlocks blocks(rows, m.bias, steps, a_memory.lines(2 * block));
    blocks.start();
    finish_writes();
    for (int64_t n = 0; n < m.rows; n += split::BLOCK) {
      Fetch fetch = split::next_rows(rows, n + 2 * split::BLOCK, int64_t(panels.size()) * steps);
      for (size_t i = 0; i < panels.size(); ++i) {
        float* y = where(i, n);
        blocks.multiply(n, b + i * block, panels[i].vectors, i, panels.size(), fetch, y);
        done(i, n, std::min(split::BLOCK, m.rows - n), y);
      }
    }
  }
#endif
};

}  // namespace panels
}  // namespace
