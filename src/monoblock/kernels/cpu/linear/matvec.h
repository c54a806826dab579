// y = x W' + bias for a few rows x (one token of each sequence), which is bound by the memory bandwidth of the weights.
//
// A weight is stored by rows, in groups along the row.  In one group, with its scale s and its least value m:
//     dense   w           4 bytes, or the upper 2 of them (bfloat16)
//     int8    s q         one byte each
//     int4    m + s q     two in a byte: of 32 weights the first 16 are the lower halves of 16 bytes
// so that  y = sum over groups of s (sum of q x) + m (sum of x), and q is widened in registers and never written.
// Every sum has one order, so the number of rows that are multiplied at once never changes a bit.
#pragma once

#include <vector>

#include "linear/neon_dot.h"
#include "linear/nibble_dot.h"

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 8, SUMS = 16;  // rows of a weight in a tile; sums that registers hold
#else
constexpr int ROWS = 4, SUMS = 8;
#endif
constexpr int CHUNK_VECTORS = CHUNK / LANES;  // vectors in a chunk
using ChunkBytes = uint8_t __attribute__((vector_size(CHUNK)));
using HalfChunkBytes = uint8_t __attribute__((vector_size(CHUNK / 2)));

// -- formats: unpack a chunk to floats or 16-bit integers; scale and least are those of a row, one a group ------------

struct Fp32Format {
  const float* weight;
  int64_t columns;
  static constexpr bool scaled = false, offset = false;
  const float* at(int64_t row, int64_t column) const { return weight + row * columns + column; }
  static constexpr int64_t stored(int64_t weights) { return weights; }
  static void unpack(const float* from, Floats* out) {
    prefetch(from), prefetch(from + CHUNK / 2);
    UNROLL for (int p = 0; p < CHUNK_VECTORS; ++p) out[p] = load<Floats>(from + p * LANES);
  }
};

struct Bf16Format {
  const uint16_t* weight;
  int64_t columns;
  static constexpr bool scaled = false, offset = false;
  const uint16_t* at(int64_t row, int64_t column) const { return weight + row * columns + column; }
  static constexpr int64_t stored(int64_t weights) { return weights; }
  static void unpack(const uint16_t* from, Floats* out) {
    prefetch(from);
    UNROLL for (int p = 0; p < CHUNK_VECTORS; ++p) {
      Ints bits = load_ints(from + p * LANES) << 16;
      std::memcpy(&out[p], &bits, sizeof bits);
    }
  }
};

struct Int8Format {
  const int8_t* weight;
  const uint16_t* scales;
  int64_t columns, groups;
  static constexpr bool scaled = true, offset = false;
  const int8_t* at(int64_t row, int64_t column) const { return weight + row * columns + column; }
  static constexpr int64_t stored(int64_t weights) { return weights; }
  template <class Vector>
  void unpack(int64_t row, int64_t column, Vector* out) const { unpack(at(row, column), out); }
  static void unpack(const int8_t* from, Floats* out) {
    prefetch(from);
    UNROLL for (int p = 0; p < CHUNK_VECTORS; ++p) out[p] = to_floats(load_ints(from + p * LANES));
  }
  static void unpack(const int8_t* from, Shorts* out) {
    prefetch(from);
    UNROLL for (int p = 0; p < CHUNK_SHORTS; ++p) out[p] = load_shorts(from + p * 2 * LANES);
  }
  // As unsigned bytes, which hold q + byte_zero.
  static constexpr int byte_zero = 128;
  static void unpack(const int8_t* from, uint8_t* out) {
    const ChunkBytes bytes = load<ChunkBytes>(from) ^ 128;
    std::memcpy(out, &bytes, sizeof bytes);
  }
  // As signed bytes, which hold q.
  static void unpack(const int8_t* from, int8_t* out) { std::memcpy(out, from, CHUNK); }
  const uint16_t* scale(int64_t row) const { return scales + row * groups; }
  const uint16_t* least(int64_t) const { return nullptr; }
};

