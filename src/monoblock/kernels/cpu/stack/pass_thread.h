// One thread's way through a stack for the tokens of a pass.
//
// All threads go through the stack together: the rows of a matrix, the heads and, where they are many, the tokens are
// shared out, with a barrier wherever one thread needs what others computed.  With a few tokens each thread keeps its
// own copy of the residual stream x (tokens, D) and repeats the small operations (norms, sums).
#pragma once

#include <map>

#include "linear/thread_products.h"
#include "stack/pass_arguments.h"

namespace {

constexpr int64_t REPEATED_TOKENS = 8;  // at most, for which each thread repeats the small operations

// What the threads of a pass hand to each other.
struct PassScratch {
  float *x, *normed, *other, *queries, *keys, *values, *attended, *hidden, *gates, *first, *second, *parts;
  int64_t query_step = 0, key_step = 0, value_step = 0;
  std::map<std::pair<int64_t, int64_t>, AttentionWork> own_work, source_work;  // by window and groups
  std::vector<pages::Attended> sums;  // (tokens, heads, parts)
  int64_t parts_of_row = 1;
};

class PassThread : public ThreadProducts {
 public:
  PassThread(const Pass& pass, PassScratch& scratch, SharedRows& rows, Barrier& b, int number, int count)
      : ThreadProducts(pass.tokens(), rows, b, number, count), pass(pass), stack(pass.stack), to(scratch),
        is_repeated(batch <= REPEATED_TOKENS), x(scratch.x), normed(scratch.normed), other(scratch.other) {
    if (is_repeated) {
      memory.resize(batch * (stack.width + 2 * stack.max_inputs));
      x = memory.data(), normed = x + batch * stack.width, other = normed + batch * stack.max_inputs;
    }
    update.resize(stack.width);
  }

  // x (R, T, D) -> out (R, T, D).
  void run(const float* input, float* out, int64_t columns) {
    const int64_t D = stack.width;
    const auto place = [&](int64_t n) { return (pass.rows[n] * columns + pass.columns[n]) * D; };
    each_token([&](int64_t n) { std::copy_n(input + place(n), D, x + n * D); });
    for (size_t l = 0, source = 0; l < stack.layers.size(); ++l) {
      const Layer& layer = stack.layers[l];
      run_layer(layer, pass.own.pools[l], layer.cross_heads ? &pass.source.pools[source++] : nullptr);
    }
    const auto [begin, end] = share(batch);
    for (int64_t n = begin; n < end; ++n) {
      apply_norm(stack.norm, x + n * D, D);
      std::copy_n(x + n * D, D, out + place(n));
    }
  }

 private:
  const Pass& pass;
  const NativeStack& stack;
  PassScratch& to;
  const bool is_repeated;
  float *x, *normed, *other;
  std::vector<float> memory, update;
  pages::AttentionScratch attention;

  // use(token) for those whose residual stream this thread computes.
  template <class Use>
  void each_token(Use use) const {
    const auto [begin, end] = is_repeated ? std::pair{int64_t(0), batch} : share(batch);
    for (int64_t n = begin; n < end; ++n) use(n);
  }

  void run_layer(const Layer& layer, const pages::Pools& own, const pages::Pools* source) {
    norm_into(norm_before(layer, layer.attention), normed);
    const bool is_parallel = layer.residual != SEQUENTIAL;
    if (layer.residual == PARALLEL) norm_into(layer.feedforward.norm, other);
    finish_norms();
    self_attention(layer, own);
    if (is_parallel) feedforward(layer, layer.residual == PARALLEL ? other : normed, to.second);
    add_residual(layer, layer.attention, to.first);
    if (is_parallel) return add_residual(layer, layer.feedforward, to.second);
    if (source) {
      norm_into(norm_before(layer, layer.cross), normed);
      finish_norms();
      cross_attention(layer, *source);
      add_residual(layer, layer.cross, to.second);
    }
    norm_into(norm_before(layer, layer.feedforward), normed);
    finish_norms();
    feedforward(layer, normed, to.first);
    add_residual(layer, layer.feedforward, to.first);
  }

  static Norm norm_before(const Layer& layer, const Sublayer& sub) {
    return layer.norm_place == PRE || layer.norm_place == SANDWICH ? sub.norm : Norm{};
  }

  // norm(x), each row with zeros for whole groups behind it.
  void norm_into(const Norm& norm, float* out) const {
    const int64_t D = stack.width, W = stack.max_inputs;
    each_token([&](int64_t n) {
      std::copy_n(x + n * D, D, out + n * W);
      apply_norm(norm, out + n * W, D);
      std::fill(out + n * W + D, out + (n + 1) * W, 0.0f);
    });
  }

  void finish_norms() {
    if (!is_repeated) barrier.wait();
  }

