// y = x W' + bias for a few rows x (one token of each sequence), which is bound by how fast the weights can be read.
//
// A weight is stored by rows, in groups along the row.  In one group, with its scale s and its least value m:
//     dense   w           4 bytes, or the upper 2 of them (bfloat16)
//     int8    s q         one byte each
//     int4    m + s q     two in a byte: of 32 weights the first 16 are the lower halves of 16 bytes
// so that  y = sum over groups of s (sum of q x) + m (sum of x), and q is widened in registers and never written.
// How many rows are multiplied at once never changes a sum: each is made in one order.
#pragma once

#include <vector>

#include "integers.h"

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 8, SUMS = 16;  // rows of a weight that are worked on together; sums that run side by side
#else
constexpr int ROWS = 4, SUMS = 8;
#endif
constexpr int PARTS = CHUNK / LANES;  // vectors in a chunk

// -- formats: unpack gives a chunk as floats; scale and least are those of a row, one a group ----------

struct Single {
  const float* weight;
  int64_t columns;
  static constexpr bool scaled = false, offset = false;
  void unpack(int64_t row, int64_t column, Floats* out) const {
    const float* from = weight + row * columns + column;
    prefetch(from), prefetch(from + CHUNK / 2);
    UNROLL for (int p = 0; p < PARTS; ++p) out[p] = load<Floats>(from + p * LANES);
  }
  const uint16_t* scale(int64_t) const { return nullptr; }
  const uint16_t* least(int64_t) const { return nullptr; }
};

struct Half {
  const uint16_t* weight;
  int64_t columns;
  static constexpr bool scaled = false, offset = false;
  void unpack(int64_t row, int64_t column, Floats* out) const {
    const uint16_t* from = weight + row * columns + column;
    prefetch(from);
    UNROLL for (int p = 0; p < PARTS; ++p) {
      Words bits = words(from + p * LANES) << 16;
      std::memcpy(&out[p], &bits, sizeof bits);
    }
  }
  const uint16_t* scale(int64_t) const { return nullptr; }
  const uint16_t* least(int64_t) const { return nullptr; }
};

struct Int8 {
  const int8_t* weight;
  const uint16_t* scales;
  int64_t columns, groups;
  static constexpr bool scaled = true, offset = false;
  void unpack(int64_t row, int64_t column, Floats* out) const {
    const int8_t* from = weight + row * columns + column;
    prefetch(from);
    UNROLL for (int p = 0; p < PARTS; ++p) out[p] = floats(words(from + p * LANES));
  }
  void unpack(int64_t row, int64_t column, Shorts* out) const {
    const int8_t* from = weight + row * columns + column;
    prefetch(from);
    UNROLL for (int p = 0; p < SHORTS; ++p) out[p] = shorts(from + p * 2 * LANES);
  }
  const uint16_t* scale(int64_t row) const { return scales + row * groups; }
  const uint16_t* least(int64_t) const { return nullptr; }
};

struct Int4 {
  const uint8_t* weight;
  const uint16_t *scales, *leasts;
  int64_t columns, groups;
  static constexpr bool scaled = true, offset = true;
  void unpack(int64_t row, int64_t column, Floats* out) const {
    const uint8_t* from = weight + (row * columns + column) / 2;
    prefetch(from);
    UNROLL for (int p = 0; p < PARTS / 2; ++p) {
      Words both = words(from + p * LANES);
      out[p] = lower(both);
      out[p + PARTS / 2] = lower(both >> 4);
    }
  }
  void unpack(int64_t row, int64_t column, Shorts* out) const {
    const uint8_t* from = weight + (row * columns + column) / 2;
    prefetch(from);
    nibbles(from, out);
  }
  const uint16_t* scale(int64_t row) const { return scales + row * groups; }
  const uint16_t* least(int64_t row) const { return leasts + row * groups; }
};

// -- the product ---------------------------------------------------------------------------------------------------

struct Input {
  const float* x;     // (batch, stride), of which columns are read
  const float* sums;  // (batch, groups, LANES): a group added up lane by lane, for formats with an offset
  int64_t batch, columns, group, groups, stride;
  const int16_t* whole = nullptr;  // (batch, columns) x as whole numbers, where they are multiplied
  const float* steps = nullptr;    // (batch, groups) and what they count
};

// Rows of a weight that are worked on together.  They lie far apart: each is a stream of its own, which a processor
// fetches in advance; short rows that follow each other are one stream that is read in leaps, and are not.
struct Lines {
  int64_t first, step;
  int count;
  int64_t operator[](int number) const { return first + number * step; }
  Lines from(int number) const { return {first + number * step, step, count - number}; }
};

