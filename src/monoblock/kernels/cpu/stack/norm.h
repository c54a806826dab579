// Norms and rotary positions of one vector.
#pragma once

#include "stack/activations.h"

namespace {

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
