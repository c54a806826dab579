// The arguments of NativeStack.step: checked, and turned into what the threads read.
#pragma once

#include "checks.h"
#include "linear/thread_products.h"

namespace {

// Keys and values of every block, and of every source that a block with cross-attention reads.
struct CacheTensors {
  const Tensors &keys, &values, &source_keys, &source_values;
  const OptionalTensor& source_mask;
};

// Which token each column of a cache holds, for each number of columns that the blocks have.  `windows`: 0 for a cache
// of all tokens, else how far back the blocks of a ring see.
struct CacheIndexes {
  const Tensors &positions, &token_index;
  const std::vector<int64_t>& windows;

  void check(int64_t rows) const {
    check_count("cache_index", token_index.size(), positions.size(), "element of cache_positions");
    check_count("windows", windows.size(), positions.size(), "element of cache_positions");
    for (size_t n = 0; n < positions.size(); ++n) {
      check_tensor(Argument("cache_positions", n), positions[n], at::kLong, {rows, ANY});
      check_tensor(Argument("cache_index", n), token_index[n], at::kLong, {rows, positions[n].size(1)});
      check_range(Argument("windows", n), windows[n], 0, MAX_SIZE);
      TORCH_CHECK(positions[n].size(1) >= 2, Argument("cache_positions", n), " has ", positions[n].size(1),
                  " columns; two or more are needed, the last of them a spare");
    }
  }

  // Each block must have the columns of one of these, and see no further than it reaches.
  void check_layer(const Layer& layer, size_t l, int64_t columns) const {
    for (size_t n = 0; n < positions.size(); ++n)
      if (positions[n].size(1) == columns && (!windows[n] || (layer.window && layer.window <= windows[n]))) return;
    TORCH_CHECK(false, Argument("keys", l), " has ", columns, " columns and a window of ", layer.window,
                ", for which there is no element of cache_positions");
  }

  // Whether token i of each row is in column i (modulo the ring) and at position i, as far back as a window sees, and
  // the new tokens overwrite nothing of that.
  bool are_in_order(const int64_t* lengths, int64_t tokens) const {
    for (size_t n = 0; n < positions.size(); ++n) {
      const int64_t columns = positions[n].size(1), capacity = columns - 1, window = windows[n];
      const int64_t *position = positions[n].const_data_ptr<int64_t>(),
                    *index = token_index[n].const_data_ptr<int64_t>();
      if (window && tokens + window > columns) return false;
      for (int64_t b = 0; b < positions[n].size(0); ++b) {
        const int64_t length = lengths[b], first = window ? std::max(int64_t(0), length + 1 - window) : 0;
        if (!window && length + tokens > capacity) return false;
        for (int64_t i = first; i < length; ++i) {
          const int64_t column = b * columns + i % capacity;
          if (position[column] != i || index[column] != i) return false;
        }
      }
    }
    return true;
  }
};

// Where the new tokens of each row stand; false where their positions do not follow what the cache holds.
inline bool set_lengths(StackStep& s, const at::Tensor& positions, const at::Tensor& lengths) {
  const int64_t rows = s.batch / s.tokens, *before = lengths.const_data_ptr<int64_t>();
  const at::Tensor expanded = positions.expand({rows, s.tokens}).contiguous();
  const int64_t* position = expanded.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < s.batch; ++n) {
    const int64_t row = n / s.tokens;
    const bool is_active = !s.active || s.active[row];
    check_range(Argument("lengths", row), before[row], 0, MAX_SIZE);
    s.lengths.push_back(before[row] + (is_active ? n % s.tokens : 0));
    if (is_active && position[n] != s.lengths[n]) return false;
    s.max_length = std::max(s.max_length, s.lengths[n] + 1);
  }
  return true;
}

