// Products of quantized weights with many rows x in integers, for processors without matrix tiles.
//
// As in simd.h, x is quantized with one step a group, and the sums of a group are exact.  As in panel.h, every row of x
// has a lane: a vector holds two inputs of 16 bits or four of 8 bits of LANES rows, and is multiplied by the same inputs
// of one row of the weight.  Weights are unpacked a group of some rows at a time, for several panels.
#pragma once

#include <type_traits>

#include "linear/matvec.h"
#include "linear/panel.h"

namespace {

// Whether many rows are multiplied with quantized weights in groups of this size in panels: tiles are faster.
inline bool can_multiply_in_panels(int64_t group) {
  return !can_use_tiles() && HAS_INTEGER_DOT && group <= MAX_PRODUCTS;
}

// Whether they are multiplied without dequantizing the weights.
inline bool can_multiply_many_rows(int64_t group) { return can_use_tiles() || can_multiply_in_panels(group); }

constexpr int64_t MANY_ROWS = 17;  // rows of x for which quantized weights are multiplied in tiles or panels

namespace integer_panels {

using panels::MAX_VECTORS, panels::PANEL, panels::Panels, panels::TILE_ROWS;

// -- what one instruction multiplies: a few inputs of LANES rows of x with the same inputs of one row of a weight -----

constexpr bool HAS_BYTE_PRODUCTS = MONOBLOCK_VNNI || MONOBLOCK_NEON_DOT;

// INPUTS_ weights in each 32-bit lane; an integer of x has PARTS_ of them, n = 256 high + low.
template <class W, int INPUTS_, int PARTS_ = 1>
struct Integers {
  using Weight = W;
  static constexpr int INPUTS = INPUTS_, PARTS = PARTS_;
  static constexpr bool IS_UNSIGNED = std::is_unsigned_v<W>;  // weights q + Format::byte_zero, else q as they are

  template <class Format>
  static void unpack(const Format& format, int64_t row, int64_t column, Weight* to) {
    if constexpr (sizeof(W) == 2) format.unpack(row, column, reinterpret_cast<Shorts*>(to));
    else format.unpack(row, column, to);
  }
};

#if MONOBLOCK_NEON_DOT
struct ByteElements : Integers<int8_t, 4> {};
struct ShortElements : Integers<int8_t, 4, 2> {};
#else
struct ByteElements : Integers<uint8_t, 4> {
  static Ints add_products(Ints sum, Ints weight, Ints x) {
#if MONOBLOCK_VNNI
    return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(weight), __m512i(x)));
#else
    return sum;  // never called, see HAS_BYTE_PRODUCTS
#endif
  }
};
struct ShortElements : Integers<int16_t, 2> {
  static Ints add_products(Ints sum, Ints weight, Ints x) { return add_pair_products(sum, Shorts(weight), Shorts(x)); }
};
#endif

// A vector from memory, whatever register it may be in as well: copies of registers would take the ports of products.
inline Ints load_again(const Ints& from) {
#if defined(__AVX512F__)
  Ints to;
  asm("vmovdqa32 %1, %0" : "=v"(to) : "m"(from));
  return to;
#else
  return from;
#endif
}

// The integers of Elements::INPUTS inputs side by side in each lane.
template <class Elements>
inline Ints join(const Ints (&n)[Elements::INPUTS]) {
  constexpr int bits = 32 / Elements::INPUTS;
  Ints joined = {};
  UNROLL for (int i = 0; i < Elements::INPUTS; ++i) joined |= (n[i] & ((1 << bits) - 1)) << (i * bits);
  return joined;
}

// How one group of LANES rows of x is rounded, as quantize_row does it: x (inputs, stride) of which `live` are there.
struct GroupRounding {
  Floats scale, step;

  GroupRounding(const float* x, int64_t stride, int64_t live, int limit) {
    Floats largest = {}, nonfinite = {};
    for (int64_t i = 0; i < live; ++i) {
      const Floats v = load<Floats>(x + i * stride), size = v < 0.0f ? -v : v;
      largest = size > largest ? size : largest, nonfinite += v - v;
    }
    scale = largest > 1e-30f ? float(limit) / largest : Floats{};
    step = largest / float(limit) + nonfinite;
  }

