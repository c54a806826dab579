// One thread's way through a stack for a few tokens.
//
// All threads go through the stack together.  Each keeps its own copy of the residual stream x (rows, D) and repeats
// the small operations (norms, sums); the rows of a matrix and the heads are shared out, with a barrier wherever one
// thread needs what the others computed.
#pragma once

#include "linear/thread_products.h"

namespace {

class StackThread : public ThreadProducts {
 public:
  StackThread(const StackStep& s, Barrier& b, int number, int count, const float* input)
      : ThreadProducts(s.batch, *s.many_rows, b, number, count), step(s), x(input, input + s.batch * s.stack.width),
        normed(s.batch * s.stack.max_inputs, 0.0f), scores(s.max_keys + LANES) {}

  void run() {
    for (size_t l = 0, source = 0; l < step.stack.layers.size(); ++l) {
      const Layer& layer = step.stack.layers[l];
      run_layer(layer, step.caches[l], layer.cross_heads ? &step.sources[source++] : nullptr);
    }
  }

  // Write the result, by one thread: all have the same.
  void finish(float* out) {
    if (number != 0) return;
    const int64_t D = step.stack.width;
    for (int64_t b = 0; b < step.batch; ++b) apply_norm(step.stack.norm, x.data() + b * D, D);
    std::copy(x.begin(), x.end(), out);
  }

 private:
  const StackStep& step;
  std::vector<float> x, normed, feedforward_input, scores, query, key;

  void run_layer(const Layer& layer, const KeyValues& cache, const KeyValues* source) {
    const float* input = norm_into(norm_before(layer, layer.attention), normed);
    if (layer.residual != SEQUENTIAL) {
      const bool is_shared = layer.residual == PARALLEL_SHARED;
      const float* other = is_shared ? input : norm_into(layer.feedforward.norm, feedforward_input);
      self_attention(layer, cache, input, step.first);
      feedforward(layer, other, step.second);
      add_residual(layer, layer.attention, step.first);
      add_residual(layer, layer.feedforward, step.second);
      return;
    }
    self_attention(layer, cache, input, step.first);
    add_residual(layer, layer.attention, step.first);
    if (source) {
      cross_attention(layer, *source, norm_into(norm_before(layer, layer.cross), normed), step.second);
      add_residual(layer, layer.cross, step.second);
    }
    feedforward(layer, norm_into(norm_before(layer, layer.feedforward), normed), step.first);
    add_residual(layer, layer.feedforward, step.first);
  }

  Norm norm_before(const Layer& layer, const Sublayer& sub) const {
    return layer.norm_place == PRE || layer.norm_place == SANDWICH ? sub.norm : Norm{};
  }

  // norm(x), each row with space for whole groups behind it.
  const float* norm_into(const Norm& norm, std::vector<float>& to) {
    const int64_t D = step.stack.width, W = step.stack.max_inputs;
    if (to.empty()) to.assign(step.batch * W, 0.0f);
    for (int64_t b = 0; b < step.batch; ++b) {
      std::copy_n(x.data() + b * D, D, to.data() + b * W);
      apply_norm(norm, to.data() + b * W, D);
    }
    return to.data();
  }

  // x + the output of a sublayer, normed, gained and scaled as the block says.
  void add_residual(const Layer& layer, const Sublayer& sub, const float* y) {
    const int64_t D = step.stack.width;
    for (int64_t b = 0; b < step.batch; ++b) {
      std::copy_n(y + b * D, D, normed.data());
      if (layer.norm_place == OUTPUT) apply_norm(sub.norm, normed.data(), D);
      if (layer.norm_place == SANDWICH) apply_norm(sub.output_norm, normed.data(), D);
      transform(x.data() + b * D, D, [&](Floats v, int64_t i, int live) {
        Floats update = load_lanes(normed.data() + i, live);
        if (sub.gain) update *= load_lanes(sub.gain + i, live);
        return v + update * layer.residual_scale;
      });
      if (layer.norm_place == POST) apply_norm(sub.norm, x.data() + b * D, D);
    }
  }

  // -- attention ------------------------------------------------------------------------------------------------------

