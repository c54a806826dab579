// NativeStack.run: the tokens of a pass through a whole stack of blocks in one call.  New keys and values are written to
// the pages of their rows.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "attention/paged_attention.h"
#include "linear/thread_products.h"
#include "stack/stack_weights.h"

namespace {

// Keys and values that the tokens of a pass see: those of their own row, or of its source.
struct SeenKeys {
  std::vector<pages::Pools> pools;    // one a block that reads them
  const int32_t* tables = nullptr;    // (rows, table_step)
  int64_t table_step = 0;
  std::vector<int64_t> end;           // of each token: it sees the keys before this one
};

struct Pass {
  const NativeStack& stack;
  std::vector<int64_t> rows, columns;          // of x (R, T, D), for each token
  std::vector<int64_t> index, positions;       // in its row: the number of tokens before it; for rotary angles
  SeenKeys own, source;
  bool is_exact = false;                       // products of a few tokens are those of many
  std::vector<const float*> rotary_cos, rotary_sin, biases;
  std::vector<int64_t> rotary_pairs, bias_columns;

  int64_t tokens() const { return int64_t(rows.size()); }

  // Whether all keys that two tokens see lie in the same pages: tokens of one row, or of beams with one source.
  bool have_one_table(const SeenKeys& seen, int64_t a, int64_t b) const {
    const int32_t *first = seen.tables + rows[a] * seen.table_step, *second = seen.tables + rows[b] * seen.table_step;
    return first == second || std::equal(first, first + pages::count_pages(std::max(seen.end[a], seen.end[b])), second);
  }
};

// Part of the attention of one block: some tokens that see one row of keys, and some of the parts of these.
struct AttentionItem {
  int64_t token, tokens, part, parts;
};

// How the threads share out the attention of blocks with one window.
struct AttentionWork {
  int64_t groups = 0;
  bool is_split = false;                // whether the parts of one row are different items, to be added up afterwards
  std::vector<AttentionItem> items;
  std::vector<int64_t> costs;           // of the items before each, and of all

  // The first of all (item, group) whose work thread `number` of `count` does.
  int64_t begin(int64_t number, int64_t count) const {
    if (number == count) return int64_t(items.size()) * groups;
    const int64_t cost = costs.back() * groups * number / count;
    const int64_t item = std::upper_bound(costs.begin(), costs.end() - 1, cost / groups) - costs.begin() - 1;
    return item * groups + (cost - costs[item] * groups) / (costs[item + 1] - costs[item]);
  }
};

constexpr int64_t TOKENS_TOGETHER = 16;  // that attend to one row of keys while a part of it is in the cache

inline int64_t first_key(int64_t end, int64_t window) { return window ? std::max<int64_t>(0, end - window) : 0; }

inline AttentionWork share_attention(const Pass& pass, const SeenKeys& seen, int64_t window, int64_t groups,
                                     int64_t threads) {
  using pages::PART;
  AttentionWork work{groups};
  std::vector<AttentionItem> blocks;
  bool has_parts = false;
  for (int64_t n = 0, size; n < pass.tokens(); n += size) {
    const int64_t limit = std::min(TOKENS_TOGETHER, pass.tokens() - n);
    for (size = 1; size < limit && pass.have_one_table(seen, n, n + size);) ++size;
    const auto [least, most] = std::minmax_element(&seen.end[n], &seen.end[n] + size);
    const int64_t first = first_key(*least, window) / PART, end = (*most + PART - 1) / PART;
    blocks.push_back({n, size, first, std::max<int64_t>(0, end - first)});
    has_parts = has_parts || end - first > 1;
  }
  work.is_split = has_parts && int64_t(blocks.size()) * groups < 4 * threads;
  const auto add = [&](const AttentionItem& item) {
    const int64_t first = std::max(first_key(seen.end[item.token], window), item.part * PART);
    const int64_t end = std::min(seen.end[item.token + item.tokens - 1], (item.part + item.parts) * PART);
    work.items.push_back(item);
    work.costs.push_back(work.costs.back() + item.tokens * (std::max<int64_t>(0, end - first) + PART / 16));
  };
  work.costs = {0};
  for (const AttentionItem& block : blocks) {
    if (!work.is_split || block.parts <= 1) {
      add(block);
      continue;
    }
    for (int64_t part = 0; part < block.parts; ++part) add({block.token, block.tokens, block.part + part, 1});
  }
  return work;
}

// -- one thread's way through a stack ---------------------------------------------------------------------------------

// All threads go through the stack together: the rows of a matrix, the heads and, where they are many, the tokens are
// shared out, with a barrier wherever one thread needs what others computed.  With a few tokens each thread keeps its
// own copy of the residual stream x (tokens, D) and repeats the small operations (norms, sums).

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

// -- what a pass reads, checked ---------------------------------------------------------------------------------------

// The tokens of each row: counts[r] new ones after lengths[r] others.
void set_tokens(Pass& pass, int64_t rows, int64_t columns, const at::Tensor& lengths, const at::Tensor& counts,
                const OptionalTensor& positions, bool causal) {
  check_tensor("lengths", lengths, at::kLong, {rows}), check_tensor("counts", counts, at::kLong, {rows});
  if (positions) check_tensor("positions", *positions, at::kLong, {rows, columns});
  const int64_t *before = lengths.const_data_ptr<int64_t>(), *news = counts.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows; ++r) {
    check_range(Argument("counts", r), news[r], 0, columns);
    if (news[r]) check_range(Argument("lengths", r), before[r], 0, MAX_SIZE);
    for (int64_t t = 0; t < news[r]; ++t) {
      const int64_t index = before[r] + t;
      pass.rows.push_back(r), pass.columns.push_back(t), pass.index.push_back(index);
      pass.positions.push_back(positions ? positions->const_data_ptr<int64_t>()[r * columns + t] : index);
      check_range(Argument("positions", r), pass.positions.back(), 0, MAX_SIZE);
      pass.own.end.push_back(causal ? index + 1 : before[r] + news[r]);
    }
  }
}