  Floats round(const float* x) const { return (load<Floats>(x) * scale + SHIFT) - SHIFT; }
};

// One group of LANES rows of x (live, stride), rounded to the integers times their step.
inline void round_group(const float* x, int64_t stride, int64_t live, int limit, float* to) {
  const GroupRounding rounding(x, stride, live, limit);
  for (int64_t i = 0; i < live; ++i) store(to + i * stride, rounding.round(x + i * stride) * rounding.step);
}

// -- the sums of one group of a tile of weights (group / CHUNK, TILE_ROWS, CHUNK) with V vectors of x -----------------

#if MONOBLOCK_NEON_DOT

// Four inputs of V vectors, one row in each 32-bit lane, with number `LANE` of the four inputs in each weight.
template <int LANE, int V>
inline void add_inputs(const int8_t* weight, const Ints* x, Ints (&sums)[TILE_ROWS][V]) {
  int8x16_t rows[V];
  UNROLL for (int v = 0; v < V; ++v) rows[v] = vreinterpretq_s8_s32(x[v]);
  UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
    const int8x16_t w = vld1q_s8(weight + r * CHUNK);
    UNROLL for (int v = 0; v < V; ++v) sums[r][v] = vdotq_laneq_s32(sums[r][v], rows[v], w, LANE);
  }
}

template <class Elements, int V>
inline void sum_group(const int8_t* weight, const Ints* x, int64_t chunks, Fetch& fetch, Ints (&sums)[TILE_ROWS][V]) {
  for (int64_t c = 0; c < chunks; ++c, weight += TILE_ROWS * CHUNK) {
    fetch.fetch();
    UNROLL for (int half = 0; half < 2; ++half, x += 4 * V) {
      const int8_t* w = weight + half * CHUNK / 2;
      add_inputs<0, V>(w, x, sums), add_inputs<1, V>(w, x + V, sums);
      add_inputs<2, V>(w, x + 2 * V, sums), add_inputs<3, V>(w, x + 3 * V, sums);
    }
  }
}

#else

template <class Elements, int V>
inline void sum_group(const typename Elements::Weight* weight, const Ints* x, int64_t chunks, Fetch& fetch,
                      Ints (&sums)[TILE_ROWS][V]) {
  constexpr int64_t steps = CHUNK / Elements::INPUTS;
  for (int64_t c = 0; c < chunks; ++c, weight += TILE_ROWS * CHUNK, x += steps * V) {
    fetch.fetch();
    UNROLL for (int64_t p = 0; p < steps; ++p) {
      Ints rows[V];
      UNROLL for (int v = 0; v < V; ++v) rows[v] = x[p * V + v];
      UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
        int32_t inputs;
        std::memcpy(&inputs, weight + r * CHUNK + p * Elements::INPUTS, sizeof inputs);
        const Ints w = Ints{} + inputs;
        UNROLL for (int v = 0; v < V; ++v) sums[r][v] = Elements::add_products(sums[r][v], w, rows[v]);
      }
    }
  }
}

#endif

// -- products ---------------------------------------------------------------------------------------------------------

constexpr int64_t BLOCK_TILES = 4, BLOCK_ROWS = BLOCK_TILES * TILE_ROWS;  // rows of a weight that share their results
constexpr int64_t PASS_PANELS = 4;                                        // panels for which weights are unpacked once

// Rows of x, LANES in each vector: what products read.
template <class Elements>
struct QuantizedRows {
  static constexpr int INPUTS = Elements::INPUTS, PARTS = Elements::PARTS;
  int64_t columns = 0, groups = 0, group = 0;
  int limit = 0;          // of the integers
  Panels panels;
  // INPUTS integers of each row: of each panel (columns / INPUTS, vectors), or of each vector (columns / INPUTS, PARTS)
  // if integers have several parts.
  Vectors<Ints> inputs;
  Vectors<Floats> steps;  // of each panel (groups, vectors)
  Vectors<Ints> sums;     // of the integers of a group, likewise