  void self_attention(const Layer& layer, const KeyValues& cache, const float* input, float* y) {
    const NativeStack& stack = step.stack;
    multiply({{&layer.query, step.queries, step.query_step},
              {&layer.key, step.keys, step.key_step},
              {&layer.value, step.values, step.value_step}},
             input, stack.max_inputs);
    barrier.wait();
    if (layer.clip || layer.qk_norm == WIDTH) clip_and_norm_rows(layer);
    if (step.tokens > 1) store_all(layer, cache);
    attend_heads(layer, cache);
    barrier.wait();
    multiply({{&layer.output, y, stack.width}}, step.attended, stack.max_heads);
    barrier.wait();
  }

  // What concerns whole rows of queries, keys and values, before they are split into heads.
  void clip_and_norm_rows(const Layer& layer) {
    const auto [begin, end] = share(step.batch);
    for (int64_t b = begin; b < end; ++b) {
      float *q = step.queries + b * step.query_step, *k = step.keys + b * step.key_step;
      if (layer.clip) {
        clip(q, layer.query.rows, layer.clip), clip(k, layer.key.rows, layer.clip);
        clip(step.values + b * step.value_step, layer.value.rows, layer.clip);
      }
      if (layer.qk_norm == WIDTH)
        apply_norm(layer.query_norm, q, layer.query.rows), apply_norm(layer.key_norm, k, layer.key.rows);
    }
    barrier.wait();
  }

  static void clip(float* v, int64_t size, float limit) {
    transform(v, size, [&](Floats v, int64_t, int) {
      v = v > limit ? all(limit) : v;
      return v < -limit ? all(-limit) : v;
    });
  }

  bool is_active(int64_t token) const { return !step.active || step.active[token / step.tokens]; }

  // One head of a query or a key, normed and rotated to its position.
  void prepare_head(const Layer& layer, const float* from, int64_t size, int64_t head, const Norm& norm, int64_t token,
                    std::vector<float>& to) {
    to.assign(from, from + size);
    if (layer.qk_norm == PER_HEAD) apply_norm(norm, to.data(), size);
    if (layer.qk_norm == EACH_HEAD) apply_norm(norm, to.data(), size, head);
    if (layer.rotary_table >= 0) {
      const int64_t pairs = step.rotary_pairs[layer.rotary_table], angles = step.lengths[token] * pairs;
      apply_rotary(to.data(), step.rotary_cos[layer.rotary_table] + angles,
                   step.rotary_sin[layer.rotary_table] + angles, pairs, layer.rotary_interleaved);
    }
  }

  // Write the key and the value of one head of a token into its column; the last column of a cache is a spare.
  void store_head(const KeyValues& cache, int64_t token, int64_t g, const float* k, const float* v, int64_t K,
                  int64_t V) {
    const int64_t row = token / step.tokens, column = step.lengths[token] % (cache.columns - 1);
    std::copy_n(k, K, cache.keys + row * cache.key_row + g * cache.key_head + column * cache.key_column);
    std::copy_n(v, V, cache.values + row * cache.value_row + g * cache.value_head + column * cache.value_column);
  }

  // Where a row has several tokens, all are stored before any attends.
  void store_all(const Layer& layer, const KeyValues& cache) {
    const int64_t G = layer.kv_heads, K = layer.key_size(), V = layer.value_size();
    const auto [begin, end] = share(step.batch * G);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t b = n / G, g = n % G;
      if (!is_active(b)) continue;
      prepare_head(layer, step.keys + b * step.key_step + g * K, K, g, layer.key_norm, b, key);
      store_head(cache, b, g, key.data(), step.values + b * step.value_step + g * V, K, V);
    }
    barrier.wait();
  }

