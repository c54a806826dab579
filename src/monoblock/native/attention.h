// The small things between the products of one step: norms, activations, positions, and one head looking at its keys.
#pragma once

#include <cmath>
#include <limits>

#include "product.h"

namespace {

// -- functions of vectors ---------------------------------------------------------------------------------------------

inline Floats all(float value) { return Floats{} + value; }

// e^x = 2^n e^r, |r| <= ln 2 / 2, to the last bit or two; beyond what fp32 holds the nearest it does.
inline Floats exponential(Floats x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  Floats n = (x * 1.44269504f + shift) - shift;
  Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = all(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Words power = (__builtin_convertvector(n, Words) + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

inline Floats logistic(Floats x) { return 1.0f / (1.0f + exponential(-x)); }
inline Floats tangent(Floats x) { return 2.0f * logistic(2.0f * x) - 1.0f; }

// The error function (Abramowitz and Stegun 1964, 7.1.26), to 1.5e-7.
inline Floats error(Floats x) {
  Floats size = x < 0.0f ? -x : x;
  Floats t = 1.0f / (1.0f + 0.3275911f * size);
  Floats p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  Floats y = 1.0f - p * exponential(-size * size);
  return x < 0.0f ? -y : y;
}

enum Activation { RELU, RELU2, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH, IDENTITY };

inline Floats activated(Floats x, int64_t kind) {
  switch (kind) {
    case RELU: return x > 0.0f ? x : Floats{};
    case RELU2: return x > 0.0f ? x * x : Floats{};
    case GELU: return 0.5f * x * (1.0f + error(x * 0.70710678f));
    case GELU_TANH: return x * logistic(1.59576912f * (x + 0.044715f * x * x * x));
    case QUICK_GELU: return x * logistic(1.702f * x);
    case SILU: return x * logistic(x);
    case SIGMOID: return logistic(x);
    case TANH: return tangent(x);
    default: return x;
  }
}

// x[i] = f(x[i], i) for i below count, a vector at a time.
template <class Function>
inline void each(float* x, int64_t count, Function f) {
  int64_t i = 0;
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

inline Floats part(const float* from, int count) {
  if (count == LANES) return load<Floats>(from);
  Floats v = {};
  std::memcpy(&v, from, 4 * count);
  return v;
}

inline float dot(const float* a, const float* b, int64_t count) {
  Floats one = {}, two = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    one += load<Floats>(a + i) * load<Floats>(b + i);
    two += load<Floats>(a + i + LANES) * load<Floats>(b + i + LANES);
  }
  for (; i < count; i += LANES) {
    int rest = int(std::min<int64_t>(LANES, count - i));
    one += part(a + i, rest) * part(b + i, rest);
  }
  return sum(one + two);
}

// -- norms and positions ----------------------------------------------------------------------------------------------

struct Norm {
  int64_t kind = 0;  // 0: none, 1: layer, 2: rms
  bool offset = false;  // the scale is 1 + weight
  float eps = 0;
  const float *weight = nullptr, *bias = nullptr;
};

inline void normed(const Norm& norm, float* x, int64_t count, int64_t head = 0) {
  if (!norm.kind) return;
  Floats total = {};
  if (norm.kind == 1) {
    each(x, count, [&](Floats v, int64_t, int) { total += v; return v; });
    const float mean = sum(total) / count;
    total = Floats{};
    each(x, count, [&](Floats v, int64_t, int live) {
      v -= mean;
      if (live < LANES) for (int i = live; i < LANES; ++i) v[i] = 0;
      total += v * v;
      return v;
    });
  } else {
    each(x, count, [&](Floats v, int64_t, int) { total += v * v; return v; });
  }
  const float by = 1.0f / std::sqrt(sum(total) / count + norm.eps);
  const float *weight = norm.weight ? norm.weight + head * count : nullptr;
  const float *bias = norm.bias ? norm.bias + head * count : nullptr;
  each(x, count, [&](Floats v, int64_t i, int live) {
    v *= by;
    if (weight) v *= part(weight + i, live) + (norm.offset ? 1.0f : 0.0f);
    if (bias) v += part(bias + i, live);
    return v;
  });
}

// Pairs of a head turned by the angles of its place (Su et al. 2021); what is beyond the pairs stays as it is.
inline void turned(float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved) {
  for (int64_t i = 0; i < pairs; ++i) {
    float &one = x[interleaved ? 2 * i : i], &two = x[interleaved ? 2 * i + 1 : i + pairs];
    float first = one * cos[i] - two * sin[i], second = two * cos[i] + one * sin[i];
    one = first, two = second;
  }
}

// -- one head ---------------------------------------------------------------------------------------------------------

// What one head looks at: the tokens first … first + count - 1, token i in column i % ring; then perhaps itself.
struct Sight {
  const float *keys, *values;
  int64_t key_step, value_step, key_size, value_size;  // steps from column to column
  int64_t first, count, ring;
  const float *own_key = nullptr, *own_value = nullptr;  // of the newest token
  const float* bias = nullptr;                           // on the scores, by distance
  const bool* seen = nullptr;                            // columns that are no padding
  const float* sink = nullptr;                           // a score that takes weight and gives nothing
  float scale = 1, softcap = 0;
};

// softmax(q k' scale + bias) v (Vaswani et al. 2017, eq. 1); zeros where nothing is seen.  `scores` has room for all.
inline void look(const Sight& s, const float* q, float* scores, float* out) {
  int64_t column = s.count ? s.first % s.ring : 0, all_of = s.count + (s.own_key ? 1 : 0);
  const int64_t begin = column;
  for (int64_t j = 0; j < s.count; ++j) {
    scores[j] = dot(q, s.keys + column * s.key_step, s.key_size);
    if (++column == s.ring) column = 0;
  }
  if (s.own_key) scores[s.count] = dot(q, s.own_key, s.key_size);
  each(scores, all_of, [&](Floats v, int64_t, int) {
    v *= s.scale;
    return s.softcap ? s.softcap * tangent(v / s.softcap) : v;
  });
  if (s.bias)
    for (int64_t j = 0; j < all_of; ++j) scores[j] += s.bias[all_of - 1 - j];
  float best = s.sink ? *s.sink : -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < all_of; ++j)
    if (!s.seen || s.seen[j]) best = std::max(best, scores[j]);
  each(scores, all_of, [&](Floats v, int64_t, int) { return exponential(v - best); });
  float total = s.sink ? exponential(all(*s.sink - best))[0] : 0;
  for (int64_t j = 0; j < all_of; ++j) {
    if (s.seen && !s.seen[j]) scores[j] = 0;
    total += scores[j];
  }
  const float by = total > 0 ? 1.0f / total : 0.0f;
  for (int64_t i = 0; i < s.value_size; i += 4 * LANES) {
    const int64_t size = std::min<int64_t>(4 * LANES, s.value_size - i);
    Floats sums[4] = {};
    auto add = [&](const float* from, float weight) {
      if (size == 4 * LANES) {
        UNROLL for (int p = 0; p < 4; ++p) sums[p] += weight * load<Floats>(from + p * LANES);
        return;
      }
      for (int p = 0; p * LANES < size; ++p)
        sums[p] += weight * part(from + p * LANES, int(std::min<int64_t>(LANES, size - p * LANES)));
    };
    column = begin;
    for (int64_t j = 0; j < s.count; ++j) {
      add(s.values + column * s.value_step + i, scores[j]);
      if (++column == s.ring) column = 0;
    }
    if (s.own_value) add(s.own_value + i, scores[s.count]);
    for (int p = 0; p < 4; ++p) sums[p] *= by;
    std::memcpy(out + i, sums, 4 * size);
  }
}

}  // namespace
