// One thread's share of a step of many rows through a stack: all its panels pass every weight together.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/batched_attention.h"
#include "linear/panel_products.h"
#include "linear/thread_products.h"
#include "threads.h"

namespace {
namespace panels {

// A row of the batch and the tokens it attends to: token j lies in row cache_rows[j] of the cache, in column j.
struct BatchRow {
  int64_t number;  // in the cache
  const int64_t* cache_rows;
  int64_t count, column;  // its own key and value go to `column`
};

// All that the threads of one step read.  Owned by one call.
struct Batch {
  const NativeStack& stack;
  const float* x = nullptr;  // (rows, D)
  std::vector<BatchRow> rows;
  int64_t rows_per_source = 1;
  std::vector<KeyValues> caches, sources;  // one a block; a block without cross-attention has an empty source
  std::vector<int64_t> source_lengths;     // columns of each source up to its last valid one
  const bool* source_mask = nullptr;       // (sources, source columns), only where padding is not at the end
  int64_t source_mask_row = 0;
};

struct Panel {
  int64_t first, count;  // of the rows of the batch
  int vectors;
  float *x, *input, *projected, *hidden, *gate;  // (features, rows): residual stream, what products read and write
  int64_t step() const { return int64_t(vectors) * LANES; }
};

class BatchShare {
 public:
  // The rows from first to last; `memory` is scratch that the calling thread keeps between steps.
  BatchShare(const Batch& batch, int64_t first, int64_t last, std::vector<float>& memory) : batch(batch) {
    allocate(first, last, memory);
  }

  std::vector<Panel> panels;

  void run() {
    for (Panel& p : panels) load_panel(p);
    for (size_t l = 0; l < batch.stack.layers.size(); ++l) {
      const Layer& layer = batch.stack.layers[l];
      norm_before(layer.attention, layer.norm_place);
      self_attention(layer, batch.caches[l]);
      add_residual(layer.attention, layer);
      if (layer.cross_heads) {
        norm_before(layer.cross, layer.norm_place);
        cross_attention(layer, batch.sources[l]);
        add_residual(layer.cross, layer);
      }
      norm_before(layer.feedforward, layer.norm_place);
      feedforward(layer);
      add_residual(layer.feedforward, layer);
    }
    for (Panel& p : panels)
      if (batch.stack.norm.kind) apply_norm(batch.stack.norm, p.x, batch.stack.width, p.vectors, p.x);
  }

  // Copy the result to rows of `to` (rows, D).
  void write_rows(float* to) const {
    const int64_t D = batch.stack.width;
    for (const Panel& p : panels) {
      transpose(p.x, D, p.step(), p.step(), rows, D);
      for (int64_t i = 0; i < p.count; ++i) std::copy_n(rows + i * D, D, to + row(p, i).number * D);
    }
  }

 private:
  const Batch& batch;
  float *rows, *attended;  // of one panel, row by row: what attention reads and writes
  float* Panel::* input = &Panel::x;
  PanelProducts products;
  std::vector<float> scores;

  void allocate(int64_t first, int64_t last, std::vector<float>& memory) {
    const NativeStack& stack = batch.stack;
    int64_t projected = stack.width, longest = 0, gates = 0;
    for (const Layer& l : stack.layers)
      projected = std::max({projected, l.query.rows + l.key.rows + l.value.rows, l.cross_query.rows}),
      gates = std::max(gates, l.gate.rows);
    for (const BatchRow& row : batch.rows) longest = std::max(longest, row.count);
    for (int64_t length : batch.source_lengths) longest = std::max(longest, length);
    const int64_t wide = std::max(stack.max_heads, stack.width);
    const int64_t features = stack.width + wide + projected + stack.max_hidden + gates;
    const int64_t by_rows = (projected + wide) * MAX_VECTORS * LANES;
    memory.resize(
        std::max<size_t>(memory.size(), (last - first + LANES * MAX_VECTORS) * features + by_rows + LINE_FLOATS));
    scores.resize(longest + 2 * LANES);
    float* next = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
    rows = next, attended = rows + projected * MAX_VECTORS * LANES, next += by_rows;
    while (first < last) {
      const int vectors = last - first > LANES ? MAX_VECTORS : 1;
      Panel p{first, std::min<int64_t>(vectors * LANES, last - first), vectors};
      for (auto [buffer, size] : {std::pair{&p.x, stack.width},
                                  {&p.input, wide},
                                  {&p.projected, projected},
                                  {&p.hidden, stack.max_hidden},
                                  {&p.gate, gates}})
        *buffer = next, next += size * p.step();
      panels.push_back(p), first += p.count;
    }
  }

