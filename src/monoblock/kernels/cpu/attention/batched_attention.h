// Attention of one query over keys that may lie in different rows of a cache.
#pragma once

#include "linear/panel.h"

namespace {
namespace panels {

// The products of two heads, to be summed over the lanes.
inline Floats lane_products(const float* a, const float* b, int64_t size) {
  Floats total = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) total += load<Floats>(a + i) * load<Floats>(b + i);
  if (i < size) total += load_lanes(a + i, int(size - i)) * load_lanes(b + i, int(size - i));
  return total;
}

// softmax(q k' scale) v over `count` tokens (Vaswani et al. 2017, eq. 1), with key(j) and value(j) as pointers; zeros
// where all are masked.  `scores` is scratch for whole vectors.
template <class Key, class Value>
inline void attend_to(int64_t count, Key key, Value value, int64_t size, int64_t value_size, const bool* mask,
                      float scale, const float* q, float* scores, float* out) {
  const float masked = -std::numeric_limits<float>::infinity();
  Floats highest = all(masked), total = {};
  for (int64_t j = 0; j < count; j += LANES) {
    const int64_t live = std::min<int64_t>(LANES, count - j);
    Floats parts[LANES];
    for (int64_t n = 0; n < live; ++n) parts[n] = lane_products(q, key(j + n), size);
    for (int64_t n = live; n < LANES; ++n) parts[n] = Floats{};
    Floats logits = keep_first(sum_each(parts) * scale, live, masked);
    if (mask)
      for (int64_t n = 0; n < live; ++n)
        if (!mask[j + n]) logits[n] = masked;
    store(scores + j, logits);
    highest = logits > highest ? logits : highest;
  }
  const float best = max_lane(highest);
  if (best == masked) {  // no score is greater than that of a masked key: all are masked, or some are NaN
    const bool has_nan = std::any_of(scores, scores + count, [](float score) { return std::isnan(score); });
    return void(std::fill_n(out, value_size, has_nan ? std::numeric_limits<float>::quiet_NaN() : 0.0f));
  }
  for (int64_t j = 0; j < count; j += LANES) {
    const Floats share = exponential_or_zero(load<Floats>(scores + j) - best);
    store(scores + j, share);
    total += share;
  }
  const float norm = 1.0f / sum(total);
  for (int64_t i = 0; i < value_size; i += 4 * LANES) {
    const int64_t width = std::min<int64_t>(4 * LANES, value_size - i);
    Floats sums[4] = {};
    const auto add = [&]<int P>() {
      for (int64_t j = 0; j < count; ++j) {
        const float *from = value(j) + i, share = scores[j];
        UNROLL for (int p = 0; p < P; ++p) sums[p] += share * load<Floats>(from + p * LANES);
      }
    };
    if (width == 4 * LANES) {
      add.template operator()<4>();
    } else if (width == 3 * LANES) {
      add.template operator()<3>();
    } else if (width == 2 * LANES) {
      add.template operator()<2>();
    } else {
      for (int64_t j = 0; j < count; ++j)
        for (int p = 0; p * LANES < width; ++p)
          sums[p] += scores[j] * load_lanes(value(j) + i + p * LANES, int(std::min<int64_t>(LANES, width - p * LANES)));
    }
    for (int p = 0; p < 4; ++p) sums[p] *= norm;
    std::memcpy(out + i, sums, 4 * width);
  }
}

}  // namespace panels
}  // namespace