// Every page that is read or written must be in all pools.
void check_tables(const Argument& name, const Pass& pass, const SeenKeys& seen, const at::Tensor& tables, int64_t pages) {
  const int32_t* entries = tables.const_data_ptr<int32_t>();
  const int64_t size = tables.size(1);
  for (int64_t n = 0; n < pass.tokens(); ++n) {
    if (n + 1 < pass.tokens() && pass.rows[n + 1] == pass.rows[n]) continue;  // the last token sees most
    const int64_t needed = pages::count_pages(seen.end[n]);
    TORCH_CHECK(needed <= size, name, " has ", size, " pages a row; row ", pass.rows[n], " needs ", needed);
    for (int64_t p = 0; p < needed; ++p)
      check_range(name, entries[pass.rows[n] * size + p], 0, pages - 1);
  }
}

void set_pools(SeenKeys& seen, const char* key_name, const char* value_name, const Tensors& keys, const Tensors& values,
               const std::vector<std::array<int64_t, 3>>& sizes, int64_t& pages) {
  check_count(key_name, keys.size(), sizes.size(), "block that reads them");
  check_count(value_name, values.size(), sizes.size(), "block that reads them");
  pages = MAX_SIZE;
  for (size_t n = 0; n < sizes.size(); ++n) {
    const auto [heads, key_size, value_size] = sizes[n];
    const Argument key(key_name, n), value(value_name, n);
    check_heads(key, keys[n], {ANY, heads, pages::PAGE, key_size}), pages::check_page(key, keys[n]);
    check_heads(value, values[n], {keys[n].size(0), heads, pages::PAGE, value_size}), pages::check_page(value, values[n]);
    pages = std::min(pages, keys[n].size(0));
    seen.pools.emplace_back(keys[n], values[n]);
  }
}