  const BatchRow& row(const Panel& p, int64_t i) const { return batch.rows[p.first + i]; }

  void load_panel(Panel& p) {
    const int64_t D = batch.stack.width;
    std::fill_n(rows, D * p.step(), 0.0f);
    for (int64_t i = 0; i < p.count; ++i) std::copy_n(batch.x + (p.first + i) * D, D, rows + i * D);
    transpose(rows, p.step(), D, D, p.x, p.step());
  }

  // Choose what the next products read: `inputs` features of a buffer of each panel.
  void read_from(float* Panel::* from, int64_t inputs) {
    std::vector<PanelRows> rows;
    for (const Panel& p : panels) rows.push_back({p.*from, p.vectors});
    products.set_inputs(std::move(rows), inputs);
  }

  // All panels with one weight, to the features from `offset` on of another buffer.
  void multiply(const WeightMatrix& m, float* Panel::* to, int64_t offset = 0) {
    products.multiply(
        m, [&](size_t i, int64_t n) { return panels[i].*to + (offset + n) * panels[i].step(); },
        [](size_t, int64_t, int64_t, float*) {});
  }

  // Choose what the first products of a sublayer read: the residual stream, or its norm.
  void norm_before(const Sublayer& sub, int place) {
    const bool is_normed = (place == PRE || place == SANDWICH) && sub.norm.kind;
    input = is_normed ? &Panel::input : &Panel::x;
    if (is_normed)
      for (Panel& p : panels) apply_norm(sub.norm, p.x, batch.stack.width, p.vectors, p.input);
  }

  void add_residual(const Sublayer& sub, const Layer& layer) {
    const int64_t D = batch.stack.width;
    for (Panel& p : panels) {
      if (layer.norm_place == OUTPUT && sub.norm.kind) apply_norm(sub.norm, p.projected, D, p.vectors, p.projected);
      if (layer.norm_place == SANDWICH) apply_norm(sub.output_norm, p.projected, D, p.vectors, p.projected);
      for (int64_t k = 0; k < D; ++k) {
        const float scale = (sub.gain ? sub.gain[k] : 1.0f) * layer.residual_scale;
        for (int64_t i = k * p.step(); i < (k + 1) * p.step(); i += LANES)
          store(p.x + i, load<Floats>(p.x + i) + scale * load<Floats>(p.projected + i));
      }
      if (layer.norm_place == POST && sub.norm.kind) apply_norm(sub.norm, p.x, D, p.vectors, p.x);
    }
  }

  // Write the keys and then the values of a token to its column.
  static void store_token(const KeyValues& cache, const BatchRow& row, int64_t heads, const float* from) {
    float* key = cache.keys + row.number * cache.key_row + row.column * cache.key_column;
    float* value = cache.values + row.number * cache.value_row + row.column * cache.value_column;
    for (int64_t g = 0; g < heads; ++g, from += cache.key_size)
      std::copy_n(from, cache.key_size, key + g * cache.key_head);
    for (int64_t g = 0; g < heads; ++g, from += cache.value_size)
      std::copy_n(from, cache.value_size, value + g * cache.value_head);
  }

