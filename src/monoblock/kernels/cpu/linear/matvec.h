// y = x W' + bias for a few rows x (one token of each sequence), which is bound by the memory bandwidth of the weights.
//
// A weight is stored by rows, in groups along the row.  In one group, with its scale s and its least value m:
//     dense   w           4 bytes
//     int8    s q         one byte each
//     int4    m + s q     two in a byte: of 32 weights the first 16 are the lower halves of 16 bytes
// so that  y = sum over groups of s (sum of q x) + m (sum of x), and q is widened in registers and never written.
// Every sum has one order, so the number of rows that are multiplied at once never changes a bit.
#pragma once

#include <vector>

#include "simd.h"

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

// -- what products read: rows of x, and rows of a weight --------------------------------------------------------------

struct MatvecInput {
  const float* x;     // (batch, stride), of which columns are read
  const float* sums;  // (batch, groups, LANES): a group added up lane by lane, for formats with an offset
  int64_t batch, columns, group, groups, stride;
  const int16_t* int16 = nullptr;  // (batch, columns) x quantized, for products in integers
  const float* steps = nullptr;    // (batch, groups)
  const int8_t* nibble_bytes = nullptr;  // x as NibbleInput has it, for 4 bits
  const float *nibble_steps = nullptr, *group_sums = nullptr;  // group_sums (batch, groups), also for ARM
  bool is_wide = true;  // whether integers have 16 bits
};

// Rows of a weight that one tile multiplies.  They lie far apart: the processor prefetches each as a stream of its own,
// while short rows that follow each other would be one stream that is read in leaps.
struct WeightRows {
  int64_t first, step;
  int count;
  int64_t operator[](int number) const { return first + number * step; }
  WeightRows from(int number) const { return {first + number * step, step, count - number}; }
};

// Where R such rows are read, `step` numbers apart: few registers hold the addresses of eight.
template <class Stored>
class RowAddresses {
 public:
  RowAddresses(const Stored* first, int64_t step) : low(first), high(first + 4 * step), step(step) {}
  const Stored* operator[](int number) const { return (number < 4 ? low : high) + number % 4 * step; }
  void advance(int64_t count) { low += count, high += count; }

 private:
  const Stored *low, *high;
  const int64_t step;
};

// -- 4 bits in groups of 32 by AVX-512 --------------------------------------------------------------------------------

#if MONOBLOCK_VNNI

// One instruction multiplies 64 weights with one byte of x each, so x = step (256 high + low) with signed bytes.  128
// weights are read at once; each quarter of a vector is a group.
constexpr int64_t NIBBLE_GROUP = 32, NIBBLE_COLUMNS = 128;  // weights in a group, and in the vectors read at once

// x for these products.
struct NibbleInput {
  std::vector<int8_t> bytes;       // (batch, columns / 128, 4, 64): high bytes for the lower and upper nibbles, low bytes
  std::vector<float> steps, sums;  // (batch, columns / 128, 16), a step for each lane; (batch, groups)
  std::vector<int16_t> integers;
  std::vector<float> group_steps, lane_sums;

  static bool supports(const MatvecInput& in) {
    return in.group == NIBBLE_GROUP && in.columns % NIBBLE_COLUMNS == 0;
  }

  void fill(MatvecInput& in, int limit) {
    bytes.resize(in.batch * in.columns * 2), integers.resize(in.columns), group_steps.resize(in.groups);
    lane_sums.resize(in.groups * LANES);
    steps.resize(in.batch * in.columns / NIBBLE_COLUMNS * LANES), sums.resize(in.batch * in.groups);
    for (int64_t b = 0; b < in.batch; ++b) {
      quantize_row(in.x + b * in.stride, in.groups, in.group, integers.data(), group_steps.data(), limit,
                   lane_sums.data());
      for (int64_t g = 0; g < in.groups; ++g) {
        const __m512i v = load<__m512i>(integers.data() + g * NIBBLE_GROUP);
        const __m256i low = _mm512_cvtepi16_epi8(v),
                      high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_add_epi16(v, _mm512_set1_epi16(128)), 8));
        const int64_t quarter = g % 4;
        int8_t* to = bytes.data() + (b * in.columns + g / 4 * NIBBLE_COLUMNS) * 2 + quarter * 16;
        std::memcpy(to, &high, 16), std::memcpy(to + 64, reinterpret_cast<const char*>(&high) + 16, 16);
        std::memcpy(to + 128, &low, 16), std::memcpy(to + 192, reinterpret_cast<const char*>(&low) + 16, 16);
        std::fill_n(steps.data() + (b * in.groups + g) * 4, 4, group_steps[g]);
        sums[b * in.groups + g] = sum(load<Floats>(lane_sums.data() + g * LANES));
      }
    }
    in.is_wide = limit > LIMIT_8_BITS;
    in.nibble_bytes = bytes.data(), in.nibble_steps = steps.data(), in.group_sums = sums.data();
  }
};

