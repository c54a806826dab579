// SIMD vectors of the compiler (GCC, Clang): one source for AVX-512, AVX2 and NEON, chosen by the target flags.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define MONOBLOCK_NEON_DOT 1  // one instruction multiplies 16 pairs of bytes
#else
#define MONOBLOCK_NEON_DOT 0
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MONOBLOCK_VNNI 1  // one instruction multiplies 64 pairs of bytes, unsigned and signed
#else
#define MONOBLOCK_VNNI 0
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define UNROLL _Pragma("GCC unroll 16")
#define INLINED [[gnu::always_inline]] inline  // where a call would put sums in registers into memory

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;  // floats in a vector
#elif defined(__ARM_NEON)
constexpr int LANES = 4;
#else
constexpr int LANES = 8;
#endif
constexpr int64_t WEIGHTS_PER_THREAD = 1 << 15;  // fewer are not worth another thread
constexpr int PREFETCH_BYTES = 2048;             // how far ahead weights are fetched

using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));

// Rows are short and many, so hardware prefetchers lose track of them; fetch what is read `ahead` bytes later.
template <class Number>
inline void prefetch(const Number* from, int ahead = PREFETCH_BYTES) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead);
}

template <class Vector, class Number>
inline Vector load(const Number* from) {
  Vector out;
  std::memcpy(&out, from, sizeof out);  // unaligned
  return out;
}

// -- LANES small integers as 32-bit ones, which compilers do not vectorize by themselves -----------------------------

#if defined(__AVX512F__)
inline Ints load_ints(const int8_t* from) { return Ints(_mm512_cvtepi8_epi32(load<__m128i>(from))); }
inline Ints load_ints(const uint8_t* from) { return Ints(_mm512_cvtepu8_epi32(load<__m128i>(from))); }
inline Ints load_ints(const uint16_t* from) { return Ints(_mm512_cvtepu16_epi32(load<__m256i>(from))); }
#elif defined(__AVX2__)
inline Ints load_ints(const int8_t* from) { return Ints(_mm256_cvtepi8_epi32(_mm_loadu_si64(from))); }
inline Ints load_ints(const uint8_t* from) { return Ints(_mm256_cvtepu8_epi32(_mm_loadu_si64(from))); }
inline Ints load_ints(const uint16_t* from) { return Ints(_mm256_cvtepu16_epi32(load<__m128i>(from))); }
#elif defined(__ARM_NEON)
inline Ints load_ints(const uint16_t* from) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(from))); }
inline Ints load_ints(const int8_t* from) {
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(load<uint32_t>(from))))));
}
inline Ints load_ints(const uint8_t* from) {
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(load<uint32_t>(from)))))));
}
#else
template <class Number>
inline Ints load_ints(const Number* from) {
  Ints out;
  for (int i = 0; i < LANES; ++i) out[i] = from[i];
  return out;
}
#endif

inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// The lowest four bits of each integer.
inline Floats low_nibbles(Ints v) {
#if defined(__AVX512F__)
  const Floats numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Floats(_mm512_permutexvar_ps(__m512i(v), __m512(numbers)));  // ignores all other bits
#else
  return to_floats(v & 15);
#endif
}

// bfloat16 to fp32: the upper half of its bits.
inline void bf16_to_fp32(const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    prefetch(from + i);
    Ints bits = load_ints(from + i) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if (i < count) {  // rows of 12 or 24 groups are common
    const __mmask16 live = __mmask16((1u << (count - i)) - 1);
    prefetch(from + i);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live, from + i)), 16);
    _mm512_mask_storeu_epi32(to + i, live, bits);
  }
#else
  for (; i < count; ++i) {
    uint32_t bits = uint32_t(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
#endif
}

inline Floats all(float value) { return Floats{} + value; }

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

// All lanes joined by a function of two.
template <class Join>
inline float join_lanes(Floats v, Join join) {
#if defined(__AVX512F__)
  const auto e = join(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                      __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#else
  const Floats e = v;
#endif
#if defined(__ARM_NEON)
  const Floats f = e;
#else
  const auto f = join(__builtin_shufflevector(e, e, 0, 1, 2, 3), __builtin_shufflevector(e, e, 4, 5, 6, 7));
#endif
  return join(join(f[0], f[1]), join(f[2], f[3]));
}

inline float sum(Floats v) {
  return join_lanes(v, [](auto a, auto b) { return a + b; });
}
inline float max_lane(Floats v) {
  return join_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

// -- lanes ------------------------------------------------------------------------------------------------------------

// Exchange lanes of two vectors that are S apart: one step of transposing a square of LANES by LANES numbers.
template <int S, size_t... I>
inline void exchange(Floats& low, Floats& high, std::index_sequence<I...>) {
  const Floats a = low, b = high;
  low = __builtin_shufflevector(a, b, (I & S ? LANES + I - S : I)...);
  high = __builtin_shufflevector(a, b, (I & S ? LANES + I : I + S)...);
}

template <int S>
inline void exchange_all(Floats* v) {
  UNROLL for (int i = 0; i < LANES; ++i)
    if (!(i & S)) exchange<S>(v[i], v[i + S], std::make_index_sequence<LANES>());
}

inline void transpose_square(Floats* v) {
  exchange_all<1>(v), exchange_all<2>(v);
  if constexpr (LANES >= 8) exchange_all<4>(v);
  if constexpr (LANES == 16) exchange_all<8>(v);
}

// The sums of LANES vectors, each in its lane.
template <int S>
inline void fold(Floats* v) {
  UNROLL for (int i = 0; i < LANES; i += 2 * S) {
    exchange<S>(v[i], v[i + S], std::make_index_sequence<LANES>());
    v[i] += v[i + S];
  }
}

inline Floats sum_each(Floats* v) {
  fold<1>(v), fold<2>(v);
  if constexpr (LANES >= 8) fold<4>(v);
  if constexpr (LANES == 16) fold<8>(v);
  return v[0];
}

// -- products of integers -----------------------------------------------------------------------------------------------
//
// Products of quantized weights in integers: rows of x are quantized to 16 or 8 bits with one step a group, so that
//     y = sum over groups of step (s (sum of q n) + m (sum of n)),   x = step n,  |n| <= limit = 32639 or 127.
// One instruction multiplies two pairs of 16 bits and adds them, or four pairs of bytes; where only bytes are fast,
// n = 256 high + low.  Rounding x to 16 bits costs at most 1 / 65278 of the largest |x| of its group, some hundred times
// less than 8 bits cost a weight; to 8 bits it costs as much as those.

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