  // x + the output of a sublayer, normed, gained and scaled as the block says.
  void add_residual(const Layer& layer, const Sublayer& sub, const float* y) {
    const int64_t D = stack.width;
    each_token([&](int64_t n) {
      const float* added = y + n * D;
      if (layer.norm_place == OUTPUT || layer.norm_place == SANDWICH) {
        std::copy_n(added, D, update.data()), added = update.data();
        apply_norm(layer.norm_place == OUTPUT ? sub.norm : sub.output_norm, update.data(), D);
      }
      transform(x + n * D, D, [&](Floats v, int64_t i, int live) {
        Floats change = load_lanes(added + i, live);
        if (sub.gain) change *= load_lanes(sub.gain + i, live);
        return v + change * layer.residual_scale;
      });
      if (layer.norm_place == POST) apply_norm(sub.norm, x + n * D, D);
    });
  }

  // -- attention ------------------------------------------------------------------------------------------------------

  void self_attention(const Layer& layer, const pages::Pools& own) {
    multiply({{&layer.query, to.queries, to.query_step},
              {&layer.key, to.keys, to.key_step},
              {&layer.value, to.values, to.value_step}},
             normed, stack.max_inputs);
    barrier.wait();
    if (layer.clip || layer.qk_norm == WIDTH) clip_and_norm_rows(layer);
    prepare_heads(layer, own);
    barrier.wait();
    attend(to.own_work.at({layer.window, layer.kv_heads}), pass.own, own, layer.heads, layer.scale, layer.window, &layer);
    multiply_heads(layer.output, layer.heads * own.value_size, to.first);
  }

  void cross_attention(const Layer& layer, const pages::Pools& source) {
    multiply({{&layer.cross_query, to.queries, to.query_step}}, normed, stack.max_inputs);
    barrier.wait();
    attend(to.source_work.at({0, layer.cross_kv_heads}), pass.source, source, layer.cross_heads, layer.cross_scale, 0, nullptr);
    multiply_heads(layer.cross_output, layer.cross_heads * source.value_size, to.second);
  }

  // The product of what all heads attended to.
  void multiply_heads(const WeightMatrix& output, int64_t inputs, float* y) {
    for (int64_t n = number; n < batch; n += count) zero_padding(output, to.attended + n * stack.max_heads, inputs);
    barrier.wait();
    multiply({{&output, y, stack.width}}, to.attended, stack.max_heads);
    barrier.wait();
  }

  // What concerns whole rows of queries, keys and values, before they are split into heads.
  void clip_and_norm_rows(const Layer& layer) {
    const auto [begin, end] = share(batch);
    for (int64_t n = begin; n < end; ++n) {
      float *q = to.queries + n * to.query_step, *k = to.keys + n * to.key_step, *v = to.values + n * to.value_step;
      if (layer.clip)
        clip(q, layer.query.rows, layer.clip), clip(k, layer.key.rows, layer.clip), clip(v, layer.value.rows, layer.clip);
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

  // Norm and rotate every head of a query and a key, and write keys and values to their pages.
  void prepare_heads(const Layer& layer, const pages::Pools& own) {
    const int64_t H = layer.heads, G = layer.kv_heads, K = own.key_size, V = own.value_size;
    const auto [begin, end] = share(batch * (H + G));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / (H + G), h = item % (H + G), g = h - H;
      if (h < H) {
        prepare_head(layer, to.queries + n * to.query_step + h * K, K, h, layer.query_norm, n);
        continue;
      }
      float* key = to.keys + n * to.key_step + g * K;
      prepare_head(layer, key, K, g, layer.key_norm, n);
      const int64_t i = pass.index[n], page = table(pass.own, n)[i / pages::PAGE], column = i % pages::PAGE;
      std::copy_n(key, K, own.key(page, g) + column * K);
      std::copy_n(to.values + n * to.value_step + g * V, V, own.value(page, g) + column * V);
    }
  }

  void prepare_head(const Layer& layer, float* head, int64_t size, int64_t h, const Norm& norm, int64_t n) const {
    if (layer.qk_norm == PER_HEAD) apply_norm(norm, head, size);
    if (layer.qk_norm == EACH_HEAD) apply_norm(norm, head, size, h);
    if (layer.rotary_table < 0) return;
    const int64_t pairs = pass.rotary_pairs[layer.rotary_table], angles = pass.positions[n] * pairs;
    apply_rotary(head, pass.rotary_cos[layer.rotary_table] + angles, pass.rotary_sin[layer.rotary_table] + angles, pairs,
                 layer.rotary_interleaved);
  }

  const int32_t* table(const SeenKeys& seen, int64_t n) const { return seen.tables + pass.rows[n] * seen.table_step; }

  // All heads of queries attend to the keys that are seen.  `layer` has the options of self-attention.
  void attend(const AttentionWork& work, const SeenKeys& seen, const pages::Pools& pools, int64_t heads, float scale,
              int64_t window, const Layer* layer) {
    const int64_t together = heads / work.groups, V = pools.value_size, parts = work.is_split ? to.parts_of_row : 1;
    const auto sum_at = [&](int64_t n, int64_t h, int64_t part) -> pages::Attended& {
      return to.sums[(n * heads + h) * parts + (work.is_split ? part : 0)];
    };
    const auto values_at = [&](int64_t n, int64_t h, int64_t part) {
      return work.is_split ? to.parts + ((n * heads + h) * parts + part) * V : to.attended + n * stack.max_heads + h * V;
    };
    const auto finish = [&](int64_t n, int64_t h, const pages::Attended& sum, float* out) {
      pages::finish(sum, layer && layer->sinks ? layer->sinks + h : nullptr, out, V);
    };
    const int64_t last = work.begin(number + 1, count);
    for (int64_t unit = work.begin(number, count); unit < last; ++unit) {
      const AttentionItem& item = work.items[unit / work.groups];
      const int64_t g = unit % work.groups, first_head = g * together;
      for (int64_t n = item.token; n < item.token + item.tokens; ++n)
        for (int64_t h = first_head; h < first_head + together; ++h) sum_at(n, h, item.part) = {};
      for (int64_t part = item.part; part < item.part + item.parts; ++part) {
        attention.queries.clear();
        for (int64_t n = item.token; n < item.token + item.tokens; ++n) {
          const int64_t first = std::max(first_key(seen.end[n], window), part * pages::PART);
          const int64_t end = std::min(seen.end[n], (part + 1) * pages::PART);
          for (int64_t h = first_head; first < end && h < first_head + together; ++h) {
            const float* bias = nullptr;
            if (layer && layer->bias_table >= 0)
              bias = pass.biases[layer->bias_table] + h * pass.bias_columns[layer->bias_table];
            attention.queries.push_back({to.queries + n * to.query_step + h * pools.key_size, first, end, scale,
                                         layer ? layer->softcap : 0, bias, seen.end[n] - 1, &sum_at(n, h, part),
                                         values_at(n, h, part)});
          }
        }
        pages::attend({pools, table(seen, item.token), g}, attention);
      }
      if (work.is_split) continue;
      for (int64_t n = item.token; n < item.token + item.tokens; ++n)
        for (int64_t h = first_head; h < first_head + together; ++h) finish(n, h, sum_at(n, h, 0), values_at(n, h, 0));
    }
    if (!work.is_split) return;
    barrier.wait();
    const auto [begin, end] = share(batch * heads);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / heads, h = item % heads;
      pages::Attended sum;
      float* out = to.attended + n * stack.max_heads + h * V;
      for (int64_t part = first_key(seen.end[n], window) / pages::PART; part * pages::PART < seen.end[n]; ++part)
        pages::add_part(sum, out, sum_at(n, h, part), values_at(n, h, part), V);
      finish(n, h, sum, out);
    }
  }

