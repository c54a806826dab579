// Products of quantized weights with a few rows of x on ARM: one instruction multiplies 16 weights with a byte of x each,
// so n = 256 high + low for x of 16 bits.  The sums of four groups become the lanes of one vector.
#pragma once

#include "linear/matvec_input.h"

#if MONOBLOCK_NEON_DOT

namespace {
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

// R rows of the weight with B rows of x, as `tile` in matvec.h.
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
}  // namespace

#endif
