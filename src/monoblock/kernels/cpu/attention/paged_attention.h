// Attention of a few queries over keys and values in pages: token i of a row lies in column i % PAGE of page
// table[i / PAGE].
//
// The keys of a row are read in parts of PART tokens, which begin at multiples of PART: the heads of a group attend to a
// part together, so that it is read from memory once, and the parts of a row are added up in their order, each with the
// largest score of its own (Milakov and Gimelshein 2018).  So the bits of a result depend on nothing but its row.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "checks.h"
#include "stack/activations.h"

namespace {
namespace pages {

constexpr int64_t PAGE = 16;  // tokens

inline int64_t count_pages(int64_t tokens) { return (tokens + PAGE - 1) / PAGE; }

// The pages of one block, (pages, heads, PAGE, size) each.
struct Pools {
  float *keys, *values;
  int64_t key_page, key_head, value_page, value_head, key_size, value_size;

  Pools(const at::Tensor& k, const at::Tensor& v)
      : keys(static_cast<float*>(k.data_ptr())), values(static_cast<float*>(v.data_ptr())), key_page(k.stride(0)),
        key_head(k.stride(1)), value_page(v.stride(0)), value_head(v.stride(1)), key_size(k.size(3)),
        value_size(v.size(3)) {}

  float* key(int64_t page, int64_t head) const { return keys + page * key_page + head * key_head; }
  float* value(int64_t page, int64_t head) const { return values + page * value_page + head * value_head; }
};

// The tokens of a page lie one after the other.
inline void check_page(const Argument& name, const at::Tensor& pool) {
  TORCH_CHECK(pool.dim() == 4 && pool.size(2) == PAGE, name, " has shape ", shape_text(pool.sizes()), "; (any, any, ",
              PAGE, ", any) is needed");
  TORCH_CHECK(pool.stride(3) == 1 && pool.stride(2) == pool.size(3), name, " with strides ",
              shape_text(pool.strides()), " has gaps between the tokens of a page; call contiguous()");
}

// Copy the first used[i] tokens of page sources[i] to page targets[i], in every pool (pages, heads, PAGE, size).
void copy_pages(const Tensors& pools, const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& used) {
  check_tensor("sources", sources, at::kLong, {ANY});
  const int64_t count = sources.numel(), pool_count = int64_t(pools.size());
  check_tensor("targets", targets, at::kLong, {count}), check_tensor("used", used, at::kLong, {count});
  const int64_t *from = sources.const_data_ptr<int64_t>(), *to = targets.const_data_ptr<int64_t>(),
                *tokens = used.const_data_ptr<int64_t>();
  std::vector<char*> memory;
  for (int64_t n = 0; n < pool_count; ++n) {
    check_memory(Argument("pools", n), pools[n]), check_page(Argument("pools", n), pools[n]);
    for (int64_t i = 0; i < count; ++i) {
      check_range(Argument("sources", i), from[i], 0, pools[n].size(0) - 1);
      check_range(Argument("targets", i), to[i], 0, pools[n].size(0) - 1);
      check_range(Argument("used", i), tokens[i], 0, PAGE);
    }
    memory.push_back(static_cast<char*>(pools[n].data_ptr()));
  }
  at::parallel_for(0, count * pool_count, 8, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / count, i = item % count, bytes = pools[n].itemsize(), page = pools[n].stride(0) * bytes;
      for (int64_t h = 0; h < pools[n].size(1); ++h) {
        char* head = memory[n] + h * pools[n].stride(1) * bytes;
        std::memmove(head + to[i] * page, head + from[i] * page, tokens[i] * pools[n].size(3) * bytes);
      }
    }
  });
}

// -- attention --------------------------------------------------------------------------------------------------------

constexpr int64_t PART = 512;
constexpr int MAX_TOGETHER = LANES == 8 ? 2 : 4;  // heads that attend at once: what registers hold
constexpr float LOWEST = std::numeric_limits<float>::lowest();

// One head of the keys and values in the pages of a table.
struct Keys {
  const Pools& pools;
  const int32_t* table;
  int64_t group;

  const float* keys(int64_t page) const { return pools.key(table[page], group); }
  const float* values(int64_t page) const { return pools.value(table[page], group); }
};

// What a head of one query attended to: the values weighted with e^(score - highest), and the sum of these weights.
struct Attended {
  float highest = LOWEST, total = 0;
  bool is_empty = true;
};

// One head of a query, the keys that it sees in one part, and how it turns products into scores.
struct Query {
  const float* q;
  int64_t first, end;
  float scale, softcap;
  const float* bias;  // added to the scores, by distance; null for none
  int64_t index;      // of the query in its row
  Attended* sum;
  float* out;         // (value_size,)
};