  void resize(Panels rows, int64_t columns_, int64_t groups_, int limit_) {
    panels = rows, columns = columns_, groups = groups_, group = columns / groups, limit = limit_;
    const int64_t vectors = panels.vectors();
    inputs.resize(vectors * columns / INPUTS * PARTS), steps.resize(vectors * groups), sums.resize(vectors * groups);
  }

  // The inputs of a group of so many vectors.
  Ints* group_inputs(int64_t first, int64_t count, int64_t g) const {
    return inputs.at((first * columns + g * group * count) / INPUTS * PARTS);
  }

  // Quantize group g of a vector from x (inputs, stride), LANES rows; what is behind `live` inputs is zero.
  void quantize_group(int64_t vector, int64_t g, const float* x, int64_t stride, int64_t live) {
    const int64_t v = vector % MAX_VECTORS, first = vector - v, count = panels.vectors_of(vector / MAX_VECTORS);
    const GroupRounding rounding(x, stride, std::min(live, group), limit);
    Ints* to = PARTS == 1 ? group_inputs(first, count, g) + v : group_inputs(vector, 1, g);
    const int64_t next = PARTS == 1 ? count : PARTS;
    Ints total = {}, n[INPUTS];
    for (int64_t i = 0; i < group; i += INPUTS, to += next) {
      UNROLL for (int k = 0; k < INPUTS; ++k) {
        n[k] = i + k < live ? __builtin_convertvector(rounding.round(x + (i + k) * stride), Ints) : Ints{};
        total += n[k];
      }
      to[PARTS - 1] = join<Elements>(n);
      if (PARTS == 1) continue;
      UNROLL for (int k = 0; k < INPUTS; ++k) n[k] = (n[k] + 128) >> 8;
      to[0] = join<Elements>(n);
    }
    const int64_t at = first * groups + g * count + v;
    *steps.at(at) = rounding.step, *sums.at(at) = total;
  }
};

// A block of rows of a weight with a few panels.
template <class Format, class Elements>
class BlockProducts {
 public:
  using Weight = typename Elements::Weight;

  BlockProducts(const Format& format, const QuantizedRows<Elements>& x, const float* bias)
      : format(format), x(x), bias(bias) {}

  // Choose the rows from `row` on.
  void set_block(int64_t row, int64_t rows_left) {
    first = row, count = std::min(BLOCK_ROWS, rows_left);
    read_values(format.scale(first), scales);
    if (Format::offset) read_values(format.least(first), leasts);
  }

  // Multiply them with PASS_PANELS or fewer panels, from panel `from` on.
  __attribute__((noinline)) void multiply(int64_t from, int64_t number, Fetch& fetch) {
    alignas(64) Weight tiles[BLOCK_ROWS * MAX_PRODUCTS];
    for (int64_t i = 0; i < number; ++i) start_totals(totals + i * BLOCK_ROWS * MAX_VECTORS);
    for (int64_t g = 0; g < x.groups; ++g) {
      for (int64_t r = 0; r < count; r += TILE_ROWS) unpack(r, g, tiles + r * x.group);
      fetch_after(g);
      for (int64_t i = 0; i < number; ++i) {
        Floats* to = totals + i * BLOCK_ROWS * MAX_VECTORS;
        const int64_t vector = (from + i) * MAX_VECTORS;
        x.panels.vectors_of(from + i) == MAX_VECTORS ? add_group<MAX_VECTORS>(tiles, g, vector, fetch, to)
                                                     : add_group<1>(tiles, g, vector, fetch, to);
      }
    }
  }

  // The result of one of these panels, (count, MAX_VECTORS * LANES).
  const float* result(int64_t number) const {
    return reinterpret_cast<const float*>(totals + number * BLOCK_ROWS * MAX_VECTORS);
  }

  int64_t size() const { return count; }

 private:
  const Format format;
  const QuantizedRows<Elements>& x;
  const float* bias;
  int64_t first = 0, count = 0;
  std::vector<float> scales, leasts, by_row;  // (groups, BLOCK_ROWS)
  Floats totals[PASS_PANELS * BLOCK_ROWS * MAX_VECTORS];