// R rows of the weight with B rows of x, as `tile` below.  The high bytes of x are zero if it is not wide.
template <int R, int B, bool is_wide, class Format>
inline void nibble_tile(const Format& format, const MatvecInput& in, const WeightRows& band, int64_t first, float* y,
                        int64_t rows) {
  const __m512i quarters = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0), ones = _mm512_set1_epi8(15);
  Floats total[R][B] = {};
  RowAddresses addresses(format.at(band.first, 0), format.stored(band.step * in.columns));
  const RowAddresses scales(format.scale(band.first), band.step * in.groups);
  for (int64_t c = 0; c < in.columns; c += NIBBLE_COLUMNS, addresses.advance(format.stored(NIBBLE_COLUMNS)))
    UNROLL for (int r = 0; r < R; ++r) {
      const uint8_t* from = addresses[r];
      prefetch(from);
      const __m512i both = load<__m512i>(from), lower = _mm512_and_si512(both, ones),
                    upper = _mm512_and_si512(_mm512_srli_epi16(both, 4), ones);
      const __m128i four = _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadu_si64(scales[r] + c / NIBBLE_GROUP)), 16);
      const Floats scale = Floats(_mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_castsi128_ps(four)), quarters));
      UNROLL for (int b = 0; b < B; ++b) {
        const int8_t* x = in.nibble_bytes + ((first + b) * in.columns + c) * 2;
        const __m512i zero = _mm512_setzero_si512();
        Ints products = {};
        if constexpr (is_wide)
          products = Ints(_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, lower, load<__m512i>(x)), upper,
                                              load<__m512i>(x + 64))) << 8;
        products = Ints(_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(__m512i(products), lower, load<__m512i>(x + 128)), upper,
                                            load<__m512i>(x + 192)));
        const Floats step = load<Floats>(in.nibble_steps + ((first + b) * in.groups + c / NIBBLE_GROUP) * 4);
        total[r][b] += to_floats(products) * (scale * step);
      }
    }
  for (int64_t g = 0; g < in.groups; g += LANES) {
    const __mmask16 live = in.groups - g >= LANES ? 0xffff : __mmask16((1u << (in.groups - g)) - 1);
    UNROLL for (int r = 0; r < R; ++r) {
      const __m256i bf16 = _mm256_maskz_loadu_epi16(live, format.least(band[r]) + g);
      const Floats least = Floats(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)));
      UNROLL for (int b = 0; b < B; ++b)
        total[r][b] += least * Floats(_mm512_maskz_loadu_ps(live, in.group_sums + (first + b) * in.groups + g));
    }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int b = 0; b < B; ++b) y[(first + b) * rows + band[r]] = sum(total[r][b]);
}

#endif

// -- 8 and 4 bits on ARM ----------------------------------------------------------------------------------------------

#if MONOBLOCK_NEON_DOT

// One instruction multiplies 16 weights with a byte of x each, so n = 256 high + low for x of 16 bits.  The sums of four
// groups become the lanes of one vector.
namespace neon {

// Rearrange integers as these products read them: of every 16, the high bytes come first.
inline void arrange(int16_t* integers, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    const int16x8_t first = vld1q_s16(integers + i), second = vld1q_s16(integers + i + 8);
    const int8x16_t high = vcombine_s8(vrshrn_n_s16(first, 8), vrshrn_n_s16(second, 8)),
                    low = vcombine_s8(vmovn_s16(first), vmovn_s16(second));
    int8_t* to = reinterpret_cast<int8_t*>(integers + i);
    vst1q_s8(to, high), vst1q_s8(to + 16, low);
  }
}

