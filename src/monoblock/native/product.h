// y = x W' + bias for a few rows x (one token of each sequence), which is bound by how fast the weights can be read.
//
// A weight is stored by rows, in groups along the row.  In one group, with its scale s and its least value m:
//     dense   w           4 bytes, or the upper 2 of them (bfloat16)
//     int8    s q         one byte each
//     int4    m + s q     two in a byte: of 32 weights the first 16 are the lower halves of 16 bytes
// so that  y = sum over groups of s (sum of q x) + m (sum of x), and q is widened in registers and never written.
// Vectors are those of the compiler (GCC, Clang): one source for AVX-512, AVX2 and NEON, chosen by its target flags.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8;  // numbers in a vector; sums that run side by side
#else
constexpr int LANES = 8, ROWS = 4;
#endif
constexpr int CHUNK = 32;           // weights unpacked at a time; groups are whole chunks
constexpr int PARTS = CHUNK / LANES;  // vectors in a chunk
constexpr int64_t GRAIN = 1 << 15;  // weights worth a thread
constexpr int AHEAD = 8192;         // bytes fetched in advance

using Floats = float __attribute__((vector_size(4 * LANES)));
using Words = int32_t __attribute__((vector_size(4 * LANES)));

// Rows are short and many, so the processor loses track of them: it is told what comes `ahead` bytes later.
template <class Number>
inline void prefetch(const Number* from, int ahead = AHEAD) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead);
}

template <class Vector, class Number>
inline Vector load(const Number* from) {
  Vector out;
  std::memcpy(&out, from, sizeof out);  // no alignment is asked for
  return out;
}

// -- LANES small integers as 32-bit words: the one thing compilers do not find by themselves -------------------------

#if defined(__AVX512F__)
inline Words words(const int8_t* from) { return Words(_mm512_cvtepi8_epi32(load<__m128i>(from))); }
inline Words words(const uint8_t* from) { return Words(_mm512_cvtepu8_epi32(load<__m128i>(from))); }
inline Words words(const uint16_t* from) { return Words(_mm512_cvtepu16_epi32(load<__m256i>(from))); }
#elif defined(__AVX2__)
inline Words words(const int8_t* from) { return Words(_mm256_cvtepi8_epi32(_mm_loadu_si64(from))); }
inline Words words(const uint8_t* from) { return Words(_mm256_cvtepu8_epi32(_mm_loadu_si64(from))); }
inline Words words(const uint16_t* from) { return Words(_mm256_cvtepu16_epi32(load<__m128i>(from))); }
#elif defined(__ARM_NEON)
inline Words joined(int32x4_t low, int32x4_t high) {
  Words out;
  std::memcpy(&out, &low, 16);
  std::memcpy(reinterpret_cast<char*>(&out) + 16, &high, 16);
  return out;
}
inline Words words(const int8_t* from) {
  int16x8_t wide = vmovl_s8(vld1_s8(from));
  return joined(vmovl_s16(vget_low_s16(wide)), vmovl_high_s16(wide));
}
inline Words words(const uint16_t* from) {
  uint16x8_t wide = vld1q_u16(from);
  return joined(vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide))), vreinterpretq_s32_u32(vmovl_high_u16(wide)));
}
inline Words words(const uint8_t* from) {
  uint16x8_t wide = vmovl_u8(vld1_u8(from));
  return joined(vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide))), vreinterpretq_s32_u32(vmovl_high_u16(wide)));
}
#else
template <class Number>
inline Words words(const Number* from) {
  Words out;
  for (int i = 0; i < LANES; ++i) out[i] = from[i];
  return out;
}
#endif

inline Floats floats(Words given) { return __builtin_convertvector(given, Floats); }

// The lowest four bits of each word.
inline Floats lower(Words given) {
#if defined(__AVX512F__)
  const Floats numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Floats(_mm512_permutexvar_ps(__m512i(given), __m512(numbers)));  // looks at no other bits
#else
  return floats(given & 15);
#endif
}