// One group of R rows of the weight with B rows of x.
template <int R, int B, class Format>
inline void group_sums(const Format& format, const Input& in, const Lines& lines, int64_t first, int64_t g,
                       Floats (&part)[R][B]) {
  const int64_t begin = g * in.group, end = begin + in.group;
  if constexpr (Format::scaled && INTEGERS) {
    Words sums[R][B] = {};
    for (int64_t c = begin; c < end; c += CHUNK)
      UNROLL for (int r = 0; r < R; ++r) {
        Shorts w[SHORTS];
        format.unpack(lines[r], c, w);
        UNROLL for (int p = 0; p < SHORTS; ++p)
          UNROLL for (int b = 0; b < B; ++b)
            sums[r][b] = pairs(sums[r][b], w[p],
                               load<Shorts>(in.whole + (first + b) * in.columns + c + p * 2 * LANES));
      }
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int b = 0; b < B; ++b) part[r][b] = floats(sums[r][b]) * in.steps[(first + b) * in.groups + g];
  } else {
    for (int64_t c = begin; c < end; c += CHUNK) {
      Floats w[R][PARTS];
      UNROLL for (int r = 0; r < R; ++r) format.unpack(lines[r], c, w[r]);
      UNROLL for (int p = 0; p < PARTS; ++p)
        UNROLL for (int b = 0; b < B; ++b) {
          const Floats x = load<Floats>(in.x + (first + b) * in.stride + c + p * LANES);
          UNROLL for (int r = 0; r < R; ++r) part[r][b] += w[r][p] * x;
        }
    }
  }
}

// R rows of the weight with B rows of x: what is unpacked once is used B times, and R * B sums run side by side.
// Scales and least values (rows, groups) are in fp32 here: a multiplication reads one of them for all its lanes.
template <int R, int B, class Format>
inline void tile(const Format& format, const Input& in, const float* scales, const float* leasts, const Lines& lines,
                 int64_t first, float* y, int64_t rows) {
  Floats total[R][B] = {};
  if constexpr (!Format::scaled) {
    for (int64_t g = 0; g < in.groups; ++g) group_sums(format, in, lines, first, g, total);
  } else {
    for (int64_t g = 0; g < in.groups; ++g) {
      Floats part[R][B] = {};
      group_sums(format, in, lines, first, g, part);
      UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int b = 0; b < B; ++b) {
          total[r][b] += part[r][b] * scales[r * in.groups + g];
          if (Format::offset)
            total[r][b] += leasts[r * in.groups + g] * load<Floats>(in.sums + ((first + b) * in.groups + g) * LANES);
        }
    }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int b = 0; b < B; ++b) y[(first + b) * rows + lines[r]] = sum(total[r][b]);
}

// Some rows of the weight with B rows of x, as many sums at a time as registers hold.
template <int B, class Format>
inline void tiles(const Format& format, const Input& in, const float* scales, const float* leasts, const Lines& lines,
                  int64_t first, float* y, int64_t rows) {
  constexpr int R = std::min(ROWS, SUMS / B);
  int r = 0;
  for (; r + R <= lines.count; r += R)
    tile<R, B>(format, in, scales + r * in.groups, leasts + r * in.groups, lines.from(r), first, y, rows);
  for (; r < lines.count; ++r)
    tile<1, B>(format, in, scales + r * in.groups, leasts + r * in.groups, lines.from(r), first, y, rows);
}

// A few rows of the weight with all rows of x.
template <class Format>
void band(const Format& format, const Input& in, const Lines& lines, const float* bias, float* y, int64_t rows,
          float* scales, float* leasts) {
  for (int r = 0; r < lines.count; ++r) {
    if (Format::scaled) widen(format.scale(lines[r]), in.groups, scales + r * in.groups);
    if (Format::offset) widen(format.least(lines[r]), in.groups, leasts + r * in.groups);
  }
  int64_t b = 0;
  for (; b + 8 <= in.batch; b += 8) tiles<8>(format, in, scales, leasts, lines, b, y, rows);
  for (; b + 4 <= in.batch; b += 4) tiles<4>(format, in, scales, leasts, lines, b, y, rows);
  for (; b + 2 <= in.batch; b += 2) tiles<2>(format, in, scales, leasts, lines, b, y, rows);
  for (; b < in.batch; ++b) tiles<1>(format, in, scales, leasts, lines, b, y, rows);
  if (bias)
    for (b = 0; b < in.batch; ++b)
      for (int r = 0; r < lines.count; ++r) y[b * rows + lines[r]] += bias[lines[r]];
}

// The rows from low to high of the weight with all rows of x.
template <class Format>
void part_of(const Format& format, const Input& in, int64_t low, int64_t high, const float* bias, float* y,
             int64_t rows, float* scales, float* leasts) {
  const int64_t apart = (high - low) / ROWS, rest = low + apart * ROWS;
  for (int64_t n = 0; n < apart; ++n) band(format, in, {low + n, apart, ROWS}, bias, y, rows, scales, leasts);
  if (rest < high) band(format, in, {rest, 1, int(high - rest)}, bias, y, rows, scales, leasts);
}

// What a product of whole numbers reads in the place of x; rows of x are whole groups there.
struct Whole {
  std::vector<int16_t> numbers;
  std::vector<float> steps;

  void read(Input& in) {
    numbers.resize(in.batch * in.columns), steps.resize(in.batch * in.groups);
    for (int64_t b = 0; b < in.batch; ++b)
      rounded(in.x + b * in.stride, in.groups, in.group, numbers.data() + b * in.columns, steps.data() + b * in.groups);
    in.whole = numbers.data(), in.steps = steps.data();
  }
};

}  // namespace