// Tables by position: cosines and sines (positions, pairs), biases (heads, distances).
void set_position_tables(Pass& pass, const Tensors& cos, const Tensors& sin, const Tensors& biases) {
  int64_t length = 0, distances = 0;
  for (int64_t n = 0; n < pass.tokens(); ++n)
    length = std::max(length, pass.positions[n] + 1), distances = std::max(distances, pass.own.end[n]);
  check_count("rotary_sin", sin.size(), cos.size(), "element of rotary_cos");
  const auto check_length = [](const Argument& name, int64_t given, int64_t needed) {
    TORCH_CHECK(given >= needed, name, " has ", given, " positions; ", needed, " are needed");
  };
  for (size_t n = 0; n < cos.size(); ++n) {
    check_tensor(Argument("rotary_cos", n), cos[n], at::kFloat, {ANY, ANY});
    check_tensor(Argument("rotary_sin", n), sin[n], at::kFloat, {cos[n].size(0), cos[n].size(1)});
    check_length(Argument("rotary_cos", n), cos[n].size(0), length);
    pass.rotary_cos.push_back(cos[n].const_data_ptr<float>()), pass.rotary_sin.push_back(sin[n].const_data_ptr<float>());
    pass.rotary_pairs.push_back(cos[n].size(1));
  }
  for (size_t n = 0; n < biases.size(); ++n) {
    check_tensor(Argument("position_biases", n), biases[n], at::kFloat, {ANY, ANY});
    check_length(Argument("position_biases", n), biases[n].size(1), distances);
    pass.biases.push_back(biases[n].const_data_ptr<float>()), pass.bias_columns.push_back(biases[n].size(1));
  }
  for (const Layer& l : pass.stack.layers) {
    TORCH_CHECK(l.rotary_table < int64_t(cos.size()), "rotary_cos has ", cos.size(), " tables; table ", l.rotary_table,
                " is needed");
    TORCH_CHECK(l.rotary_table < 0 || 2 * cos[l.rotary_table].size(1) <= l.key_size(),
                Argument("rotary_cos", l.rotary_table), " has more pairs than a head of ", l.key_size(), " has");
    TORCH_CHECK(l.bias_table < int64_t(biases.size()), "position_biases has ", biases.size(), " tables; table ",
                l.bias_table, " is needed");
    TORCH_CHECK(l.bias_table < 0 || biases[l.bias_table].size(0) == l.heads, Argument("position_biases", l.bias_table),
                " does not have a row for each of ", l.heads, " heads");
  }
}

// Scratch that the threads hand to each other, in memory that the calling thread keeps between passes.
PassScratch allocate_scratch(const Pass& pass, int64_t threads, Vectors<CacheLine>& memory) {
  PassScratch s;
  const NativeStack& stack = pass.stack;
  int64_t longest = 0, parts_memory = 0;
  for (const SeenKeys* seen : {&pass.own, &pass.source})
    for (int64_t end : seen->end) longest = std::max(longest, end);
  s.parts_of_row = std::max<int64_t>(1, (longest + pages::PART - 1) / pages::PART);
  const auto add_work = [&](auto& works, const SeenKeys& seen, int64_t window, int64_t groups, int64_t heads, int64_t V) {
    auto [at, is_new] = works.try_emplace({window, groups});
    if (is_new) at->second = share_attention(pass, seen, window, groups, threads);
    const int64_t parts = at->second.is_split ? s.parts_of_row : 1;
    if (int64_t(s.sums.size()) < pass.tokens() * heads * parts) s.sums.resize(pass.tokens() * heads * parts);
    if (parts > 1 || at->second.is_split) parts_memory = std::max(parts_memory, heads * parts * V);
  };
  size_t source = 0;
  for (size_t l = 0; l < stack.layers.size(); ++l) {
    const Layer& layer = stack.layers[l];
    s.query_step = std::max({s.query_step, layer.query.rows, layer.cross_query.rows});
    s.key_step = std::max(s.key_step, layer.key.rows), s.value_step = std::max(s.value_step, layer.value.rows);
    add_work(s.own_work, pass.own, layer.window, layer.kv_heads, layer.heads, layer.value_size());
    if (layer.cross_heads)
      add_work(s.source_work, pass.source, 0, layer.cross_kv_heads, layer.cross_heads, pass.source.pools[source++].value_size);
  }
  const std::pair<float**, int64_t> buffers[] = {
      {&s.x, stack.width},         {&s.normed, stack.max_inputs}, {&s.other, stack.max_inputs}, {&s.queries, s.query_step},
      {&s.keys, s.key_step},       {&s.values, s.value_step},     {&s.attended, stack.max_heads}, {&s.hidden, stack.max_hidden},
      {&s.gates, stack.max_hidden}, {&s.first, stack.width},      {&s.second, stack.width},       {&s.parts, parts_memory}};
  const int64_t rows = (pass.tokens() + LANES - 1) / LANES * LANES;  // whole panels
  const auto lines = [&](int64_t size) { return (rows * size * 4 + 63) / 64; };
  int64_t total = 0;
  for (const auto& [buffer, size] : buffers) total += lines(size);
  CacheLine* next = memory.resize(total);
  for (const auto& [buffer, size] : buffers) *buffer = reinterpret_cast<float*>(next), next += lines(size);
  return s;
}