  // -- feed-forward ---------------------------------------------------------------------------------------------------

  void feedforward(const Layer& layer, const float* input, float* y) {
    const int64_t F = layer.up.rows, stride = stack.max_hidden;
    const auto [begin, end] = share(bands(layer.up));
    const int64_t low = begin * ROWS, high = std::max(low, std::min(end * ROWS, F));
    const bool in_panels = has_many_rows(layer.up) && has_many_rows(layer.down) &&
                           (!layer.gate.format || has_many_rows(layer.gate));
    const auto multiply_share = [&](const WeightMatrix& m, const WeightMatrix* before, float* out) {
      prepare(m, input, stack.max_inputs, before);
      if (in_panels) return multiply_to_panels(m, low, high, out);
      multiply_bands(m, input, stack.max_inputs, begin, end, out, stride);
    };
    if (layer.gate.format) multiply_share(layer.gate, nullptr, to.gates);
    multiply_share(layer.up, layer.gate.format ? &layer.gate : nullptr, to.hidden);
    if (in_panels) {
      for (int64_t p = 0; p < rows_in_panels.count(); ++p)
        activate_part(layer, p * PANEL * F + low * rows_in_panels.step(p), (high - low) * rows_in_panels.step(p));
      prepare_panels(layer.down, to.hidden, F);
      const auto [first, last] = share(bands(layer.down));
      multiply_bands(layer.down, nullptr, 0, first, last, y, stack.width);
    } else {
      for (int64_t n = 0; n < batch; ++n) activate_part(layer, n * stride + low, high - low);
      for (int64_t n = number; n < batch; n += count) zero_padding(layer.down, to.hidden + n * stride, F);
      barrier.wait();
      multiply({{&layer.down, y, stack.width}}, to.hidden, stride);
    }
    barrier.wait();
  }

  // The activation of `size` hidden numbers, times their gates.
  void activate_part(const Layer& layer, int64_t first, int64_t size) const {
    transform(to.hidden + first, size, [&](Floats v, int64_t i, int live) {
      if (!layer.gate.format) return activate(v, layer.activation);
      Floats gate = load_lanes(to.gates + first + i, live);
      if (!layer.clamp) return activate(gate, layer.activation) * v;
      const Floats limit = all(layer.clamp);
      v = v > limit ? limit : v < -limit ? -limit : v;
      return activate(gate > limit ? limit : gate, layer.activation) * (v + 1.0f);
    });
  }
};

}  // namespace