// Scales or least values, bfloat16, of four groups and of one.
inline Floats group_values(const uint16_t* from) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16)); }
inline float group_value(const uint16_t* from) {
  const uint32_t bits = uint32_t(*from) << 16;
  return load<float>(&bits);
}

// R rows of a weight and B rows of x, from one group on.  CHUNKS: in a group, if it is known at compile time, else 0.
template <int R, int B, bool WIDE, int CHUNKS, class Format>
struct Tile {
  static constexpr int64_t CHUNK_BYTES = Format::offset ? CHUNK / 2 : CHUNK;
  const uint8_t* weight[R];
  const int8_t* x[B];
  int64_t any_chunks;

  using Sums = Ints[R][B];

  int64_t chunks() const { return CHUNKS ? CHUNKS : any_chunks; }

  void advance(int64_t groups) {
    UNROLL for (int r = 0; r < R; ++r) weight[r] += groups * chunks() * CHUNK_BYTES;
    UNROLL for (int b = 0; b < B; ++b) x[b] += groups * chunks() * 2 * CHUNK;
  }

  // The two vectors of a chunk: bytes, or the lower and the upper halves of bytes.
  static void load_chunk(const uint8_t* from, int8x16_t (&w)[2]) {
    const uint8x16_t bytes = vld1q_u8(from);
    w[0] = vreinterpretq_s8_u8(Format::offset ? vandq_u8(bytes, vdupq_n_u8(15)) : bytes);
    w[1] = vreinterpretq_s8_u8(Format::offset ? vshrq_n_u8(bytes, 4) : vld1q_u8(from + 16));
  }

  INLINED void add_chunk(int64_t c, Sums& high, Sums& low) const {
    UNROLL for (int r = 0; r < R; ++r) {
      int8x16_t w[2];
      load_chunk(weight[r] + c * CHUNK_BYTES, w);
      UNROLL for (int b = 0; b < B; ++b)
        UNROLL for (int p = 0; p < 2; ++p) {
          const int8_t* inputs = x[b] + (2 * c + p) * 32;
          if (WIDE) high[r][b] = vdotq_s32(high[r][b], w[p], vld1q_s8(inputs));
          low[r][b] = vdotq_s32(low[r][b], w[p], vld1q_s8(inputs + 16));
        }
    }
  }

  // A group of one chunk: the high bytes first, and the low bytes on top of 256 times their sum.
  INLINED void sum_chunk(int64_t c, Sums& sums) const {
    int8x16_t w[R][2];
    UNROLL for (int r = 0; r < R; ++r) load_chunk(weight[r] + c * CHUNK_BYTES, w[r]);
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int b = 0; b < B; ++b) {
        const int8_t* inputs = x[b] + c * 64;
        int32x4_t sum = vdupq_n_s32(0);
        if (WIDE) {
          UNROLL for (int p = 0; p < 2; ++p) sum = vdotq_s32(sum, w[r][p], vld1q_s8(inputs + p * 32));
          sum = vshlq_n_s32(sum, 8);
        }
        UNROLL for (int p = 0; p < 2; ++p) sum = vdotq_s32(sum, w[r][p], vld1q_s8(inputs + p * 32 + 16));
        sums[r][b] = sum;
      }
  }

  INLINED void sum_group(int64_t g, Sums& sums) const {
    if constexpr (CHUNKS == 1) return sum_chunk(g, sums);
    Sums high = {}, low = {};
    if constexpr (CHUNKS) {
      UNROLL for (int c = 0; c < CHUNKS; ++c) add_chunk(g * CHUNKS + c, high, low);
    } else {
      for (int64_t c = g * any_chunks; c < (g + 1) * any_chunks; ++c) add_chunk(c, high, low);
    }
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int b = 0; b < B; ++b) sums[r][b] = WIDE ? (high[r][b] << 8) + low[r][b] : low[r][b];
  }

  // The sums of two groups, each in two lanes.
  INLINED void sum_two_groups(int64_t g, Sums& sums) const {
    Sums first, second;
    sum_group(g, first), sum_group(g + 1, second);
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int b = 0; b < B; ++b) sums[r][b] = vpaddq_s32(first[r][b], second[r][b]);
  }

  void prefetch_groups() const {
    UNROLL for (int r = 0; r < R; ++r)
      for (int64_t byte = 0; byte < 4 * chunks() * CHUNK_BYTES; byte += 64) prefetch(weight[r] + byte);
  }
};

