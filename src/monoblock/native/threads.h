// One step of a stack by several threads.
//
// All go through the stack together.  Each keeps the residual stream x (rows, D) for itself and does the small things
// (norms, sums) as the others do; the rows of a matrix and the heads are shared out, and a barrier stands where one
// needs what the others have made.
#pragma once

#include <sched.h>

#include <atomic>
#include <utility>

#include "plan.h"

namespace {

// Threads that have nothing to do spin for a little while, then let others run.
struct Barrier {
  const int threads;
  std::atomic<int> here{0}, round{0};

  explicit Barrier(int count) : threads(count) {}

  void wait() {
    if (threads == 1) return;
    const int mine = round.load(std::memory_order_relaxed);
    if (here.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      here.store(0, std::memory_order_relaxed);
      round.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == mine; ++spins) {
      if (spins > 2000) sched_yield();
#if defined(__AVX2__)
      _mm_pause();
#endif
    }
  }
};

struct Rows {  // (B, G, columns, size) keys and values of one block
  float *keys, *values;
  int64_t key_row, key_head, key_step, value_row, value_head, value_step, columns, sources, value_size;
};

struct Step {
  const Plan& plan;
  int64_t batch;
  const int64_t* lengths;
  const bool* real;  // rows that take their token; null: all
  std::vector<Rows> own, sources;
  std::vector<const float*> cos, sin, biases;
  std::vector<int64_t> pairs, reach;  // reach: columns of a bias table
  const bool* seen;
  int64_t seen_row, longest;
  float *queries, *keys, *values, *looked, *hidden, *gates, *first, *second;  // shared
  int64_t query_step, key_step, value_step;
};

struct Job {
  const Matrix* matrix;
  float* y;
  int64_t stride;
};

struct Thread {
  const Step& step;
  Barrier& barrier;
  const int number, count;
  std::vector<float> x, normed_x, beside, scores, sums, scales, leasts, query, key;

  Thread(const Step& s, Barrier& b, int n, int c) : step(s), barrier(b), number(n), count(c) {
    const Plan& plan = s.plan;
    x.resize(s.batch * plan.width);
    normed_x.assign(s.batch * plan.widest, 0.0f);
    scores.resize(s.longest + LANES);
  }

  // -- products: each thread some rows of the matrices

  std::pair<int64_t, int64_t> share(int64_t size) const { return {size * number / count, size * (number + 1) / count}; }

  Input input(const Matrix& m, const float* from, int64_t stride) {
    const int64_t tail = m.kind == Matrix::DENSE ? m.columns % CHUNK : 0, columns = m.columns - tail;
    Input in{from, nullptr, step.batch, columns, columns / m.groups, columns ? m.groups : 0, stride};
    if (m.kind == Matrix::DENSE) return in;
    if (int64_t(scales.size()) < ROWS * m.groups) scales.resize(ROWS * m.groups), leasts.resize(ROWS * m.groups);
    if (m.kind != Matrix::INT4) return in;
    sums.resize(step.batch * m.groups * LANES);
    for (int64_t b = 0; b < step.batch; ++b)
      for (int64_t g = 0; g < m.groups; ++g) {
        Floats total = {};
        for (int64_t i = 0; i < in.group; i += LANES) total += load<Floats>(from + b * stride + g * in.group + i);
        std::memcpy(sums.data() + (b * m.groups + g) * LANES, &total, sizeof total);
      }
    in.sums = sums.data();
    return in;
  }

  void rows(const Matrix& m, const float* from, int64_t stride, int64_t begin, int64_t end, float* y,
            int64_t y_stride) {
    const Input in = input(m, from, stride);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t row = n * ROWS;
      const int size = int(std::min<int64_t>(ROWS, m.rows - row));
      switch (m.kind) {
        case Matrix::DENSE: dense(m, in, row, size, y, y_stride); break;
        case Matrix::INT8:
          band(Int8{static_cast<const int8_t*>(m.weight), m.scale, m.columns, m.groups}, in, row, size, m.bias, y,
               y_stride, scales.data(), leasts.data());
          break;
        default:
          band(Int4{static_cast<const uint8_t*>(m.weight), m.scale, m.least, m.columns, m.groups}, in, row, size,
               m.bias, y, y_stride, scales.data(), leasts.data());
      }
    }
  }

  void dense(const Matrix& m, const Input& in, int64_t row, int size, float* y, int64_t y_stride) {
    const float* weight = static_cast<const float*>(m.weight);
    band(Single{weight, m.columns}, in, row, size, m.bias, y, y_stride, nullptr, nullptr);
    if (in.columns == m.columns) return;
    for (int64_t b = 0; b < step.batch; ++b)  // rows that are no whole chunks
      for (int r = 0; r < size; ++r)
        y[b * y_stride + row + r] += dot(in.x + b * in.stride + in.columns, weight + (row + r) * m.columns + in.columns,
                                         m.columns - in.columns);
  }

  void products(std::initializer_list<Job> jobs, const float* from, int64_t stride) {
    int64_t total = 0, before = 0;
    for (const Job& job : jobs) total += bands(*job.matrix);
    const auto [begin, end] = share(total);
    for (const Job& job : jobs) {
      const int64_t size = bands(*job.matrix);
      const int64_t b = std::max(begin - before, int64_t(0)), e = std::min(end - before, size);
      if (b < e) rows(*job.matrix, from, stride, b, e, job.y, job.stride);
      before += size;
    }
  }

  static int64_t bands(const Matrix& m) { return (m.rows + ROWS - 1) / ROWS; }

  // -- sublayers

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

  void heads(const Layer& layer, const Rows& held) {
    const int64_t H = layer.heads, G = layer.groups, K = layer.query.rows / H, V = layer.value.rows / G;
    const auto [begin, end] = share(step.batch * H);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t b = n / H, h = n % H, g = h / (H / G), length = step.lengths[b];
      const bool takes = !step.real || step.real[b];
      head(layer, step.queries + b * step.query_step + h * K, K, h, layer.query_norm, b, query);
      head(layer, step.keys + b * step.key_step + g * K, K, g, layer.key_norm, b, key);
      const float* own = step.values + b * step.value_step + g * V;
      const int64_t first = layer.window ? std::max(int64_t(0), length + 1 - layer.window) : 0;
      float* keys = held.keys + b * held.key_row + g * held.key_head;
      float* values = held.values + b * held.value_row + g * held.value_head;
      Sight sight{keys, values, held.key_step, held.value_step, K, V, first, length - first, held.columns - 1};
      if (takes) sight.own_key = key.data(), sight.own_value = own;
      if (layer.bias >= 0) sight.bias = step.biases[layer.bias] + h * step.reach[layer.bias];
      if (layer.bias >= 0 && !takes) ++sight.bias;  // it stands one further on than what it sees
      if (layer.sinks) sight.sink = layer.sinks + h;
      sight.scale = layer.scale, sight.softcap = layer.softcap;
      look(sight, query.data(), scores.data(), step.looked + b * step.plan.heads + h * V);
      if (takes && h % (H / G) == 0) {  // into a column that nobody reads in this step
        const int64_t column = length % (held.columns - 1);
        std::copy_n(key.data(), K, keys + column * held.key_step);
        std::copy_n(own, V, values + column * held.value_step);
      }
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
