// Products of fp32 matrices in tiles of bfloat16.  fp32 numbers are sums of bfloat16, packed for tiles: x = x1 + x2 + x3
// holds all 24 bits, x1 + x2 the first 16.  With w likewise,
//     x w = x1 w1 + (x1 w2 + x2 w1) + (x1 w3 + x2 w2 + x3 w1)   3 parts: what is left out is below 2^-24 of |x w|
//     x w = x1 w1 + (x1 w2 + x2 w1)                             2 parts: below 2^-16, for quantized weights
// and every sum is in fp32.  Six products in tiles take less than half the time of one in fp32.
//
// A block is 32 rows (or columns) of an operand, with all its inputs: (steps, parts, 2 tiles, 16 cache lines), a step
// being 32 inputs.  What lies beyond the end of a matrix is zero.
#pragma once

#include <ATen/Parallel.h>

#include "linear/matvec.h"
#include "linear/panel.h"

#if MONOBLOCK_TILES

namespace {
namespace split {

constexpr int64_t BLOCK = 2 * TILE;

// The odd ones of 64 numbers of 16 bits.
const __m512i UPPER_HALVES = _mm512_add_epi32(
    _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                       _mm512_set1_epi32(0x00040004)),
    _mm512_set1_epi32(0x00030001));

inline int64_t count_blocks(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }
inline int64_t count_steps(int64_t inputs) { return (inputs + TILE_INPUTS - 1) / TILE_INPUTS; }

// Two vectors as parts of 32 bfloat16 each, the first vector in the lower half.  A bfloat16 is the upper half of an fp32
// number; to round to it, half of its last bit is added.
template <int PARTS>
inline void split_pair(Floats low, Floats high, __m512i* parts) {
  const Ints half = Ints{} + 0x8000, upper = Ints{} + int32_t(0xffff0000);
  UNROLL for (int p = 0; p < PARTS; ++p) {
    const Ints low_bits = Ints(low) + half, high_bits = Ints(high) + half;
    parts[p] = _mm512_permutex2var_epi16(__m512i(low_bits), UPPER_HALVES, __m512i(high_bits));
    if (p + 1 < PARTS) low -= Floats(low_bits & upper), high -= Floats(high_bits & upper);
  }
}

inline Floats load_masked(const float* from, int64_t live) {
  if (live >= LANES) return load<Floats>(from);
  return live <= 0 ? Floats{} : Floats(_mm512_maskz_loadu_ps(__mmask16((1u << live) - 1), from));
}

inline void store_masked(float* to, Floats v, int64_t live) {
  _mm512_mask_storeu_ps(to, live >= LANES ? __mmask16(0xffff) : __mmask16((1u << live) - 1), __m512(v));
}

// -- operands ---------------------------------------------------------------------------------------------------------

// (rows, inputs) in fp32.  Step `step` of a row is two vectors.
struct DenseRows {
  const float* numbers;
  int64_t rows, inputs;
  static constexpr bool is_transposed = false;
  const char* row_address(int64_t row) const { return reinterpret_cast<const char*>(numbers + row * inputs); }
  void load_step(int64_t row, int64_t step, Floats& low, Floats& high) const {
    const int64_t live = row < rows ? inputs - step * TILE_INPUTS : 0;
    const float* from = numbers + row * inputs + step * TILE_INPUTS;
    low = load_masked(from, live), high = load_masked(from + LANES, live - LANES);
  }
};

// The rows of a quantized matrix.
template <class Format>
struct QuantizedRows {
  Format format;
  int64_t rows, inputs, group;
  static constexpr bool is_transposed = false;
  const char* row_address(int64_t row) const {
    return reinterpret_cast<const char*>(format.weight) + row * inputs / (Format::offset ? 2 : 1);
  }
  static float value(uint16_t bf16) {
    float v;
    bf16_to_fp32(&bf16, 1, &v);
    return v;
  }
  void load_step(int64_t row, int64_t step, Floats& low, Floats& high) const {
    if (row >= rows) {
      low = high = Floats{};
      return;
    }
    static_assert(CHUNK == TILE_INPUTS && CHUNK_VECTORS == 2);
    Floats numbers[2];
    const int64_t g = step * TILE_INPUTS / group;
    const Floats scale = all(value(format.scale(row)[g]));
    format.unpack(row, step * TILE_INPUTS, numbers);
    low = numbers[0] * scale, high = numbers[1] * scale;
    if constexpr (Format::offset) {
      const Floats least = all(value(format.least(row)[g]));
      low += least, high += least;
    }
  }
};

// The columns of a matrix (inputs, columns) in fp32, as rows of its transpose.  Step `step` of 16 columns is 16 pairs.
struct DenseColumns {
  const float* numbers;
  int64_t rows, inputs, stride;  // rows: columns of the matrix
  static constexpr bool is_transposed = true;
  void load_pair(int64_t row, int64_t input, Floats& low, Floats& high) const {
    const float* from = numbers + input * stride + row;
    low = input < inputs ? load_masked(from, rows - row) : Floats{};
    high = input + 1 < inputs ? load_masked(from + stride, rows - row) : Floats{};
  }
};

// -- packing ----------------------------------------------------------------------------------------------------------

// Numbers of two vectors in turn, as a row of B has them.
inline __m512i interleave(__m512i part) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), part);
}

// Some steps of the block from `row` on, as A, or as B where `is_b`.
template <int PARTS, bool is_b, class Operand>
inline void pack_block(const Operand& operand, int64_t row, int64_t first, int64_t steps, CacheLine* to) {
  constexpr bool turn = is_b != Operand::is_transposed;
  const Operand from = operand;  // a copy, which the compiler knows is not written to
  for (int64_t tile = 0; tile < 2; ++tile, row += TILE) {
    if constexpr (!is_b && !turn) {
      for (int64_t step = 0; step < steps; ++step) {
        CacheLine* lines = to + (step * PARTS * 2 + tile) * TILE;
        for (int64_t r = 0; r < TILE; ++r) {
          Floats low, high;
          __m512i parts[PARTS];
          from.load_step(row + r, first + step, low, high);
          split_pair<PARTS>(low, high, parts);
          UNROLL for (int p = 0; p < PARTS; ++p) std::memcpy(lines + p * 2 * TILE + r, &parts[p], sizeof(CacheLine));
        }
      }
      continue;
    }
    for (int64_t step = 0; step < steps; ++step) {
      Floats square[PARTS][TILE];
      for (int64_t r = 0; r < TILE; ++r) {
        Floats low, high;
        __m512i parts[PARTS];
        if constexpr (Operand::is_transposed)
          from.load_pair(row, (first + step) * TILE_INPUTS + 2 * r, low, high);
        else
          from.load_step(row + r, first + step, low, high);
        split_pair<PARTS>(low, high, parts);
        UNROLL for (int p = 0; p < PARTS; ++p)
          square[p][r] = Floats(Operand::is_transposed ? interleave(parts[p]) : parts[p]);
      }
      UNROLL for (int p = 0; p < PARTS; ++p) {
        if (turn) transpose_square(square[p]);
        std::memcpy(to + ((step * PARTS + p) * 2 + tile) * TILE, square[p], TILE * sizeof(CacheLine));
      }
    }
  }
}

// -- products ---------------------------------------------------------------------------------------------------------

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
