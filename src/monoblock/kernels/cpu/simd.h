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

#include <algorithm>
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

inline float sum(Floats v) {
#if defined(__AVX512F__)
  const auto e = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const Floats e = v;
#endif
#if defined(__ARM_NEON)
  const Floats f = e;
#else
  const auto f = __builtin_shufflevector(e, e, 0, 1, 2, 3) + __builtin_shufflevector(e, e, 4, 5, 6, 7);
#endif
  return (f[0] + f[1]) + (f[2] + f[3]);
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

// The largest lane of a vector.
inline float max_lane(Floats v) {
#if defined(__AVX512F__)
  const auto first = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
             second = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), e = first > second ? first : second;
#else
  const Floats e = v;
#endif
#if defined(__ARM_NEON)
  const Floats f = e;
#else
  const auto low = __builtin_shufflevector(e, e, 0, 1, 2, 3), high = __builtin_shufflevector(e, e, 4, 5, 6, 7),
             f = low > high ? low : high;
#endif
  return std::max(std::max(f[0], f[1]), std::max(f[2], f[3]));
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

}  // namespace
