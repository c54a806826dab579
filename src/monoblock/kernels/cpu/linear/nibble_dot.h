// Products of 4-bit weights in groups of 32 with x of 16 bits: one instruction multiplies 64 weights with one byte of x
// each, so x = step (256 high + low) with signed bytes.  128 weights are read at once; each quarter of a vector is a group.
#pragma once

#include <vector>

#include "linear/matvec_input.h"

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr bool HAS_NIBBLE_DOT = true;
#else
constexpr bool HAS_NIBBLE_DOT = false;
#endif

constexpr int64_t NIBBLE_GROUP = 32, NIBBLE_COLUMNS = 128;  // weights in a group, and in the vectors read at once

// x for these products.
struct NibbleInput {
  std::vector<int8_t> bytes;       // (batch, columns / 128, 4, 64): high bytes for the lower and upper nibbles, low bytes
  std::vector<float> steps, sums;  // (batch, columns / 128, 16), a step for each lane; (batch, groups)
  std::vector<int16_t> integers;
  std::vector<float> group_steps, lane_sums;

  static bool supports(const MatvecInput& in) {
    return HAS_NIBBLE_DOT && in.group == NIBBLE_GROUP && in.columns % NIBBLE_COLUMNS == 0;
  }

  void fill(MatvecInput& in, int limit) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
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
#endif
  }
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

// R rows of the weight with B rows of x, as `tile` in matvec.h.  The high bytes of x are zero if it is not wide.
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

#else

template <int R, int B, bool is_wide, class Format>
inline void nibble_tile(const Format&, const MatvecInput&, const WeightRows&, int64_t, float*, int64_t) {}

#endif

}  // namespace