  // (count, groups) -> (groups, BLOCK_ROWS) in fp32, zero behind the last row.
  void read_values(const uint16_t* values, std::vector<float>& to) {
    by_row.resize(BLOCK_ROWS * x.groups + LANES), to.resize(BLOCK_ROWS * x.groups);
    bf16_to_fp32(values, count * x.groups, by_row.data());
    std::fill(by_row.begin() + count * x.groups, by_row.end(), 0.0f);
    Floats square[LANES];
    for (int64_t r = 0; r < BLOCK_ROWS; r += LANES)
      for (int64_t g = 0; g < x.groups; g += LANES) {  // what is read behind a row is not written
        UNROLL for (int n = 0; n < LANES; ++n) square[n] = load<Floats>(by_row.data() + (r + n) * x.groups + g);
        transpose_square(square);
        for (int64_t n = 0; n < std::min<int64_t>(LANES, x.groups - g); ++n)
          store(to.data() + (g + n) * BLOCK_ROWS + r, square[n]);
      }
  }

  // Bring the next group of all rows close to the core while this one is multiplied.
  void fetch_after(int64_t g) const {
    const int64_t each = Format::offset ? 2 : 1, bytes = x.group / each, ahead = std::max<int64_t>(64, bytes);
    const char* from = reinterpret_cast<const char*>(format.weight) + (first * x.columns + g * x.group) / each + ahead;
    for (int64_t r = 0; r < count; ++r, from += x.columns / each)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from + b);
  }

  void start_totals(Floats* to) const {
    for (int64_t r = 0; r < count; ++r)
      UNROLL for (int v = 0; v < MAX_VECTORS; ++v) to[r * MAX_VECTORS + v] = all(bias ? bias[first + r] : 0.0f);
  }

  // One group of TILE_ROWS rows -> (group / CHUNK, TILE_ROWS, CHUNK), zero behind the last row.
  void unpack(int64_t r, int64_t g, Weight* to) const {
    const int64_t live = std::min<int64_t>(TILE_ROWS, count - r);
    for (int64_t c = g * x.group; c < (g + 1) * x.group; c += CHUNK, to += TILE_ROWS * CHUNK) {
      for (int64_t n = 0; n < live; ++n) Elements::unpack(format, first + r + n, c, to + n * CHUNK);
      if (live < TILE_ROWS) std::fill(to + live * CHUNK, to + TILE_ROWS * CHUNK, Weight(0));
    }
  }

  // One group of TILE_ROWS rows with a panel of V vectors.
  template <int V>
  void sum_tile(const Weight* tile, int64_t g, int64_t vector, Fetch& fetch, Ints (&sums)[TILE_ROWS][V]) const {
    const int64_t chunks = x.group / CHUNK;
    if constexpr (Elements::PARTS == 1)
      return sum_group<Elements, V>(tile, x.group_inputs(vector, V, g), chunks, fetch, sums);
    for (int v = 0; v < V; ++v) {
      Ints parts[TILE_ROWS][2] = {};
      sum_group<Elements, 2>(tile, x.group_inputs(vector + v, 1, g), chunks, fetch, parts);
      UNROLL for (int n = 0; n < TILE_ROWS; ++n) sums[n][v] = (parts[n][0] << 8) + parts[n][1];
    }
  }

  // One group of all rows with a panel of V vectors.
  template <int V>
  __attribute__((noinline)) void add_group(const Weight* tiles, int64_t g, int64_t vector, Fetch& fetch,
                                           Floats* to) const {
    constexpr bool is_shifted = Elements::IS_UNSIGNED && Format::byte_zero != 0;
    const int64_t at = vector * x.groups + g * V;
    Fetch next = fetch;  // a copy stays in registers
    Ints start[V];
    Floats step[V], offset[V];
    UNROLL for (int v = 0; v < V; ++v) {
      start[v] = *x.sums.at(at + v) * -Format::byte_zero;
      step[v] = *x.steps.at(at + v);
      if (Format::offset) offset[v] = to_floats(*x.sums.at(at + v)) * step[v];
    }
    for (int64_t r = 0; r < count; r += TILE_ROWS, to += TILE_ROWS * MAX_VECTORS) {
      Ints sums[TILE_ROWS][V];
      UNROLL for (int n = 0; n < TILE_ROWS; ++n)
        UNROLL for (int v = 0; v < V; ++v) sums[n][v] = is_shifted ? load_again(start[v]) : Ints{};
      sum_tile(tiles + r * x.group, g, vector, next, sums);
      const float *scale = scales.data() + g * BLOCK_ROWS + r, *least = leasts.data() + g * BLOCK_ROWS + r;
      UNROLL for (int n = 0; n < TILE_ROWS; ++n)
        UNROLL for (int v = 0; v < V; ++v) {
          Floats& total = to[n * MAX_VECTORS + v];
          const Floats before = Format::offset ? total + offset[v] * least[n] : total;
          total = before + to_floats(sums[n][v]) * (step[v] * scale[n]);  // only this waits for the sums
        }
    }
    fetch = next;
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
template <class Format, class Elements, class Done>
void multiply_rows(const Format& format, const QuantizedRows<Elements>& x, int64_t begin, int64_t end,
                   const float* bias, Done done) {
  BlockProducts<Format, Elements> block(format, x, bias);
  const int64_t number = x.panels.count();
  for (int64_t n = begin; n < end; n += BLOCK_ROWS) {
    Fetch fetch = next_block(format, n + BLOCK_ROWS, end, number * format.columns / CHUNK * BLOCK_TILES);
    block.set_block(n, end - n);
    for (int64_t i = 0; i < number; i += PASS_PANELS) {
      const int64_t together = std::min(PASS_PANELS, number - i);
      block.multiply(i, together, fetch);
      for (int64_t j = 0; j < together; ++j) done(i + j, n, block);
    }
  }
}

// Rows of x (batch, stride), of which `inputs` are read; with a stride of 0, panels of `inputs` numbers a row.
struct RowPanels {
  const float* x;
  int64_t batch, stride, inputs;

  // Quantize some of the groups of all vectors, those of a vector one after the other.
  template <class Elements>
  void quantize(QuantizedRows<Elements>& to, int64_t begin, int64_t end) const {
    std::vector<float> turned(to.group * LANES, 0.0f);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t vector = n / to.groups, g = n % to.groups, row = vector * LANES, column = g * to.group;
      const int64_t rows = std::min<int64_t>(LANES, batch - row), live = std::min(to.group, inputs - column);
      if (!stride) {
        const int64_t panel = vector / MAX_VECTORS, step = to.panels.step(panel);
        const float* from = x + panel * PANEL * inputs + column * step + vector % MAX_VECTORS * LANES;
        to.quantize_group(vector, g, from, step, live);
        continue;
      }
      if (rows < LANES) std::fill(turned.begin(), turned.end(), 0.0f);
      panels::transpose(x + row * stride + column, rows, live, stride, turned.data(), LANES);
      to.quantize_group(vector, g, turned.data(), LANES, live);
    }
  }
};

