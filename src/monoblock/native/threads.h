// One step of a stack by several threads.
//
// All go through the stack together.  Each keeps the residual stream x (rows, D) for itself and does the small things
// (norms, sums) as the others do; the rows of a matrix and the heads are shared out, and a barrier stands where one
// needs what the others have made.
#pragma once

#include "products.h"

namespace {

struct Thread : Products {
  std::vector<float> x, normed_x, beside, scores, query, key;

  Thread(const Step& s, Barrier& b, int n, int c) : Products(s, b, n, c) {
    const Plan& plan = s.plan;
    x.resize(s.batch * plan.width);
    normed_x.assign(s.batch * plan.widest, 0.0f);
    scores.resize(s.longest + LANES);
  }

  // norm(x) with room for whole groups.
  const float* read(const Norm& norm, std::vector<float>& to) {
    const int64_t D = step.plan.width, W = step.plan.widest;
    if (to.empty()) to.assign(step.batch * W, 0.0f);
    for (int64_t b = 0; b < step.batch; ++b) {
      std::copy_n(x.data() + b * D, D, to.data() + b * W);
      normed(norm, to.data() + b * W, D);
    }
    return to.data();
  }

  // What is added to x: normed, gained, scaled as the block says.
  void add(const Layer& layer, const Sublayer& sub, const float* y) {
    const int64_t D = step.plan.width;
    for (int64_t b = 0; b < step.batch; ++b) {
      std::copy_n(y + b * D, D, normed_x.data());
      if (layer.place == OUTPUT) normed(sub.norm, normed_x.data(), D);
      if (layer.place == SANDWICH) normed(sub.output_norm, normed_x.data(), D);
      each(x.data() + b * D, D, [&](Floats v, int64_t i, int live) {
        Floats added = part(normed_x.data() + i, live);
        if (sub.gain) added *= part(sub.gain + i, live);
        return v + added * layer.residual_scale;
      });
      if (layer.place == POST) normed(sub.norm, x.data() + b * D, D);
    }
  }

  Norm before(const Layer& layer, const Sublayer& sub) const {
    return layer.place == PRE || layer.place == SANDWICH ? sub.norm : Norm{};
  }

  // One head as it leaves its product: normed, turned.
  void head(const Layer& layer, const float* from, int64_t size, int64_t number, const Norm& norm, int64_t row,
            std::vector<float>& to) {
    to.assign(from, from + size);
    if (layer.over == HEAD) normed(norm, to.data(), size);
    if (layer.over == EACH_HEAD) normed(norm, to.data(), size, number);
    if (layer.turn >= 0) {
      const int64_t pairs = step.pairs[layer.turn], at = step.lengths[row];
      turned(to.data(), step.cos[layer.turn] + at * pairs, step.sin[layer.turn] + at * pairs, pairs, layer.interleaved);
    }
  }

  bool takes(int64_t token) const { return !step.real || step.real[token / step.tokens]; }

  // A head's key and value of one token into its column.
  void store(const Rows& held, int64_t token, int64_t g, const float* made, const float* value, int64_t K, int64_t V) {
    const int64_t row = token / step.tokens, column = step.lengths[token] % (held.columns - 1);
    std::copy_n(made, K, held.keys + row * held.key_row + g * held.key_head + column * held.key_step);
    std::copy_n(value, V, held.values + row * held.value_row + g * held.value_head + column * held.value_step);
  }

  // Where a row has several tokens, all are stored before any looks back.
  void store_all(const Layer& layer, const Rows& held) {
    const int64_t G = layer.groups, K = layer.key.rows / G, V = layer.value.rows / G;
    const auto [begin, end] = share(step.batch * G);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t b = n / G, g = n % G;
      if (!takes(b)) continue;
      head(layer, step.keys + b * step.key_step + g * K, K, g, layer.key_norm, b, key);
      store(held, b, g, key.data(), step.values + b * step.value_step + g * V, K, V);
    }
    barrier.wait();
  }