struct Int4Format {
  const uint8_t* weight;
  const uint16_t *scales, *leasts;
  int64_t columns, groups;
  static constexpr bool scaled = true, offset = true;
  const uint8_t* at(int64_t row, int64_t column) const { return weight + (row * columns + column) / 2; }
  static constexpr int64_t stored(int64_t weights) { return weights / 2; }
  template <class Vector>
  void unpack(int64_t row, int64_t column, Vector* out) const { unpack(at(row, column), out); }
  static void unpack(const uint8_t* from, Floats* out) {
    prefetch(from);
    UNROLL for (int p = 0; p < CHUNK_VECTORS / 2; ++p) {
      Ints both = load_ints(from + p * LANES);
      out[p] = low_nibbles(both);
      out[p + CHUNK_VECTORS / 2] = low_nibbles(both >> 4);
    }
  }
  static void unpack(const uint8_t* from, Shorts* out) {
    prefetch(from);
    load_nibbles(from, out);
  }
  static constexpr int byte_zero = 0;
  static void unpack(const uint8_t* from, uint8_t* out) {
    const HalfChunkBytes both = load<HalfChunkBytes>(from);
    const HalfChunkBytes low = both & 15, high = both >> 4;
    std::memcpy(out, &low, sizeof low), std::memcpy(out + CHUNK / 2, &high, sizeof high);
  }
  static void unpack(const uint8_t* from, int8_t* out) { unpack(from, reinterpret_cast<uint8_t*>(out)); }
  const uint16_t* scale(int64_t row) const { return scales + row * groups; }
  const uint16_t* least(int64_t row) const { return leasts + row * groups; }
};

// -- the product ------------------------------------------------------------------------------------------------------

// One group of R rows of the weight, which then lie behind it, with B rows of x.
template <int R, int B, class Format, class Rows>
inline void group_sums(const Format& format, const MatvecInput& in, Rows& rows, int64_t first, int64_t g,
                       Floats (&part)[R][B]) {
  const int64_t begin = g * in.group, end = begin + in.group;
  if constexpr (Format::scaled && HAS_PAIR_DOT) {
    Ints sums[R][B] = {};
    for (int64_t c = begin; c < end; c += CHUNK, rows.advance(format.stored(CHUNK)))
      UNROLL for (int r = 0; r < R; ++r) {
        Shorts w[CHUNK_SHORTS];
        format.unpack(rows[r], w);
        UNROLL for (int p = 0; p < CHUNK_SHORTS; ++p)
          UNROLL for (int b = 0; b < B; ++b)
            sums[r][b] = add_pair_products(sums[r][b], w[p],
                                           load<Shorts>(in.int16 + (first + b) * in.columns + c + p * 2 * LANES));
      }
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int b = 0; b < B; ++b) part[r][b] = to_floats(sums[r][b]) * in.steps[(first + b) * in.groups + g];
  } else {
    for (int64_t c = begin; c < end; c += CHUNK, rows.advance(format.stored(CHUNK))) {
      Floats w[R][CHUNK_VECTORS];
      UNROLL for (int r = 0; r < R; ++r) format.unpack(rows[r], w[r]);
      UNROLL for (int p = 0; p < CHUNK_VECTORS; ++p)
        UNROLL for (int b = 0; b < B; ++b) {
          const Floats x = load<Floats>(in.x + (first + b) * in.stride + c + p * LANES);
          UNROLL for (int r = 0; r < R; ++r) part[r][b] += w[r][p] * x;
        }
    }
  }
}

// R rows of the weight with B rows of x: what is unpacked once is used B times, in R * B independent sums.
// Scales and least values (rows, groups) are fp32 here, each broadcast to all lanes.
template <int R, int B, class Format>
inline void tile(const Format& format, const MatvecInput& in, const float* scales, const float* leasts,
                 const WeightRows& band, int64_t first, float* y, int64_t rows) {
  if constexpr (Format::offset && HAS_NIBBLE_DOT)
    if (in.nibble_bytes)
      return in.is_wide ? nibble_tile<R, B, true>(format, in, band, first, y, rows)
                        : nibble_tile<R, B, false>(format, in, band, first, y, rows);
#if MONOBLOCK_NEON_DOT
  if constexpr (Format::scaled) return neon::multiply_tile<R, B>(format, in, band, first, y, rows);
#endif
  Floats total[R][B] = {};
  RowAddresses weights(format.at(band.first, 0), format.stored(band.step * format.columns));
  if constexpr (!Format::scaled) {
    for (int64_t g = 0; g < in.groups; ++g) group_sums(format, in, weights, first, g, total);
  } else {
    for (int64_t g = 0; g < in.groups; ++g) {
      Floats part[R][B] = {};
      group_sums(format, in, weights, first, g, part);
      UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int b = 0; b < B; ++b) {
          total[r][b] += part[r][b] * scales[r * in.groups + g];
          if (Format::offset)
            total[r][b] += leasts[r * in.groups + g] * load<Floats>(in.sums + ((first + b) * in.groups + g) * LANES);
        }
    }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int b = 0; b < B; ++b) y[(first + b) * rows + band[r]] = sum(total[r][b]);
}

