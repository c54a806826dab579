// fp32 numbers as sums of bfloat16, packed for tiles: x = x1 + x2 + x3 holds all 24 bits, x1 + x2 the first 16.
//
// A block is 32 rows (or columns) of an operand, with all its inputs: (steps, parts, 2 tiles, 16 cache lines), a step
// being 32 inputs.  What lies beyond the end of a matrix is zero.
#pragma once

#include "linear/matvec.h"
#include "linear/panel.h"
#include "linear/tiles.h"

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

}  // namespace split
}  // namespace

#endif