  // attend(row, head, query, output) for every head of every row of the panels; the outputs become their input.
  template <class Attend>
  void attend_rows(int64_t heads, const KeyValues& kv, Attend attend) {
    const int64_t Q = heads * kv.key_size, out = heads * kv.value_size;
    for (Panel& p : panels) {
      transpose(p.projected, Q, p.step(), p.step(), rows, Q);
      for (int64_t i = 0; i < p.count; ++i)
        for (int64_t h = 0; h < heads; ++h)
          attend(row(p, i), h, rows + i * Q + h * kv.key_size, attended + i * out + h * kv.value_size);
      transpose(attended, p.step(), out, out, p.input, p.step());
    }
  }

  void self_attention(const Layer& layer, const KeyValues& cache) {
    const int64_t Q = layer.query.rows, K = layer.key.rows, V = layer.value.rows;
    read_from(input, batch.stack.width);
    multiply(layer.query, &Panel::projected);
    multiply(layer.key, &Panel::projected, Q);
    multiply(layer.value, &Panel::projected, Q + K);
    for (const Panel& p : panels) {
      transpose(p.projected + Q * p.step(), K + V, p.step(), p.step(), rows, K + V);
      for (int64_t i = 0; i < p.count; ++i) store_token(cache, row(p, i), layer.kv_heads, rows + i * (K + V));
    }
    const int64_t heads_per_key = layer.heads / layer.kv_heads;
    attend_rows(layer.heads, cache, [&](const BatchRow& query, int64_t h, const float* q, float* out) {
      const float *keys = cache.keys + h / heads_per_key * cache.key_head,
                  *values = cache.values + h / heads_per_key * cache.value_head;
      attend_to(
          query.count, [&](int64_t j) { return keys + query.cache_rows[j] * cache.key_row + j * cache.key_column; },
          [&](int64_t j) { return values + query.cache_rows[j] * cache.value_row + j * cache.value_column; },
          cache.key_size, cache.value_size, nullptr, layer.scale, q, scores.data(), out);
    });
    read_from(&Panel::input, layer.heads * cache.value_size);
    multiply(layer.output, &Panel::projected);
  }

  void cross_attention(const Layer& layer, const KeyValues& source) {
    read_from(input, batch.stack.width);
    multiply(layer.cross_query, &Panel::projected);
    const int64_t heads_per_key = layer.cross_heads / layer.cross_kv_heads;
    attend_rows(layer.cross_heads, source, [&](const BatchRow& query, int64_t h, const float* q, float* out) {
      const int64_t number = query.number / batch.rows_per_source;
      const float* keys = source.keys + number * source.key_row + h / heads_per_key * source.key_head;
      const float* values = source.values + number * source.value_row + h / heads_per_key * source.value_head;
      attend_to(
          batch.source_lengths[number], [&](int64_t j) { return keys + j * source.key_column; },
          [&](int64_t j) { return values + j * source.value_column; }, source.key_size, source.value_size,
          batch.source_mask ? batch.source_mask + number * batch.source_mask_row : nullptr, layer.cross_scale, q,
          scores.data(), out);
    });
    read_from(&Panel::input, layer.cross_heads * source.value_size);
    multiply(layer.cross_output, &Panel::projected);
  }

  void feedforward(const Layer& layer) {
    read_from(input, batch.stack.width);
    if (layer.gate.format) multiply(layer.gate, &Panel::gate);
    multiply(layer.up, &Panel::hidden);
    for (Panel& p : panels)
      for (int64_t i = 0; i < layer.up.rows * p.step(); i += LANES) {
        const Floats up = load<Floats>(p.hidden + i);
        store(p.hidden + i, layer.gate.format ? activate(load<Floats>(p.gate + i), layer.activation) * up
                                              : activate(up, layer.activation));
      }
    read_from(&Panel::hidden, layer.up.rows);
    multiply(layer.down, &Panel::projected);
  }
};

}  // namespace panels
}  // namespace
