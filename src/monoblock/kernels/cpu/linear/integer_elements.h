// What one instruction multiplies in integer_panels.h: a few inputs of LANES rows of x, one row in each 32-bit lane,
// with the same inputs of one row of a weight.
#pragma once

#include "linear/integer_dot.h"

namespace {
namespace integer_panels {

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || MONOBLOCK_NEON_DOT
constexpr bool HAS_BYTE_PRODUCTS = true;
#else
constexpr bool HAS_BYTE_PRODUCTS = false;
#endif

#if MONOBLOCK_NEON_DOT

// Bytes, all signed: weights q as they are.
struct ByteElements {
  using Weight = int8_t;
  static constexpr int INPUTS = 4, PARTS = 1;
  static constexpr bool IS_UNSIGNED = false;

  template <class Format>
  static void unpack(const Format& format, int64_t row, int64_t column, Weight* to) {
    format.unpack(row, column, to);
  }
};

// Numbers of 16 bits in two bytes, n = 256 high + low.
struct ShortElements : ByteElements {
  static constexpr int PARTS = 2;
};

#else

// Numbers of 16 bits: weights q as they are.
struct ShortElements {
  using Weight = int16_t;
  static constexpr int INPUTS = 2, PARTS = 1;
  static constexpr bool IS_UNSIGNED = false;

  static Ints add_products(Ints sum, Ints weight, Ints x) { return add_pair_products(sum, Shorts(weight), Shorts(x)); }

  template <class Format>
  static void unpack(const Format& format, int64_t row, int64_t column, Weight* to) {
    format.unpack(row, column, reinterpret_cast<Shorts*>(to));
  }
};

// Bytes: x signed, weights unsigned, so that they hold q + Format::byte_zero.
struct ByteElements {
  using Weight = uint8_t;
  static constexpr int INPUTS = 4, PARTS = 1;
  static constexpr bool IS_UNSIGNED = true;

  static Ints add_products(Ints sum, Ints weight, Ints x) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(weight), __m512i(x)));
#else
    return sum;  // never called, see HAS_BYTE_PRODUCTS
#endif
  }

  template <class Format>
  static void unpack(const Format& format, int64_t row, int64_t column, Weight* to) {
    format.unpack(row, column, to);
  }
};

#endif

// A vector from memory, whatever register it may be in as well: copies of registers would take the ports of products.
inline Ints load_again(const Ints& from) {
#if defined(__AVX512F__)
  Ints to;
  asm("vmovdqa32 %1, %0" : "=v"(to) : "m"(from));
  return to;
#else
  return from;
#endif
}

// The integers of Elements::INPUTS inputs side by side in each lane.
template <class Elements>
inline Ints join(const Ints (&n)[Elements::INPUTS]) {
  constexpr int bits = 32 / Elements::INPUTS;
  Ints joined = {};
  UNROLL for (int i = 0; i < Elements::INPUTS; ++i) joined |= (n[i] & ((1 << bits) - 1)) << (i * bits);
  return joined;
}

// How one group of LANES rows of x is rounded, as quantize_row does it: x (inputs, stride) of which `live` are there.
struct GroupRounding {
  Floats scale, step;

  GroupRounding(const float* x, int64_t stride, int64_t live, int limit) {
    Floats largest = {}, nonfinite = {};
    for (int64_t i = 0; i < live; ++i) {
      const Floats v = load<Floats>(x + i * stride), size = v < 0.0f ? -v : v;
      largest = size > largest ? size : largest, nonfinite += v - v;
    }
    scale = largest > 1e-30f ? float(limit) / largest : Floats{};
    step = largest / float(limit) + nonfinite;
  }

  Floats round(const float* x) const { return (load<Floats>(x) * scale + SHIFT) - SHIFT; }
};

// One group of LANES rows of x (live, stride), rounded to the integers times their step.
inline void round_group(const float* x, int64_t stride, int64_t live, int limit, float* to) {
  const GroupRounding rounding(x, stride, live, limit);
  for (int64_t i = 0; i < live; ++i) store(to + i * stride, rounding.round(x + i * stride) * rounding.step);
}

}  // namespace integer_panels
}  // namespace