// bfloat16 to fp32: the upper half of its bits.
inline void widen(const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    prefetch(from + i, AHEAD / 4);
    Words bits = words(from + i) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
  for (; i < count; ++i) {
    uint32_t bits = uint32_t(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

inline float sum(Floats v) {
  using Eight = float __attribute__((vector_size(32)));
  using Four = float __attribute__((vector_size(16)));
#if defined(__AVX512F__)
  Eight e = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
            __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  Eight e = v;
#endif
  Four f = __builtin_shufflevector(e, e, 0, 1, 2, 3) + __builtin_shufflevector(e, e, 4, 5, 6, 7);
  return (f[0] + f[1]) + (f[2] + f[3]);
}

// -- formats: unpack gives a chunk as floats; scale and least are those of a row, one a group ----------

struct Single {
  const float* weight;
  int64_t columns;
  static constexpr bool scaled = false, offset = false;
  void unpack(int64_t row, int64_t column, Floats* out) const {
    const float* from = weight + row * columns + column;
    prefetch(from);
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
  const uint16_t* scale(int64_t row) const { return scales + row * groups; }
  const uint16_t* least(int64_t row) const { return leasts + row * groups; }
};

// -- the product ---------------------------------------------------------------------------------------------------

struct Input {
  const float* x;     // (batch, stride), of which columns are read
  const float* sums;  // (batch, groups, LANES): a group added up lane by lane, for formats with an offset
  int64_t batch, columns, group, groups, stride;
};

// R rows of the weight with B rows of x: what is unpacked once is used B times, and R * B sums run side by side.
// Scales and least values (rows, groups) are in fp32 here: a multiplication reads one of them for all its lanes.
template <int R, int B, class Format>
inline void tile(const Format& format, const Input& in, const float* scales, const float* leasts, int64_t row,
                 int64_t first, float* y, int64_t rows) {
  Floats total[R][B] = {};
  for (int64_t g = 0; g < in.groups; ++g) {
    Floats part[R][B] = {};
    for (int64_t c = g * in.group; c < (g + 1) * in.group; c += CHUNK) {
      UNROLL for (int r = 0; r < R; ++r) {
        Floats w[PARTS];
        format.unpack(row + r, c, w);
        UNROLL for (int p = 0; p < PARTS; ++p)
          UNROLL for (int b = 0; b < B; ++b)
            part[r][b] += w[p] * load<Floats>(in.x + (first + b) * in.stride + c + p * LANES);
      }
    }
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int b = 0; b < B; ++b) {
        total[r][b] += Format::scaled ? part[r][b] * scales[r * in.groups + g] : part[r][b];
        if (Format::offset)
          total[r][b] += leasts[r * in.groups + g] * load<Floats>(in.sums + ((first + b) * in.groups + g) * LANES);
      }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int b = 0; b < B; ++b) y[(first + b) * rows + row + r] = sum(total[r][b]);
}

// `count` rows of the weight with B rows of x, as many sums at a time as registers hold.
template <int B, class Format>
inline void tiles(const Format& format, const Input& in, const float* scales, const float* leasts, int64_t row,
                  int count, int64_t first, float* y, int64_t rows) {
  constexpr int R = ROWS / B;
  int r = 0;
  for (; r + R <= count; r += R)
    tile<R, B>(format, in, scales + r * in.groups, leasts + r * in.groups, row + r, first, y, rows);
  for (; r < count; ++r)
    tile<1, B>(format, in, scales + r * in.groups, leasts + r * in.groups, row + r, first, y, rows);
}

// A band of rows of the weight with all rows of x.
template <class Format>
void band(const Format& format, const Input& in, int64_t row, int count, const float* bias, float* y, int64_t rows,
          float* scales, float* leasts) {
  if (Format::scaled) widen(format.scale(row), count * in.groups, scales);
  if (Format::offset) widen(format.least(row), count * in.groups, leasts);
  int64_t b = 0;
  for (; b + 4 <= in.batch; b += 4) tiles<4>(format, in, scales, leasts, row, count, b, y, rows);
  for (; b + 2 <= in.batch; b += 2) tiles<2>(format, in, scales, leasts, row, count, b, y, rows);
  for (; b < in.batch; ++b) tiles<1>(format, in, scales, leasts, row, count, b, y, rows);
  if (bias)
    for (b = 0; b < in.batch; ++b)
      for (int r = 0; r < count; ++r) y[b * rows + row + r] += bias[row + r];
}

}  // namespace
