// Functions of vectors: exponentials, activations, norms, rotary positions, and loops over arrays of any length.
#pragma once

#include <cmath>
#include <initializer_list>

#include "simd.h"

namespace {

// e^x = 2^n e^r, |r| <= ln 2 / 2, to the last bit or two; clamped to what fp32 holds.
inline Floats exponential(Floats x) {
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  Floats n = (x * 1.44269504f + SHIFT) - SHIFT;
  Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = all(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

// e^x for the weights of a softmax: zero, not a small number, where fp32 holds none.  NaN stays NaN.
inline Floats exponential_or_zero(Floats x) { return x < -87.0f ? Floats{} : exponential(x); }

// Vectors that loops compute at a time: each is a long chain of operations that wait for each other.
constexpr int PARALLEL_VECTORS = 4;

// The sum of e^(x - top) over `count` vectors.
inline Floats sum_exponentials(const float* x, int64_t count, Floats top) {
  Floats sums[2] = {};
  int64_t n = 0;
  for (; n + PARALLEL_VECTORS <= count; n += PARALLEL_VECTORS) {
    Floats powers[PARALLEL_VECTORS];
    UNROLL for (int p = 0; p < PARALLEL_VECTORS; ++p) powers[p] = load<Floats>(x + (n + p) * LANES) - top;
    UNROLL for (int p = 0; p < PARALLEL_VECTORS; ++p) powers[p] = exponential(powers[p]);
    UNROLL for (int p = 0; p < PARALLEL_VECTORS; ++p) sums[p % 2] += powers[p];
  }
  for (; n < count; ++n) sums[n % 2] += exponential(load<Floats>(x + n * LANES) - top);
  return sums[0] + sums[1];
}

inline Floats logistic(Floats x) { return 1.0f / (1.0f + exponential(-x)); }
inline Floats tanh_of(Floats x) { return 2.0f * logistic(2.0f * x) - 1.0f; }

// The error function (Abramowitz and Stegun 1964, 7.1.26), to 1.5e-7.
inline Floats erf_of(Floats x) {
  Floats size = x < 0.0f ? -x : x;
  Floats t = 1.0f / (1.0f + 0.3275911f * size);
  Floats p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  Floats y = 1.0f - p * exponential(-size * size);
  return x < 0.0f ? -y : y;
}

enum Activation { RELU, RELU2, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH, IDENTITY };

// In the order of Activation.
constexpr std::initializer_list<const char*> ACTIVATION_NAMES = {"relu", "relu2",   "gelu", "gelu_tanh", "quick_gelu",
                                                                 "silu", "sigmoid", "tanh", "identity"};

inline Floats activate(Floats x, int64_t kind) {
  switch (kind) {
    case RELU: return x < 0.0f ? Floats{} : x;  // NaN stays NaN
    case RELU2: return x < 0.0f ? Floats{} : x * x;
    case GELU: return 0.5f * x * (1.0f + erf_of(x * 0.70710678f));
    case GELU_TANH: return x * logistic(1.59576912f * (x + 0.044715f * x * x * x));
    case QUICK_GELU: return x * logistic(1.702f * x);
    case SILU: return x * logistic(x);
    case SIGMOID: return logistic(x);
    case TANH: return tanh_of(x);
    default: return x;
  }
}

// x[i] = f(x[i], i, live) for i below count, vector by vector, of which the first `live` lanes are elements.
template <class Function>
inline void transform(float* x, int64_t count, Function f) {
  int64_t i = 0;
  for (; i + PARALLEL_VECTORS * LANES <= count; i += PARALLEL_VECTORS * LANES) {
    Floats vectors[PARALLEL_VECTORS];
    std::memcpy(vectors, x + i, sizeof vectors);
    UNROLL for (int n = 0; n < PARALLEL_VECTORS; ++n) vectors[n] = f(vectors[n], i + n * LANES, LANES);
    std::memcpy(x + i, vectors, sizeof vectors);
  }
  Floats v;
  for (; i + LANES <= count; i += LANES) {
    v = f(load<Floats>(x + i), i, LANES);
    std::memcpy(x + i, &v, sizeof v);
  }
  if (i == count) return;
  v = Floats{};
  std::memcpy(&v, x + i, 4 * (count - i));
  v = f(v, i, int(count - i));
  std::memcpy(x + i, &v, 4 * (count - i));
}

// The first `count` lanes from memory, zeros in the others.
inline Floats load_lanes(const float* from, int count) {
  if (count == LANES) return load<Floats>(from);
  Floats v = {};
  std::memcpy(&v, from, 4 * count);
  return v;
}

inline float dot(const float* a, const float* b, int64_t count) {
  Floats even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    even += load<Floats>(a + i) * load<Floats>(b + i);
    odd += load<Floats>(a + i + LANES) * load<Floats>(b + i + LANES);
  }
  for (; i < count; i += LANES) {
    int rest = int(std::min<int64_t>(LANES, count - i));
    even += load_lanes(a + i, rest) * load_lanes(b + i, rest);
  }
  return sum(even + odd);
}

// -- norms and rotary positions of one vector -------------------------------------------------------------------------

struct Norm {
  int64_t kind = 0;     // 0: none, 1: LayerNorm, 2: RMSNorm
  bool offset = false;  // the scale is 1 + weight
  float eps = 0;
  const float *weight = nullptr, *bias = nullptr;
};

// Norm a vector in place; `head` chooses the weights where each head has its own.
inline void apply_norm(const Norm& norm, float* x, int64_t count, int64_t head = 0) {
  if (!norm.kind) return;
  Floats total = {};
  if (norm.kind == 1) {
    transform(x, count, [&](Floats v, int64_t, int) {
      total += v;
      return v;
    });
    const float mean = sum(total) / count;
    total = Floats{};
    transform(x, count, [&](Floats v, int64_t, int live) {
      v -= mean;
      if (live < LANES)
        for (int i = live; i < LANES; ++i) v[i] = 0;
      total += v * v;
      return v;
    });
  } else {
    transform(x, count, [&](Floats v, int64_t, int) {
      total += v * v;
      return v;
    });
  }
  const float scale = 1.0f / std::sqrt(sum(total) / count + norm.eps);
  const float* weight = norm.weight ? norm.weight + head * count : nullptr;
  const float* bias = norm.bias ? norm.bias + head * count : nullptr;
  transform(x, count, [&](Floats v, int64_t i, int live) {
    v *= scale;
    if (weight) v *= load_lanes(weight + i, live) + (norm.offset ? 1.0f : 0.0f);
    if (bias) v += load_lanes(bias + i, live);
    return v;
  });
}

// Rotate the first pairs of a head by the angles of its position (Su et al. 2021).
inline void apply_rotary(float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved) {
  for (int64_t i = 0; i < pairs; ++i) {
    float &a = x[interleaved ? 2 * i : i], &b = x[interleaved ? 2 * i + 1 : i + pairs];
    const float turned_a = a * cos[i] - b * sin[i], turned_b = b * cos[i] + a * sin[i];
    a = turned_a, b = turned_b;
  }
}

}  // namespace
