// Small whole numbers are multiplied as such: rows of x as 16-bit numbers, a step a group, so that
//     y = sum over groups of s step (sum of q n) + m (sum of x),   x = step n,  |n| <= 32767.
// Two products and their sum are one instruction.  What it costs is the rounding of x by at most 1 / 65534 of the
// largest number of its group: some hundred times less than what 8 bits cost a weight.
#pragma once

#include <cmath>

#include "vectors.h"

namespace {

constexpr int CHUNK = 32;  // weights unpacked at a time; groups are whole chunks
constexpr int64_t ADDED = 512;  // products that a lane adds up; 512 * 32767 * 127 < 2^31

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
using Shorts = int16_t __attribute__((vector_size(4 * LANES)));
constexpr bool INTEGERS = true;
constexpr int SHORTS = CHUNK / (2 * LANES);  // vectors in a chunk
#else
using Shorts = Words;
constexpr bool INTEGERS = false;
constexpr int SHORTS = 1;
#endif

#if defined(__AVX512BW__)
inline Shorts shorts(const int8_t* from) { return Shorts(_mm512_cvtepi8_epi16(load<__m256i>(from))); }
// 16 bytes hold 32 numbers of four bits, the first 16 in the lower halves.
inline void nibbles(const uint8_t* from, Shorts* out) {
  const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(load<__m128i>(from)));
  const __m512i by = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  out[0] = Shorts(_mm512_and_si512(_mm512_srlv_epi16(twice, by), _mm512_set1_epi16(15)));
}
inline Words pairs(Words sum, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return Words(_mm512_dpwssd_epi32(__m512i(sum), __m512i(a), __m512i(b)));
#else
  return sum + Words(_mm512_madd_epi16(__m512i(a), __m512i(b)));
#endif
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
inline Shorts shorts(const int8_t* from) { return Shorts(_mm256_cvtepi8_epi16(load<__m128i>(from))); }
inline void nibbles(const uint8_t* from, Shorts* out) {
  const __m256i wide = _mm256_cvtepu8_epi16(load<__m128i>(from));
  out[0] = Shorts(_mm256_and_si256(wide, _mm256_set1_epi16(15)));
  out[1] = Shorts(_mm256_srli_epi16(wide, 4));
}
inline Words pairs(Words sum, Shorts a, Shorts b) { return sum + Words(_mm256_madd_epi16(__m256i(a), __m256i(b))); }
#else
inline Shorts shorts(const int8_t*) { return Shorts{}; }
inline void nibbles(const uint8_t*, Shorts*) {}
inline Words pairs(Words sum, Shorts, Shorts) { return sum; }
#endif

// The largest size of some numbers; none where one of them is no finite number.
inline float largest_size(const float* x, int64_t count) {
  Floats most = {}, odd = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats v = load<Floats>(x + i), size = v < 0.0f ? -v : v;
    most = size > most ? size : most, odd += v - v;
  }
  float found = 0;
  for (int i = 0; i < LANES; ++i) found = std::max(found, most[i]);
  return found + sum(odd);
}

// A row of x as whole numbers, and their steps, one a group.
inline void rounded(const float* x, int64_t groups, int64_t group, int16_t* to, float* steps) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number
  const float finest = 32767.0f * std::min(1.0f, float(ADDED * LANES) / group);
  using Narrow = int16_t __attribute__((vector_size(2 * LANES)));
  for (int64_t g = 0; g < groups; ++g, x += group, to += group) {
    const float most = largest_size(x, group);
    steps[g] = most / finest;
    const float by = most > 1e-30f ? finest / most : 0.0f;
    for (int64_t i = 0; i < group; i += LANES) {
      const Floats n = (load<Floats>(x + i) * by + shift) - shift;
      const Narrow narrow = __builtin_convertvector(__builtin_convertvector(n, Words), Narrow);
      std::memcpy(to + i, &narrow, sizeof narrow);
    }
  }
}

}  // namespace