// The rows from begin to end of a weight with rows of x -> y (batch, y_stride).
template <class Elements, class Format>
void multiply_to_rows(const Format& format, const QuantizedRows<Elements>& x, int64_t begin, int64_t end,
                      const float* bias, float* y, int64_t y_stride) {
  multiply_rows(format, x, begin, end, bias, [&](int64_t p, int64_t n, const BlockProducts<Format, Elements>& block) {
    const int64_t row = p * PANEL, live = std::min(PANEL, x.panels.batch - row);
    panels::transpose(block.result(p % PASS_PANELS), block.size(), live, PANEL, y + row * y_stride + n, y_stride);
  });
}

// The same to panels of `rows` numbers a row.
template <class Elements, class Format>
void multiply_to_panels(const Format& format, const QuantizedRows<Elements>& x, int64_t begin, int64_t end,
                        const float* bias, float* y, int64_t rows) {
  multiply_rows(format, x, begin, end, bias, [&](int64_t p, int64_t n, const BlockProducts<Format, Elements>& block) {
    const int64_t step = x.panels.step(p);
    const float* from = block.result(p % PASS_PANELS);
    float* to = y + p * PANEL * rows + n * step;
    for (int64_t r = 0; r < block.size(); ++r) std::copy_n(from + r * PANEL, step, to + r * step);
  });
}

}  // namespace integer_panels
}  // namespace