  void heads(const Layer& layer, const Rows& held) {
    const int64_t H = layer.heads, G = layer.groups, K = layer.query.rows / H, V = layer.value.rows / G;
    const bool alone = step.tokens == 1;
    const auto [begin, end] = share(step.batch * H);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t b = n / H, h = n % H, g = h / (H / G), length = step.lengths[b], row = b / step.tokens;
      const int64_t first = layer.window ? std::max(int64_t(0), length + 1 - layer.window) : 0;
      const int64_t seen = length - first + (takes(b) && !alone ? 1 : 0);
      const float* own = step.values + b * step.value_step + g * V;
      head(layer, step.queries + b * step.query_step + h * K, K, h, layer.query_norm, b, query);
      Sight sight{held.keys + row * held.key_row + g * held.key_head,
                  held.values + row * held.value_row + g * held.value_head, held.key_step, held.value_step, K, V, first,
                  seen, held.columns - 1};
      if (alone && takes(b)) {
        head(layer, step.keys + b * step.key_step + g * K, K, g, layer.key_norm, b, key);
        sight.own_key = key.data(), sight.own_value = own;
      }
      if (layer.bias >= 0) sight.bias = step.biases[layer.bias] + h * step.reach[layer.bias];
      if (layer.bias >= 0 && !takes(b)) ++sight.bias;  // it stands one further on than what it sees
      if (layer.sinks) sight.sink = layer.sinks + h;
      sight.scale = layer.scale, sight.softcap = layer.softcap;
      look(sight, query.data(), scores.data(), step.looked + b * step.plan.heads + h * V);
      if (h == H - 1) clear(layer.output, step.looked + b * step.plan.heads, H * V);
      if (sight.own_key && h % (H / G) == 0) store(held, b, g, key.data(), own, K, V);  // nobody reads it in this step
    }
  }

  void clipped(float* x, int64_t size, float most) {
    each(x, size, [&](Floats v, int64_t, int) {
      v = v > most ? all(most) : v;
      return v < -most ? all(-most) : v;
    });
  }

  void attention(const Layer& layer, const Rows& held, const float* from, float* y) {
    const Plan& plan = step.plan;
    products({{&layer.query, step.queries, step.query_step},
              {&layer.key, step.keys, step.key_step},
              {&layer.value, step.values, step.value_step}}, from, plan.widest);
    barrier.wait();
    if (layer.clip || layer.over == WIDTH) prepared(layer);
    if (step.tokens > 1) store_all(layer, held);
    heads(layer, held);
    barrier.wait();
    products({{&layer.output, y, plan.width}}, step.looked, plan.heads);
    barrier.wait();
  }

  // What must be done to whole rows before heads are cut from them.
  void prepared(const Layer& layer) {
    const auto [begin, end] = share(step.batch);
    for (int64_t b = begin; b < end; ++b) {
      float *q = step.queries + b * step.query_step, *k = step.keys + b * step.key_step;
      if (layer.clip) {
        clipped(q, layer.query.rows, layer.clip), clipped(k, layer.key.rows, layer.clip);
        clipped(step.values + b * step.value_step, layer.value.rows, layer.clip);
      }
      if (layer.over == WIDTH) normed(layer.query_norm, q, layer.query.rows), normed(layer.key_norm, k, layer.key.rows);
    }
    barrier.wait();
  }

  void cross(const Layer& layer, const Rows& held, const float* from, float* y) {
    const int64_t H = layer.cross_heads, G = layer.cross_groups, K = layer.cross_query.rows / H;
    products({{&layer.cross_query, step.queries, step.query_step}}, from, step.plan.widest);
    barrier.wait();
    const int64_t V = held.value_size, copies = step.batch / held.sources;
    const auto [begin, end] = share(step.batch * H);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t b = n / H, h = n % H, g = h / (H / G), source = b / copies;
      Sight sight{held.keys + source * held.key_row + g * held.key_head,
                  held.values + source * held.value_row + g * held.value_head, held.key_step, held.value_step, K, V, 0,
                  held.columns, held.columns};
      if (step.seen) sight.seen = step.seen + source * step.seen_row;
      sight.scale = layer.cross_scale;
      look(sight, step.queries + b * step.query_step + h * K, scores.data(), step.looked + b * step.plan.heads + h * V);
      if (h == H - 1) clear(layer.cross_output, step.looked + b * step.plan.heads, H * V);
    }
    barrier.wait();
    products({{&layer.cross_output, y, step.plan.width}}, step.looked, step.plan.heads);
    barrier.wait();
  }

  void feedforward(const Layer& layer, const float* from, float* y) {
    const int64_t F = layer.up.rows, stride = step.plan.hidden;
    const auto [begin, end] = share(bands(layer.up));
    if (layer.gate.kind) rows(layer.gate, from, step.plan.widest, begin, end, step.gates, stride);
    rows(layer.up, from, step.plan.widest, begin, end, step.hidden, stride);
    const int64_t low = begin * ROWS, size = std::min(end * ROWS, F) - low;
    for (int64_t b = 0; b < step.batch && size > 0; ++b)
      each(step.hidden + b * stride + low, size, [&](Floats v, int64_t i, int live) {
        if (!layer.gate.kind) return activated(v, layer.activation);
        Floats gate = part(step.gates + b * stride + low + i, live);
        if (!layer.clamp) return activated(gate, layer.activation) * v;
        const Floats most = all(layer.clamp);
        v = v > most ? most : v < -most ? -most : v;
        return activated(gate > most ? most : gate, layer.activation) * (v + 1.0f);
      });
    for (int64_t b = number; b < step.batch; b += count) clear(layer.down, step.hidden + b * stride, F);
    barrier.wait();
    products({{&layer.down, y, step.plan.width}}, step.hidden, stride);
    barrier.wait();
  }

  void finish(float* out) {
    const int64_t D = step.plan.width;
    for (int64_t b = 0; b < step.batch; ++b) normed(step.plan.last, x.data() + b * D, D);
    std::copy(x.begin(), x.end(), out);
  }

  void run(const Layer& layer, int64_t number_of) {
    const float* from = read(before(layer, layer.attention), normed_x);
    if (layer.residual != SEQUENTIAL) {
      const bool shared = layer.residual == PARALLEL_SHARED;
      const float* other = shared ? from : read(layer.feedforward.norm, beside);
      attention(layer, step.own[number_of], from, step.first);
      feedforward(layer, other, step.second);
      add(layer, layer.attention, step.first);
      add(layer, layer.feedforward, step.second);
      return;
    }
    attention(layer, step.own[number_of], from, step.first);
    add(layer, layer.attention, step.first);
    if (layer.cross_heads) {
      cross(layer, step.sources[number_of], read(before(layer, layer.cross), normed_x), step.second);
      add(layer, layer.cross, step.second);
    }
    feedforward(layer, read(before(layer, layer.feedforward), normed_x), step.first);
    add(layer, layer.feedforward, step.first);
  }
};

}  // namespace