inline void set_caches(StackStep& s, const CacheTensors& given, const CacheIndexes& indexes) {
  const std::vector<Layer>& layers = s.stack.layers;
  const int64_t rows = s.batch / s.tokens;
  size_t sources = 0;
  for (const Layer& l : layers) sources += l.cross_heads > 0;
  check_count("keys", given.keys.size(), layers.size(), "block");
  check_count("values", given.values.size(), layers.size(), "block");
  check_count("source_keys", given.source_keys.size(), sources, "block with cross-attention");
  check_count("source_values", given.source_values.size(), sources, "block with cross-attention");
  for (size_t l = 0, source = 0; l < layers.size(); ++l) {
    const Layer& layer = layers[l];
    check_heads(Argument("keys", l), given.keys[l], {rows, layer.kv_heads, ANY, layer.key_size()});
    const int64_t columns = given.keys[l].size(2);
    check_heads(Argument("values", l), given.values[l], {rows, layer.kv_heads, columns, layer.value_size()});
    indexes.check_layer(layer, l, columns);
    s.caches.emplace_back(given.keys[l], given.values[l]), s.max_keys = std::max(s.max_keys, columns);
    if (!layer.cross_heads) continue;
    check_source(layer, given.source_keys[source], given.source_values[source], ANY, source);
    s.sources.emplace_back(given.source_keys[source], given.source_values[source]);
    const KeyValues& held = s.sources.back();
    TORCH_CHECK(held.rows > 0 && rows % held.rows == 0, Argument("source_keys", source), " has ", held.rows,
                " rows, which do not divide the ", rows, " rows of x");
    if (given.source_mask) check_source_mask(*given.source_mask, held.rows, held.columns);
    s.max_keys = std::max(s.max_keys, held.columns), ++source;
  }
  if (!given.source_mask) return;
  s.source_mask = given.source_mask->const_data_ptr<bool>();
  s.source_mask_row = given.source_mask->size(0) > 1 ? given.source_mask->size(1) : 0;
}

// Tables by position: cosines and sines (positions, pairs), biases (heads, distances).
inline void set_tables(StackStep& s, const Tensors& cos, const Tensors& sin, const Tensors& biases) {
  check_count("rotary_sin", sin.size(), cos.size(), "element of rotary_cos");
  const auto check_length = [&](const Argument& name, int64_t length) {
    TORCH_CHECK(length >= s.max_length, name, " has ", length, " positions; ", s.max_length, " are needed");
  };
  for (size_t n = 0; n < cos.size(); ++n) {
    check_tensor(Argument("rotary_cos", n), cos[n], at::kFloat, {ANY, ANY});
    check_tensor(Argument("rotary_sin", n), sin[n], at::kFloat, {cos[n].size(0), cos[n].size(1)});
    check_length(Argument("rotary_cos", n), cos[n].size(0));
    s.rotary_cos.push_back(cos[n].const_data_ptr<float>()), s.rotary_sin.push_back(sin[n].const_data_ptr<float>());
    s.rotary_pairs.push_back(cos[n].size(1));
  }
  for (size_t n = 0; n < biases.size(); ++n) {
    check_tensor(Argument("position_biases", n), biases[n], at::kFloat, {ANY, ANY});
    check_length(Argument("position_biases", n), biases[n].size(1));
    s.biases.push_back(biases[n].const_data_ptr<float>()), s.bias_columns.push_back(biases[n].size(1));
  }
  for (const Layer& l : s.stack.layers) {
    TORCH_CHECK(l.rotary_table < int64_t(cos.size()), "rotary_cos has ", cos.size(), " tables; table ", l.rotary_table,
                " is needed");
    TORCH_CHECK(l.rotary_table < 0 || 2 * s.rotary_pairs[l.rotary_table] <= l.key_size(),
                Argument("rotary_cos", l.rotary_table), " has ",
                l.rotary_table < 0 ? 0 : s.rotary_pairs[l.rotary_table], " pairs, more than a head of ", l.key_size(),
                " has");
    TORCH_CHECK(l.bias_table < int64_t(biases.size()), "position_biases has ", biases.size(), " tables; table ",
                l.bias_table, " is needed");
    TORCH_CHECK(l.bias_table < 0 || biases[l.bias_table].size(0) == l.heads, Argument("position_biases", l.bias_table),
                " has ", l.bias_table < 0 ? 0 : biases[l.bias_table].size(0), " rows; one for each of ", l.heads,
                " heads is needed");
  }
}

}  // namespace
