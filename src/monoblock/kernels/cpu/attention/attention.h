// Attention of one query over a ring of cached keys and values.
#pragma once

#include <limits>

#include "stack/norm.h"

namespace {

// What one query attends to: the tokens first … first + count - 1, token i in column i % ring, and then itself if it
// has a key of its own.
struct KeyRange {
  const float *keys, *values;
  int64_t key_step, value_step, key_size, value_size;  // steps: from column to column
  int64_t first, count, ring;
  const float *own_key = nullptr, *own_value = nullptr;  // of the newest token
  const float* bias = nullptr;                           // added to the scores, by distance
  const bool* mask = nullptr;                            // columns that are not padding
  const float* sink = nullptr;                           // the score of an attention sink, which has no value
  float scale = 1, softcap = 0;
};

// softmax(q k' scale + bias) v (Vaswani et al. 2017, eq. 1); zeros where all keys are masked.  `scores` is scratch for
// one number a key.
inline void attend(const KeyRange& s, const float* q, float* scores, float* out) {
  int64_t column = s.count ? s.first % s.ring : 0, keys = s.count + (s.own_key ? 1 : 0);
  const int64_t begin = column;
  for (int64_t j = 0; j < s.count; ++j) {
    scores[j] = dot(q, s.keys + column * s.key_step, s.key_size);
    if (++column == s.ring) column = 0;
  }
  if (s.own_key) scores[s.count] = dot(q, s.own_key, s.key_size);
  transform(scores, keys, [&](Floats v, int64_t, int) {
    v *= s.scale;
    return s.softcap ? s.softcap * tanh_of(v / s.softcap) : v;
  });
  if (s.bias)
    for (int64_t j = 0; j < keys; ++j) scores[j] += s.bias[keys - 1 - j];
  float best = s.sink ? *s.sink : -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < keys; ++j)
    if (!s.mask || s.mask[j]) best = std::max(best, scores[j]);
  transform(scores, keys, [&](Floats v, int64_t, int) { return exponential_or_zero(v - best); });
  float total = s.sink ? exponential(all(*s.sink - best))[0] : 0;
  for (int64_t j = 0; j < keys; ++j) {
    if (s.mask && !s.mask[j]) scores[j] = 0;
    total += scores[j];
  }
  const float norm = total > 0 ? 1.0f / total : 0.0f;
  for (int64_t i = 0; i < s.value_size; i += 4 * LANES) {
    const int64_t size = std::min<int64_t>(4 * LANES, s.value_size - i);
    Floats sums[4] = {};
    auto add = [&](const float* from, float weight) {
      if (size == 4 * LANES) {
        UNROLL for (int p = 0; p < 4; ++p) sums[p] += weight * load<Floats>(from + p * LANES);
        return;
      }
      for (int p = 0; p * LANES < size; ++p)
        sums[p] += weight * load_lanes(from + p * LANES, int(std::min<int64_t>(LANES, size - p * LANES)));
    };
    column = begin;
    for (int64_t j = 0; j < s.count; ++j) {
      add(s.values + column * s.value_step + i, scores[j]);
      if (++column == s.ring) column = 0;
    }
    if (s.own_value) add(s.own_value + i, scores[s.count]);
    for (int p = 0; p < 4; ++p) sums[p] *= norm;
    std::memcpy(out + i, sums, 4 * size);
  }
}

}  // namespace