// scores[m][i % PART] = the product of query m and key i, for the keys from first to end.
template <int M>
inline void multiply_keys(const Keys& s, int64_t first, int64_t last, const Query* queries, float (*scores)[PART]) {
  const int64_t size = s.pools.key_size;
  for (int64_t i = first / LANES * LANES; i < last; i += LANES) {
    const int64_t low = std::max(i, first), high = std::min(i + LANES, last);
    const float *key = s.keys(i / PAGE) + i % PAGE * size, *value = s.values(i / PAGE) + i % PAGE * s.pools.value_size;
    Floats parts[M][LANES];
    if (high - low < LANES)
      for (int m = 0; m < M; ++m) std::fill_n(parts[m], LANES, Floats{});
    for (int64_t n = low - i; n < high - i; ++n) {
      Floats sums[M] = {};
      int64_t k = 0;
      for (; k + LANES <= size; k += LANES) {
        prefetch(value + n * s.pools.value_size + k, 0);
        const Floats v = load<Floats>(key + n * size + k);
        UNROLL for (int m = 0; m < M; ++m) sums[m] += v * load<Floats>(queries[m].q + k);
      }
      if (k < size)
        UNROLL for (int m = 0; m < M; ++m)
          sums[m] += load_lanes(key + n * size + k, int(size - k)) * load_lanes(queries[m].q + k, int(size - k));
      UNROLL for (int m = 0; m < M; ++m) parts[m][n] = sums[m];
    }
    UNROLL for (int m = 0; m < M; ++m) store(scores[m] + i % PART, sum_each(parts[m]));
  }
}

// Products become weights e^(score - highest), zero before the first key and behind the last one.
inline Attended weigh(const Query& query, float* scores) {
  const int64_t start = query.first / PART * PART, first = query.first - start, end = query.end - start;
  const int64_t begin = first / LANES * LANES, count = (end - begin + LANES - 1) / LANES * LANES;
  scores += begin;
  transform(scores, count, [&](Floats v, int64_t, int) {
    v *= query.scale;
    return query.softcap ? query.softcap * tanh_of(v / query.softcap) : v;
  });
  if (query.bias)
    for (int64_t i = query.first; i < query.end; ++i) scores[i - start - begin] += query.bias[query.index - i];
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

// to (M, value_size) = for query m the sum of weights[m][i % PART] times value i, of the keys that it sees.
template <int M>
inline void add_values(const Keys& s, int64_t first, int64_t last, const Query* queries, const float (*weights)[PART],
                       float* to) {
  const int64_t size = s.pools.value_size;
  int64_t all_from = first, all_until = last;  // the keys that all of them see
  for (int m = 0; m < M; ++m)
    all_from = std::max(all_from, queries[m].first), all_until = std::min(all_until, queries[m].end);
  const auto add = [&]<int P>(int64_t begin, int64_t width) {  // P vectors, of which the last may not be full
    Floats sums[M][P] = {};
    const auto add_keys = [&]<bool ARE_SEEN>(int64_t i, int64_t until) {
      while (i < until) {
        const float* value = s.values(i / PAGE) + begin;
        const float* next = s.keys(i / PAGE) + s.pools.key_head + begin;  // of the next head, to be multiplied soon
        for (const int64_t end = std::min(until, (i / PAGE + 1) * PAGE); i < end; ++i) {
          const float* from = value + i % PAGE * size;
          Floats v[P];
          UNROLL for (int p = 0; p < P; ++p) {
            prefetch(next + i % PAGE * s.pools.key_size + p * LANES, 0);
            v[p] = width == P * LANES ? load<Floats>(from + p * LANES)
                                      : load_lanes(from + p * LANES, int(std::min<int64_t>(LANES, width - p * LANES)));
          }
          UNROLL for (int m = 0; m < M; ++m)
            if (ARE_SEEN || (queries[m].first <= i && i < queries[m].end))
              UNROLL for (int p = 0; p < P; ++p) sums[m][p] += weights[m][i % PART] * v[p];
        }
      }
    };
    const int64_t from = std::min(all_from, last), until = std::max(from, all_until);
    add_keys.template operator()<false>(first, from), add_keys.template operator()<true>(from, until);
    add_keys.template operator()<false>(until, last);
    for (int m = 0; m < M; ++m) std::memcpy(to + m * size + begin, sums[m], 4 * width);
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
  std::vector<Query> queries;
};

// The queries in scratch attend to keys of one part, and add what they see there to their sums.
inline void attend(const Keys& keys, AttentionScratch& scratch) {
  const int64_t size = keys.pools.value_size, count = int64_t(scratch.queries.size());
  scratch.values.resize(std::max<size_t>(scratch.values.size(), MAX_TOGETHER * size));
  const auto together = [&]<int M>(const Query* queries) {
    Attended attended[M];
    int64_t first = queries[0].first, end = queries[0].end;
    for (int m = 1; m < M; ++m) first = std::min(first, queries[m].first), end = std::max(end, queries[m].end);
    multiply_keys<M>(keys, first, end, queries, scratch.scores);
    for (int m = 0; m < M; ++m) attended[m] = weigh(queries[m], scratch.scores[m]);
    add_values<M>(keys, first, end, queries, scratch.scores, scratch.values.data());
    for (int m = 0; m < M; ++m)
      add_part(*queries[m].sum, queries[m].out, attended[m], scratch.values.data() + m * size, size);
  };
  const Query* next = scratch.queries.data();
  const Query* end = next + count;
  if constexpr (MAX_TOGETHER >= 4) {
    for (; next + 4 <= end; next += 4) together.template operator()<4>(next);
    if (next + 3 <= end) together.template operator()<3>(next), next += 3;
  }
  for (; next + 2 <= end; next += 2) together.template operator()<2>(next);
  if (next < end) together.template operator()<1>(next);
}

}  // namespace pages
}  // namespace