at::Tensor run_pass(const Pass& pass, const at::Tensor& x) {
  const at::Tensor input = x.contiguous(), out = at::zeros_like(input);
  thread_local Vectors<CacheLine> memory;
  const int64_t products = pass.stack.width * pass.stack.max_hidden * pass.tokens();
  PassScratch scratch = allocate_scratch(pass, count_threads(products), memory);
  SharedRows& shared = shared_rows(pass.is_exact);
  run_threads(products, [&](Barrier& barrier, int number, int count) {
    PassThread(pass, scratch, shared, barrier, number, count)
        .run(input.const_data_ptr<float>(), static_cast<float*>(out.data_ptr()), x.size(1));
  });
  return out;
}

// x (R, T, D): the first counts[r] tokens of row r follow lengths[r] others -> (R, T, D), zeros for the rest.  keys,
// values: pools (pages, heads, PAGE, size) of each block; tables (R, pages a row) say which are those of a row.  Sources
// likewise, for blocks with cross-attention.  positions (R, T): those of rotary angles, if not the number of tokens before.
// causal: whether a token attends up to itself, else to all of its row.
at::Tensor run_stack(const c10::intrusive_ptr<NativeStack>& stack, const at::Tensor& x, const at::Tensor& lengths,
                     const at::Tensor& counts, const at::Tensor& tables, const Tensors& keys, const Tensors& values,
                     const Tensors& source_keys, const Tensors& source_values, const OptionalTensor& source_tables,
                     const OptionalTensor& source_lengths, const OptionalTensor& positions, const Tensors& rotary_cos,
                     const Tensors& rotary_sin, const Tensors& position_biases, bool exact, bool causal) {
  stack->check_weights();
  check_dtype("x", x, at::kFloat), check_shape("x", x, {ANY, ANY, stack->width});
  const int64_t rows = x.size(0), columns = x.size(1);
  Pass pass{*stack};
  pass.is_exact = exact;
  set_tokens(pass, rows, columns, lengths, counts, positions, causal);
  std::vector<std::array<int64_t, 3>> own, source;
  for (const Layer& l : stack->layers) {
    own.push_back({l.kv_heads, l.key_size(), l.value_size()});
    if (l.cross_heads) source.push_back({l.cross_kv_heads, l.cross_query.rows / l.cross_heads, ANY});
  }
  int64_t pages;
  set_pools(pass.own, "keys", "values", keys, values, own, pages);
  check_tensor("tables", tables, at::kInt, {rows, ANY});
  check_tables("tables", pass, pass.own, tables, pages);
  pass.own.tables = tables.const_data_ptr<int32_t>(), pass.own.table_step = tables.size(1);
  set_pools(pass.source, "source_keys", "source_values", source_keys, source_values, source, pages);
  if (!source.empty()) {
    TORCH_CHECK(source_tables && source_lengths, "source_tables and source_lengths are needed by blocks with cross-attention");
    check_tensor("source_tables", *source_tables, at::kInt, {rows, ANY});
    check_tensor("source_lengths", *source_lengths, at::kLong, {rows});
    for (int64_t row : pass.rows) {
      const int64_t length = source_lengths->const_data_ptr<int64_t>()[row];
      check_range(Argument("source_lengths", row), length, 0, MAX_SIZE);
      pass.source.end.push_back(length);
    }
    check_tables("source_tables", pass, pass.source, *source_tables, pages);
    pass.source.tables = source_tables->const_data_ptr<int32_t>(), pass.source.table_step = source_tables->size(1);
    size_t number = 0;
    for (const Layer& l : stack->layers)
      if (l.cross_heads) check_source(l, source_values[number], number), ++number;
  }
  set_position_tables(pass, rotary_cos, rotary_sin, position_biases);
  return pass.tokens() ? run_pass(pass, x) : at::zeros_like(x);
}

}  // namespace