  void attend_heads(const Layer& layer, const KeyValues& cache) {
    const int64_t H = layer.heads, G = layer.kv_heads, K = layer.key_size(), V = layer.value_size();
    const bool is_single = step.tokens == 1;
    const auto [begin, end] = share(step.batch * H);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t b = n / H, h = n % H, g = h / (H / G), length = step.lengths[b], row = b / step.tokens;
      const int64_t first = layer.window ? std::max(int64_t(0), length + 1 - layer.window) : 0;
      const int64_t count = length - first + (is_active(b) && !is_single ? 1 : 0);
      const float* own_value = step.values + b * step.value_step + g * V;
      prepare_head(layer, step.queries + b * step.query_step + h * K, K, h, layer.query_norm, b, query);
      KeyRange range{cache.keys + row * cache.key_row + g * cache.key_head,
                     cache.values + row * cache.value_row + g * cache.value_head,
                     cache.key_column,
                     cache.value_column,
                     K,
                     V,
                     first,
                     count,
                     cache.columns - 1};
      if (is_single && is_active(b)) {
        prepare_head(layer, step.keys + b * step.key_step + g * K, K, g, layer.key_norm, b, key);
        range.own_key = key.data(), range.own_value = own_value;
      }
      if (layer.bias_table >= 0) range.bias = step.biases[layer.bias_table] + h * step.bias_columns[layer.bias_table];
      if (layer.bias_table >= 0 && !is_active(b)) ++range.bias;  // the nearest key of an idle row is one position back
      if (layer.sinks) range.sink = layer.sinks + h;
      range.scale = layer.scale, range.softcap = layer.softcap;
      attend(range, query.data(), scores.data(), step.attended + b * step.stack.max_heads + h * V);
      if (h == H - 1) zero_padding(layer.output, step.attended + b * step.stack.max_heads, H * V);
      if (range.own_key && h % (H / G) == 0)
        store_head(cache, b, g, key.data(), own_value, K, V);  // read from the next step on
    }
  }

  void cross_attention(const Layer& layer, const KeyValues& source, const float* input, float* y) {
    const int64_t H = layer.cross_heads, G = layer.cross_kv_heads, K = layer.cross_query.rows / H;
    multiply({{&layer.cross_query, step.queries, step.query_step}}, input, step.stack.max_inputs);
    barrier.wait();
    const int64_t V = source.value_size, rows_per_source = step.batch / source.rows;
    const auto [begin, end] = share(step.batch * H);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t b = n / H, h = n % H, g = h / (H / G), row = b / rows_per_source;
      KeyRange range{source.keys + row * source.key_row + g * source.key_head,
                     source.values + row * source.value_row + g * source.value_head,
                     source.key_column,
                     source.value_column,
                     K,
                     V,
                     0,
                     source.columns,
                     source.columns};
      if (step.source_mask) range.mask = step.source_mask + row * step.source_mask_row;
      range.scale = layer.cross_scale;
      attend(range, step.queries + b * step.query_step + h * K, scores.data(),
             step.attended + b * step.stack.max_heads + h * V);
      if (h == H - 1) zero_padding(layer.cross_output, step.attended + b * step.stack.max_heads, H * V);
    }
    barrier.wait();
    multiply({{&layer.cross_output, y, step.stack.width}}, step.attended, step.stack.max_heads);
    barrier.wait();
  }

  // -- feed-forward ---------------------------------------------------------------------------------------------------

  void feedforward(const Layer& layer, const float* input, float* y) {
    const int64_t F = layer.up.rows, stride = step.stack.max_hidden;
    const auto [begin, end] = share(bands(layer.up));
    if (layer.gate.format) {
      prepare(layer.gate, input, step.stack.max_inputs);
      multiply_bands(layer.gate, input, step.stack.max_inputs, begin, end, step.gates, stride);
    }
    prepare(layer.up, input, step.stack.max_inputs, layer.gate.format ? &layer.gate : nullptr);
    multiply_bands(layer.up, input, step.stack.max_inputs, begin, end, step.hidden, stride);
    const int64_t low = begin * ROWS, size = std::min(end * ROWS, F) - low;
    for (int64_t b = 0; b < step.batch && size > 0; ++b)
      transform(step.hidden + b * stride + low, size, [&](Floats v, int64_t i, int live) {
        if (!layer.gate.format) return activate(v, layer.activation);
        Floats gate = load_lanes(step.gates + b * stride + low + i, live);
        if (!layer.clamp) return activate(gate, layer.activation) * v;
        const Floats limit = all(layer.clamp);
        v = v > limit ? limit : v < -limit ? -limit : v;
        return activate(gate > limit ? limit : gate, layer.activation) * (v + 1.0f);
      });
    for (int64_t b = number; b < step.batch; b += count) zero_padding(layer.down, step.hidden + b * stride, F);
    barrier.wait();
    multiply({{&layer.down, y, step.stack.width}}, step.hidden, stride);
    barrier.wait();
  }
};

}  // namespace
