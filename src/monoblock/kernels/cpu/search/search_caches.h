// The keys and values that a batch of beam searches reads and writes: checked, pinned, and turned into pointers.
#pragma once

#include <ATen/core/Tensor.h>

#include "stack/batched_step.h"
#include "checks.h"

namespace {
namespace panels {

// One cache a block, (rows, heads, columns + 1, size); returns the columns without the last, which is a spare.
inline int64_t set_caches(Batch& batch, PinnedTensors& pinned, const Tensors& keys, const Tensors& values,
                          int64_t rows) {
  const std::vector<Layer>& layers = batch.stack.layers;
  check_count("keys", keys.size(), layers.size(), "block");
  check_count("values", values.size(), layers.size(), "block");
  for (size_t l = 0; l < layers.size(); ++l) {
    const Layer& layer = layers[l];
    check_heads(Argument("keys", l), keys[l], {rows, layer.kv_heads, l ? keys[0].size(2) : ANY, layer.key_size()});
    check_heads(Argument("values", l), values[l], {rows, layer.kv_heads, keys[0].size(2), layer.value_size()});
    pinned.add(keys[l]), pinned.add(values[l]);
    batch.caches.emplace_back(keys[l], values[l]);
  }
  const int64_t columns = keys[0].size(2) - 1;
  TORCH_CHECK(columns > 0 && rows <= MAX_SIZE / columns, "keys has ", columns + 1,
              " columns; two or more are needed, the last of them a spare");
  return columns;
}

// One source a prompt, for each block with cross-attention.
inline void set_sources(Batch& batch, PinnedTensors& pinned, const Tensors& keys, const Tensors& values,
                        int64_t prompts) {
  size_t count = 0, number = 0;
  for (const Layer& l : batch.stack.layers) count += l.cross_heads > 0;
  check_count("source_keys", keys.size(), count, "block with cross-attention");
  check_count("source_values", values.size(), count, "block with cross-attention");
  for (const Layer& l : batch.stack.layers) {
    batch.sources.emplace_back();
    if (!l.cross_heads) continue;
    check_source(l, keys[number], values[number], prompts, number);
    TORCH_CHECK(keys[number].size(2) == keys[0].size(2), Argument("source_keys", number), " has ", keys[number].size(2),
                " columns; ", keys[0].size(2), " are needed, as in source_keys[0]");
    pinned.add(keys[number]), pinned.add(values[number]);
    batch.sources.back() = KeyValues(keys[number], values[number]), ++number;
  }
  if (count) batch.source_lengths.assign(prompts, keys[0].size(2));
}

// Padding at the end shortens a source; the mask is read only where there is padding elsewhere.
inline void set_source_mask(Batch& batch, PinnedTensors& pinned, const at::Tensor& mask) {
  const int64_t count = int64_t(batch.source_lengths.size());
  TORCH_CHECK(count, "source_mask is given to a stack without cross-attention; leave it out");
  const int64_t columns = batch.source_lengths[0];
  check_source_mask(mask, count, columns);
  const bool* valid = static_cast<const bool*>(pinned.add(mask));
  const int64_t mask_row = mask.size(0) > 1 ? columns : 0;
  bool has_holes = false;
  for (int64_t n = 0; n < count; ++n) {
    const bool* row = valid + n * mask_row;
    int64_t& length = batch.source_lengths[n];
    while (length > 0 && !row[length - 1]) --length;
    has_holes = has_holes || std::find(row, row + length, false) != row + length;
  }
  if (has_holes) batch.source_mask = valid, batch.source_mask_row = mask_row;
}

}  // namespace panels
}  // namespace
