// Attention of a few queries over keys and values in pages.
//
// The keys of a row are read in parts of PART tokens, which begin at multiples of PART: the heads of a group attend to a
// part together, so that it is read from memory once, and the parts of a row are added up in their order, each with the
// largest score of its own (Milakov and Gimelshein 2018).  So the bits of a result depend on nothing but its row.
#pragma once

#include <limits>

#include "attention/pages.h"
#include "stack/norm.h"

namespace {
namespace pages {

constexpr int64_t PART = 512;
constexpr int MAX_TOGETHER = LANES == 8 ? 2 : 4;  // heads that attend at once: what registers hold
constexpr float LOWEST = std::numeric_limits<float>::lowest();

// Some keys of one row, all of one part, and their values; `table` has the pages of the row.
struct Keys {
  const Pools& pools;
  const int32_t* table;
  int64_t group, first, end;

  const float* keys(int64_t page) const { return pools.key(table[page], group); }
  const float* values(int64_t page) const { return pools.value(table[page], group); }
};

// How one head turns products into scores.
struct Scores {
  float scale, softcap;
  const float* bias;  // added to the scores, by distance; null for none
  int64_t index;      // of the query in its row
};

// What one head of one query attended to: the values weighted with e^(score - highest), and the sum of these weights.
struct Attended {
  float highest = LOWEST, total = 0;
  bool is_empty = true;
};

// scores[m][i % PART] = the product of query m with key i.
template <int M>
inline void multiply_keys(const Keys& s, const float* q, int64_t q_step, float (*scores)[PART]) {
  const int64_t size = s.pools.key_size;
  for (int64_t i = s.first / LANES * LANES; i < s.end; i += LANES) {
    const int64_t low = std::max(i, s.first), high = std::min(i + LANES, s.end);
    const float* key = s.keys(i / PAGE) + i % PAGE * size;
    Floats parts[M][LANES];
    if (high - low < LANES)
      for (int m = 0; m < M; ++m) std::fill_n(parts[m], LANES, Floats{});
    for (int64_t n = low - i; n < high - i; ++n) {
      Floats sums[M] = {};
      int64_t k = 0;
      for (; k + LANES <= size; k += LANES) {
        const Floats v = load<Floats>(key + n * size + k);
        UNROLL for (int m = 0; m < M; ++m) sums[m] += v * load<Floats>(q + m * q_step + k);
      }
      if (k < size)
        UNROLL for (int m = 0; m < M; ++m)
          sums[m] += load_lanes(key + n * size + k, int(size - k)) * load_lanes(q + m * q_step + k, int(size - k));
      UNROLL for (int m = 0; m < M; ++m) parts[m][n] = sums[m];
    }
    UNROLL for (int m = 0; m < M; ++m) store(scores[m] + i % PART, sum_each(parts[m]));
  }
}

// Products become weights e^(score - highest), zero before the first key and behind the last one.
inline Attended weigh(const Keys& s, const Scores& options, float* scores) {
  const int64_t start = s.first / PART * PART, first = s.first - start, end = s.end - start;
  const int64_t begin = first / LANES * LANES, count = (end - begin + LANES - 1) / LANES * LANES;
  scores += begin;
  transform(scores, count, [&](Floats v, int64_t, int) {
    v *= options.scale;
    return options.softcap ? options.softcap * tanh_of(v / options.softcap) : v;
  });
  if (options.bias)
    for (int64_t i = s.first; i < s.end; ++i) scores[i - start - begin] += options.bias[options.index - i];
  std::fill_n(scores, first - begin, -std::numeric_limits<float>::infinity());
  std::fill(scores + end - begin, scores + count, -std::numeric_limits<float>::infinity());
  Floats highest = all(LOWEST), total = {};
  for (int64_t j = 0; j < count; j += LANES) {
    const Floats v = load<Floats>(scores + j);
    highest = v > highest ? v : highest;
  }
  const float top = max_lane(highest);
  transform(scores, count, [&](Floats v, int64_t, int) { return exponential_or_zero(v - top); });
  for (int64_t j = 0; j < count; j += LANES) total += load<Floats>(scores + j);
  return {top, sum(total), false};
}

// to[m] (value_size,) = the sum of weights[m][i % PART] times value i.
template <int M>
inline void add_values(const Keys& s, const float (*weights)[PART], float* to, int64_t to_step) {
  const int64_t size = s.pools.value_size;
  const auto add = [&]<int P>(int64_t begin, int64_t width) {  // P vectors, of which the last may not be full
    Floats sums[M][P] = {};
    for (int64_t i = s.first; i < s.end;) {
      const float* value = s.values(i / PAGE) + begin;
      for (const int64_t end = std::min(s.end, (i / PAGE + 1) * PAGE); i < end; ++i) {
        const float* from = value + i % PAGE * size;
        Floats v[P];
        UNROLL for (int p = 0; p < P; ++p)
          v[p] = width == P * LANES ? load<Floats>(from + p * LANES)
                                    : load_lanes(from + p * LANES, int(std::min<int64_t>(LANES, width - p * LANES)));
        UNROLL for (int m = 0; m < M; ++m)
          UNROLL for (int p = 0; p < P; ++p) sums[m][p] += weights[m][i % PART] * v[p];
      }
    }
    for (int m = 0; m < M; ++m) std::memcpy(to + m * to_step + begin, sums[m], 4 * width);
  };
  int64_t begin = 0;
  for (; begin + 4 * LANES <= size; begin += 4 * LANES) add.template operator()<4>(begin, 4 * LANES);
  if (begin + 2 * LANES <= size) add.template operator()<2>(begin, 2 * LANES), begin += 2 * LANES;
  if (begin + LANES <= size) add.template operator()<1>(begin, LANES), begin += LANES;
  if (begin < size) add.template operator()<1>(begin, size - begin);
}

// Add another part: out and part (size,).
inline void add_part(Attended& sum, float* out, const Attended& next, const float* part, int64_t size) {
  if (next.is_empty) return;
  if (sum.is_empty) {
    sum = next;
    std::copy_n(part, size, out);
    return;
  }
  const float top = std::max(sum.highest, next.highest);
  const float before = exponential_or_zero(all(sum.highest - top))[0], share = exponential_or_zero(all(next.highest - top))[0];
  sum = {top, sum.total * before + next.total * share, false};
  transform(out, size, [&](Floats v, int64_t i, int live) { return v * before + load_lanes(part + i, live) * share; });
}

// Divide by the sum of the weights, to which a sink adds one without a value.
inline void finish(Attended sum, const float* sink, float* out, int64_t size) {
  if (sum.is_empty) return void(std::fill_n(out, size, 0.0f));
  float weight = 1, total = sum.total;
  if (sink) {
    const float top = std::max(sum.highest, *sink);
    weight = exponential_or_zero(all(sum.highest - top))[0];
    total = total * weight + exponential_or_zero(all(*sink - top))[0];
  }
  const float norm = total == 0 ? 0 : weight / total;
  transform(out, size, [&](Floats v, int64_t, int) { return v * norm; });
}

// Scratch of one thread.
struct AttentionScratch {
  alignas(64) float scores[MAX_TOGETHER][PART];
  std::vector<float> values;  // (MAX_TOGETHER, value size)
};

// Heads q (heads, q_step) of one query, which share these keys, attend to them: done(head, attended, values).
template <class Options, class Done>
inline void attend(const Keys& keys, const float* q, int64_t q_step, int64_t heads, AttentionScratch& scratch,
                   Options options, Done done) {
  const int64_t size = keys.pools.value_size;
  scratch.values.resize(std::max<size_t>(scratch.values.size(), MAX_TOGETHER * size));
  const auto together = [&]<int M>(int64_t h) {
    Attended attended[M];
    multiply_keys<M>(keys, q + h * q_step, q_step, scratch.scores);
    for (int m = 0; m < M; ++m) attended[m] = weigh(keys, options(h + m), scratch.scores[m]);
    add_values<M>(keys, scratch.scores, scratch.values.data(), size);
    for (int m = 0; m < M; ++m) done(h + m, attended[m], scratch.values.data() + m * size);
  };
  int64_t h = 0;
  if constexpr (MAX_TOGETHER >= 4) {
    for (; h + 4 <= heads; h += 4) together.template operator()<4>(h);
    if (h + 3 <= heads) together.template operator()<3>(h), h += 3;
  }
  for (; h + 2 <= heads; h += 2) together.template operator()<2>(h);
  if (h < heads) together.template operator()<1>(h);
}

}  // namespace pages
}  // namespace