// Not inlined, so that no other loop takes its registers.
template <int R, int B, bool WIDE, int CHUNKS, class Format>
[[gnu::noinline]] void multiply_groups(const Format& format, const MatvecInput& in, const WeightRows& band,
                                       int64_t first, float* y, int64_t rows) {
  using ThisTile = Tile<R, B, WIDE, CHUNKS, Format>;
  ThisTile tile;
  tile.any_chunks = in.group / CHUNK;
  UNROLL for (int r = 0; r < R; ++r)
    tile.weight[r] = reinterpret_cast<const uint8_t*>(format.weight) + band[r] * (in.columns / CHUNK) * tile.CHUNK_BYTES;
  UNROLL for (int b = 0; b < B; ++b)
    tile.x[b] = reinterpret_cast<const int8_t*>(in.int16 + (first + b) * in.columns);
  const float *step = in.steps + first * in.groups, *sum_of_group = in.group_sums + first * in.groups;
  Floats total[R][B] = {};
  float rest[R][B] = {};
  int64_t g = 0;
  for (; g + 4 <= in.groups; g += 4, tile.advance(4)) {
    typename ThisTile::Sums lower, upper;
    tile.prefetch_groups();
    tile.sum_two_groups(0, lower), tile.sum_two_groups(2, upper);
    UNROLL for (int r = 0; r < R; ++r) {
      const Floats scale = group_values(format.scale(band[r]) + g);
      UNROLL for (int b = 0; b < B; ++b) {
        const Floats sums = to_floats(vpaddq_s32(lower[r][b], upper[r][b]));
        total[r][b] += sums * (scale * load<Floats>(step + b * in.groups + g));
        if (Format::offset)
          total[r][b] += group_values(format.least(band[r]) + g) * load<Floats>(sum_of_group + b * in.groups + g);
      }
    }
  }
  for (; g < in.groups; ++g, tile.advance(1)) {
    typename ThisTile::Sums sums;
    tile.sum_group(0, sums);
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int b = 0; b < B; ++b) {
        const float scale = group_value(format.scale(band[r]) + g);
        rest[r][b] += float(vaddvq_s32(sums[r][b])) * (scale * step[b * in.groups + g]);
        if (Format::offset) rest[r][b] += group_value(format.least(band[r]) + g) * sum_of_group[b * in.groups + g];
      }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int b = 0; b < B; ++b) y[(first + b) * rows + band[r]] = sum(total[r][b]) + rest[r][b];
}

// R rows of the weight with B rows of x, as `tile` below.
template <int R, int B, class Format>
inline void multiply_tile(const Format& format, const MatvecInput& in, const WeightRows& band, int64_t first, float* y,
                          int64_t rows) {
  constexpr int usual = Format::offset ? 1 : 2;  // chunks in a group
  const auto multiply = [&]<bool WIDE>() {
    constexpr int most = Format::offset || (WIDE && B > 1) ? 2 : 4;  // rows of the weight that registers have room for
    constexpr int step = std::min(R, most);
    for (int r = 0; r < R; r += step)
      in.group == usual * CHUNK
          ? multiply_groups<step, B, WIDE, usual>(format, in, band.from(r), first, y, rows)
          : multiply_groups<step, B, WIDE, 0>(format, in, band.from(r), first, y, rows);
  };
  in.is_wide ? multiply.template operator()<true>() : multiply.template operator()<false>();
}

}  // namespace neon

#endif

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
#if MONOBLOCK_VNNI
  if constexpr (Format::offset)
    if (in.nibble_bytes)
      return in.is_wide ? nibble_tile<R, B, true>(format, in, band, first, y, rows)
                        : nibble_tile<R, B, false>(format, in, band, first, y, rows);
#elif MONOBLOCK_NEON_DOT
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
#if MONOBLOCK_VNNI
    if (has_offset && NibbleInput::supports(in)) return nibbles.fill(in, limit);
#endif
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
#if MONOBLOCK_VNNI
  NibbleInput nibbles;
#endif

  // Without products in integers: the same numbers in fp32.
  void dequantize(MatvecInput& in) {
    rounded.resize(in.batch * in.columns);
    for (int64_t i = 0; i < in.batch * in.columns; ++i) rounded[i] = int16[i] * steps[i / in.group];
    in.x = rounded.data(), in.stride = in.columns;
  }
};

}  // namespace