// Some rows of the weight with B rows of x, as many sums at a time as registers hold.
template <int B, class Format>
inline void tiles(const Format& format, const MatvecInput& in, const float* scales, const float* leasts,
                  const WeightRows& band, int64_t first, float* y, int64_t rows) {
  constexpr int R = std::min(ROWS, SUMS / B);
  int r = 0;
  for (; r + R <= band.count; r += R)
    tile<R, B>(format, in, scales + r * in.groups, leasts + r * in.groups, band.from(r), first, y, rows);
  for (; r < band.count; ++r)
    tile<1, B>(format, in, scales + r * in.groups, leasts + r * in.groups, band.from(r), first, y, rows);
}

// A few rows of the weight with all rows of x.  `scales` and `leasts` are scratch.
template <class Format>
void multiply_band(const Format& format, const MatvecInput& in, const WeightRows& band, const float* bias, float* y,
                   int64_t rows, float* scales, float* leasts) {
  const bool reads_bf16 = MONOBLOCK_NEON_DOT || in.nibble_bytes;  // these products convert scales themselves
  for (int r = 0; r < band.count && !reads_bf16; ++r) {
    if constexpr (Format::scaled) bf16_to_fp32(format.scale(band[r]), in.groups, scales + r * in.groups);
    if constexpr (Format::offset) bf16_to_fp32(format.least(band[r]), in.groups, leasts + r * in.groups);
  }
  int64_t b = 0;
  for (; b + 8 <= in.batch; b += 8) tiles<8>(format, in, scales, leasts, band, b, y, rows);
  for (; b + 4 <= in.batch; b += 4) tiles<4>(format, in, scales, leasts, band, b, y, rows);
  for (; b + 2 <= in.batch; b += 2) tiles<2>(format, in, scales, leasts, band, b, y, rows);
  for (; b < in.batch; ++b) tiles<1>(format, in, scales, leasts, band, b, y, rows);
  if (bias)
    for (b = 0; b < in.batch; ++b)
      for (int r = 0; r < band.count; ++r) y[b * rows + band[r]] += bias[band[r]];
}

// The rows from low to high of the weight with all rows of x.
template <class Format>
void multiply_rows(const Format& format, const MatvecInput& in, int64_t low, int64_t high, const float* bias, float* y,
                   int64_t rows, float* scales, float* leasts) {
  const int64_t apart = (high - low) / ROWS, rest = low + apart * ROWS;
  for (int64_t n = 0; n < apart; ++n) multiply_band(format, in, {low + n, apart, ROWS}, bias, y, rows, scales, leasts);
  if (rest < high) multiply_band(format, in, {rest, 1, int(high - rest)}, bias, y, rows, scales, leasts);
}

// x as products with quantized weights read it: in integers of at most `limit`, and the sums of its groups for formats
// with an offset.
class QuantizedInput {
 public:
  void fill(MatvecInput& in, bool has_offset, int limit) {
    if (has_offset && NibbleInput::supports(in)) return nibbles.fill(in, limit);
    int16.resize(in.batch * in.columns), steps.resize(in.batch * in.groups);
    if (has_offset) sums.resize(in.batch * in.groups * LANES);
    for (int64_t b = 0; b < in.batch; ++b)
      quantize_row(in.x + b * in.stride, in.groups, in.group, int16.data() + b * in.columns,
                   steps.data() + b * in.groups, limit, has_offset ? sums.data() + b * in.groups * LANES : nullptr);
    if (has_offset) in.sums = sums.data();
    if (!HAS_INTEGER_DOT) return dequantize(in);
    in.int16 = int16.data(), in.steps = steps.data();
#if MONOBLOCK_NEON_DOT
    in.is_wide = limit > LIMIT_8_BITS, in.group_sums = sums.data();
    neon::arrange(int16.data(), in.batch * in.columns);
    for (int64_t n = 0; has_offset && n < in.batch * in.groups; ++n)
      sums[n] = sum(load<Floats>(sums.data() + n * LANES));  // never behind what is still to be read
#endif
  }

 private:
  std::vector<int16_t> int16;
  std::vector<float> steps, sums, rounded;
  NibbleInput nibbles;

  // Without products in integers: the same numbers in fp32.
  void dequantize(MatvecInput& in) {
    rounded.resize(in.batch * in.columns);
    for (int64_t i = 0; i < in.batch * in.columns; ++i) rounded[i] = int16[i] * steps[i / in.group];
    in.x = rounded.data(), in.stride = in.columns;
  }
};

}  // namespace
