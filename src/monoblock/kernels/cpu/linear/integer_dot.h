// Products of quantized weights in integers: rows of x are quantized to 16 or 8 bits with one step a group, so that
//     y = sum over groups of step (s (sum of q n) + m (sum of n)),   x = step n,  |n| <= limit = 32639 or 127.
// One instruction multiplies two pairs of 16 bits and adds them, or four pairs of bytes; where only bytes are fast,
// n = 256 high + low.  Rounding x to 16 bits costs at most 1 / 65278 of the largest |x| of its group, some hundred times
// less than 8 bits cost a weight; to 8 bits it costs as much as those.
#pragma once

#include <cmath>

#include "simd.h"

namespace {

constexpr int CHUNK = 32;              // weights unpacked at a time; a group is a multiple
constexpr int64_t MAX_PRODUCTS = 512;  // that one integer adds up: 512 * 32639 * 127 < 2^31
constexpr int SUM_LANES = MONOBLOCK_NEON_DOT ? 1 : LANES;  // integers that share the sum of a group in matvec.h
// The largest integer to which x is rounded; 32639 is the largest of two signed bytes.
constexpr int LIMIT_16_BITS = 32639, LIMIT_8_BITS = 127;
constexpr float SHIFT = 12582912.0f;   // 1.5 * 2^23: adding and subtracting it rounds to the nearest integer

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
using Shorts = int16_t __attribute__((vector_size(4 * LANES)));
constexpr bool HAS_PAIR_DOT = true;  // of pairs of 16 bits
constexpr int CHUNK_SHORTS = CHUNK / (2 * LANES);  // vectors of 16-bit integers in a chunk
#else
using Shorts = Ints;
constexpr bool HAS_PAIR_DOT = false;
constexpr int CHUNK_SHORTS = 1;
#endif
constexpr bool HAS_INTEGER_DOT = HAS_PAIR_DOT || MONOBLOCK_NEON_DOT;

#if defined(__AVX512BW__)
inline Shorts load_shorts(const int8_t* from) { return Shorts(_mm512_cvtepi8_epi16(load<__m256i>(from))); }
// 16 bytes hold 32 integers of four bits, the first 16 in the lower halves.
inline void load_nibbles(const uint8_t* from, Shorts* out) {
  const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(load<__m128i>(from)));
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  out[0] = Shorts(_mm512_and_si512(_mm512_srlv_epi16(twice, shifts), _mm512_set1_epi16(15)));
}
inline Ints add_pair_products(Ints sum, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return Ints(_mm512_dpwssd_epi32(__m512i(sum), __m512i(a), __m512i(b)));
#else
  return sum + Ints(_mm512_madd_epi16(__m512i(a), __m512i(b)));
#endif
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
inline Shorts load_shorts(const int8_t* from) { return Shorts(_mm256_cvtepi8_epi16(load<__m128i>(from))); }
inline void load_nibbles(const uint8_t* from, Shorts* out) {
  const __m256i wide = _mm256_cvtepu8_epi16(load<__m128i>(from));
  out[0] = Shorts(_mm256_and_si256(wide, _mm256_set1_epi16(15)));
  out[1] = Shorts(_mm256_srli_epi16(wide, 4));
}
inline Ints add_pair_products(Ints sum, Shorts a, Shorts b) {
  return sum + Ints(_mm256_madd_epi16(__m256i(a), __m256i(b)));
}
#else
inline Shorts load_shorts(const int8_t*) { return Shorts{}; }
inline void load_nibbles(const uint8_t*, Shorts*) {}
inline Ints add_pair_products(Ints sum, Shorts, Shorts) { return sum; }
#endif

// max |x|; NaN if any x is infinite or NaN.
inline float max_abs(const float* x, int64_t count) {
  Floats largest = {}, nonfinite = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats v = load<Floats>(x + i), size = v < 0.0f ? -v : v;
    largest = size > largest ? size : largest, nonfinite += v - v;
  }
  return max_lane(largest) + sum(nonfinite);
}

// Quantize a row of x to integers of at most `limit`, with one step a group.  `sums` (groups, LANES) are those of the
// rounded x, lane by lane; they may be null.
inline void quantize_row(const float* x, int64_t groups, int64_t group, int16_t* to, float* steps, int limit,
                         float* sums = nullptr) {
  const float finest = std::min(float(limit), LIMIT_16_BITS * (float(MAX_PRODUCTS * SUM_LANES) / group));
  using Narrow = int16_t __attribute__((vector_size(2 * LANES)));
  for (int64_t g = 0; g < groups; ++g, x += group, to += group) {
    const float largest = max_abs(x, group);
    steps[g] = largest / finest;
    const float scale = largest > 1e-30f ? finest / largest : 0.0f;
    Ints total = {};
    for (int64_t i = 0; i < group; i += LANES) {
      const Ints n = __builtin_convertvector((load<Floats>(x + i) * scale + SHIFT) - SHIFT, Ints);
      const Narrow narrow = __builtin_convertvector(n, Narrow);
      std::memcpy(to + i, &narrow, sizeof narrow), total += n;
    }
    if (sums) store(sums + g * LANES, to_floats(total) * steps[g]);
  }
}

}  // namespace
