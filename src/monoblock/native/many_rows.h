// One thread's share of a step of many rows through a stack: its panels pass every weight together.
#pragma once

#include <algorithm>
#include <exception>
#include <mutex>
#include <vector>

#include "panel.h"
#include "plan.h"

namespace {
namespace panels {

// Keys and values of one block, (rows, heads, columns, size) each, and the steps between them.
struct Held {
  float *keys, *values;
  int64_t key_row, key_head, key_column, value_row, value_head, value_column, size, value_size;
};

// A row and the tokens it sees: token j lies in row tokens[j] of the keys and values, in column j.
struct Row {
  int64_t number;  // in the keys and values
  const int64_t* tokens;
  int64_t count, at;  // its own keys and values go to column `at`
};

struct Many {
  const Plan& plan;
  const float* x = nullptr;  // (rows, D)
  std::vector<Row> rows;  // those that go on
  int64_t copies = 1;     // rows that look at one source
  std::vector<Held> own, sources;
  std::vector<int64_t> source_lengths;  // real columns of each source, as far as its last
  const bool* seen = nullptr;           // (sources, source columns)
  int64_t seen_row = 0;
};

struct Panel {
  int64_t first, count;  // of the rows that go on
  int broad;
  float *x, *read, *made, *hidden, *gate;  // (features, rows): the stream, what a product reads and writes
  int64_t step() const { return int64_t(broad) * LANES; }
};

// Lane by lane the products of two heads, to be added up.
inline Floats multiplied(const float* a, const float* b, int64_t size) {
  Floats total = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) total += load<Floats>(a + i) * load<Floats>(b + i);
  if (i < size) total += part(a + i, int(size - i)) * part(b + i, int(size - i));
  return total;
}

// softmax(q k' scale) v over `count` tokens (Vaswani et al. 2017, eq. 1), key(j) and value(j) where they lie; zeros where
// none is seen.  `scores` has room for whole vectors.
template <class Key, class Value>
inline void look_at(int64_t count, Key key, Value value, int64_t size, int64_t value_size, const bool* seen, float scale,
                    const float* q, float* scores, float* out) {
  const float never = -std::numeric_limits<float>::infinity();
  Floats highest = all(never), total = {};
  for (int64_t j = 0; j < count; j += LANES) {
    const int64_t some = std::min<int64_t>(LANES, count - j);
    Floats parts[LANES];
    for (int64_t n = 0; n < some; ++n) parts[n] = multiplied(q, key(j + n), size);
    for (int64_t n = some; n < LANES; ++n) parts[n] = Floats{};
    Floats found = before(all_sums(parts) * scale, some, never);
    if (seen)
      for (int64_t n = 0; n < some; ++n)
        if (!seen[j + n]) found[n] = never;
    store(scores + j, found);
    highest = found > highest ? found : highest;
  }
  const float best = largest_of(highest);
  if (best == never) return void(std::fill_n(out, value_size, 0.0f));
  for (int64_t j = 0; j < count; j += LANES) {
    const Floats found = load<Floats>(scores + j), share = found == never ? Floats{} : exponential(found - best);
    store(scores + j, share);
    total += share;
  }
  const float by = 1.0f / sum(total);
  for (int64_t i = 0; i < value_size; i += 4 * LANES) {
    const int64_t width = std::min<int64_t>(4 * LANES, value_size - i);
    Floats sums[4] = {};
    const auto add = [&]<int P>() {
      for (int64_t j = 0; j < count; ++j) {
        const float *from = value(j) + i, share = scores[j];
        UNROLL for (int p = 0; p < P; ++p) sums[p] += share * load<Floats>(from + p * LANES);
      }
    };
    if (width == 4 * LANES) {
      add.template operator()<4>();
    } else if (width == 3 * LANES) {
      add.template operator()<3>();
    } else if (width == 2 * LANES) {
      add.template operator()<2>();
    } else {
      for (int64_t j = 0; j < count; ++j)
        for (int p = 0; p * LANES < width; ++p)
          sums[p] += scores[j] * part(value(j) + i + p * LANES, int(std::min<int64_t>(LANES, width - p * LANES)));
    }
    for (int p = 0; p < 4; ++p) sums[p] *= by;
    std::memcpy(out + i, sums, 4 * width);
  }
}

// What went wrong first in one of several threads: none may throw past the others, so it is thrown when all have ended.
class Failure {
 public:
  template <class Work>
  void keep(Work work) noexcept {
    try {
      work();
    } catch (...) {
      const std::lock_guard<std::mutex> alone(lock);
      if (!first) first = std::current_exception();
    }
  }

  void tell() const {
    if (first) std::rethrow_exception(first);
  }

 private:
  std::mutex lock;
  std::exception_ptr first;
};

// Whether this says all that a stack does.
inline bool says(const Plan& plan) {
  for (const Layer& l : plan.layers) {
    if (l.residual != SEQUENTIAL || l.window || l.turn >= 0 || l.bias >= 0 || l.over || l.softcap || l.clip || l.clamp)
      return false;
    for (const Matrix* m : {&l.query, &l.key, &l.value, &l.output, &l.cross_query, &l.cross_output, &l.gate, &l.up, &l.down})
      if (m->kind != Matrix::DENSE && m->kind != Matrix::NONE) return false;
    if (l.sinks) return false;
  }
  return true;
}

class Share {
 public:
  Share(const Many& many, int64_t first, int64_t until, std::vector<float>& memory) : many(many) { lay(first, until, memory); }

  std::vector<Panel> panels;

  void run() {
    for (Panel& p : panels) enter(p);
    for (size_t l = 0; l < many.plan.layers.size(); ++l) {
      const Layer& layer = many.plan.layers[l];
      begin(layer.attention, layer.place);
      attention(layer, l);
      end(layer.attention, layer);
      if (layer.cross_heads) {
        begin(layer.cross, layer.place);
        cross(layer, l);
        end(layer.cross, layer);
      }
      begin(layer.feedforward, layer.place);
      feedforward(layer);
      end(layer.feedforward, layer);
    }
    for (Panel& p : panels)
      if (many.plan.last.kind) normed(many.plan.last, p.x, many.plan.width, p.broad, p.x);
  }

  // What has come out, row by row.
  void leave(float* to) const {
    const int64_t width = many.plan.width;
    for (const Panel& p : panels) {
      transposed(p.x, width, p.step(), p.step(), rows, width);
      for (int64_t i = 0; i < p.count; ++i) std::copy_n(rows + i * width, width, to + row(p, i).number * width);
    }
  }

 private:
  const Many& many;
  float *rows, *looked;  // of one panel, row by row: what attention reads and writes
  float* Panel::*given = &Panel::x;
  std::vector<float> scores;

  void lay(int64_t first, int64_t until, std::vector<float>& memory) {
    const Plan& plan = many.plan;
    int64_t made = plan.width, longest = 0, gates = 0;
    for (const Layer& l : plan.layers)
      made = std::max({made, l.query.rows + l.key.rows + l.value.rows, l.cross_query.rows}),
      gates = std::max(gates, l.gate.rows);
    for (const Row& row : many.rows) longest = std::max(longest, row.count);
    for (int64_t length : many.source_lengths) longest = std::max(longest, length);
    const int64_t wide = std::max(plan.heads, plan.width), features = plan.width + wide + made + plan.hidden + gates;
    const int64_t beside = (made + wide) * BROAD * LANES;
    memory.resize(std::max<size_t>(memory.size(), (until - first + LANES * BROAD) * features + beside + LINE));
    scores.resize(longest + 2 * LANES);
    float* next = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
    rows = next, looked = rows + made * BROAD * LANES, next += beside;
    while (first < until) {
      const int broad = until - first > LANES ? BROAD : 1;
      Panel p{first, std::min<int64_t>(broad * LANES, until - first), broad};
      for (auto [to, size] : {std::pair{&p.x, plan.width}, {&p.read, wide}, {&p.made, made}, {&p.hidden, plan.hidden},
                              {&p.gate, gates}})
        *to = next, next += size * p.step();
      panels.push_back(p), first += p.count;
    }
  }

  // All panels with one weight, a block of its rows at a time.
  void product(const Matrix& m, float* Panel::*from, float* Panel::*to, int64_t offset = 0) {
    const float* weight = static_cast<const float*>(m.weight);
    for (int64_t n = 0; n < m.rows; n += BLOCK) {
      const int64_t rows = std::min(BLOCK, m.rows - n), left = m.rows - n - rows;
      Soon soon(weight + (n + rows) * m.columns, std::min(BLOCK, left) * m.columns, rows, m.columns, panels.size());
      for (Panel& p : panels)
        tiles(p.broad, weight + n * m.columns, rows, m.columns, p.*from, m.bias ? m.bias + n : nullptr,
              p.*to + (offset + n) * p.step(), soon);
    }
  }

  const Row& row(const Panel& p, int64_t i) const { return many.rows[p.first + i]; }

  // The keys and then the values of a token go where they will be looked for.
  static void remember(const Held& held, const Row& row, int64_t groups, const float* from) {
    float* key = held.keys + row.number * held.key_row + row.at * held.key_column;
    float* value = held.values + row.number * held.value_row + row.at * held.value_column;
    for (int64_t g = 0; g < groups; ++g, from += held.size) std::copy_n(from, held.size, key + g * held.key_head);
    for (int64_t g = 0; g < groups; ++g, from += held.value_size)
      std::copy_n(from, held.value_size, value + g * held.value_head);
  }

  void enter(Panel& p) {
    const int64_t width = many.plan.width;
    std::fill_n(rows, width * p.step(), 0.0f);
    for (int64_t i = 0; i < p.count; ++i) std::copy_n(many.x + (p.first + i) * width, width, rows + i * width);
    transposed(rows, p.step(), width, width, p.x, p.step());
  }

  // What the first products of a sublayer read: the stream, or the stream normed.
  void begin(const Sublayer& sub, int64_t place) {
    const bool before = (place == PRE || place == SANDWICH) && sub.norm.kind;
    given = before ? &Panel::read : &Panel::x;
    if (before)
      for (Panel& p : panels) normed(sub.norm, p.x, many.plan.width, p.broad, p.read);
  }

  // What a sublayer made is added to the stream.
  void end(const Sublayer& sub, const Layer& layer) {
    const int64_t width = many.plan.width;
    for (Panel& p : panels) {
      if (layer.place == OUTPUT && sub.norm.kind) normed(sub.norm, p.made, width, p.broad, p.made);
      if (layer.place == SANDWICH) normed(sub.output_norm, p.made, width, p.broad, p.made);
      for (int64_t k = 0; k < width; ++k) {
        const float by = (sub.gain ? sub.gain[k] : 1.0f) * layer.residual_scale;
        for (int64_t i = k * p.step(); i < (k + 1) * p.step(); i += LANES)
          store(p.x + i, load<Floats>(p.x + i) + by * load<Floats>(p.made + i));
      }
      if (layer.place == POST && sub.norm.kind) normed(sub.norm, p.x, width, p.broad, p.x);
    }
  }

  void attention(const Layer& layer, size_t number) {
    const int64_t Q = layer.query.rows, K = layer.key.rows, V = layer.value.rows;
    product(layer.query, given, &Panel::made);
    product(layer.key, given, &Panel::made, Q);
    product(layer.value, given, &Panel::made, Q + K);
    const Held& held = many.own[number];
    for (const Panel& p : panels) {
      transposed(p.made + Q * p.step(), K + V, p.step(), p.step(), rows, K + V);
      for (int64_t i = 0; i < p.count; ++i) remember(held, row(p, i), layer.groups, rows + i * (K + V));
    }
    const int64_t out = layer.heads * held.value_size, each_group = layer.heads / layer.groups;
    for (Panel& p : panels) {
      transposed(p.made, Q, p.step(), p.step(), rows, Q);
      for (int64_t i = 0; i < p.count; ++i)
        for (int64_t h = 0; h < layer.heads; ++h) {
          const Row& own = row(p, i);
          const float *keys = held.keys + h / each_group * held.key_head, *values = held.values + h / each_group * held.value_head;
          look_at(
              own.count, [&](int64_t j) { return keys + own.tokens[j] * held.key_row + j * held.key_column; },
              [&](int64_t j) { return values + own.tokens[j] * held.value_row + j * held.value_column; }, held.size,
              held.value_size, nullptr, layer.scale, rows + i * Q + h * held.size, scores.data(),
              looked + i * out + h * held.value_size);
        }
      transposed(looked, p.step(), out, out, p.read, p.step());
    }
    product(layer.output, &Panel::read, &Panel::made);
  }

  void cross(const Layer& layer, size_t number) {
    const int64_t Q = layer.cross_query.rows;
    product(layer.cross_query, given, &Panel::made);
    const Held& held = many.sources[number];
    const int64_t out = layer.cross_heads * held.value_size, each_group = layer.cross_heads / layer.cross_groups;
    for (Panel& p : panels) {
      transposed(p.made, Q, p.step(), p.step(), rows, Q);
      for (int64_t i = 0; i < p.count; ++i) {
        const int64_t source = row(p, i).number / many.copies, count = many.source_lengths[source];
        for (int64_t h = 0; h < layer.cross_heads; ++h) {
          const float* keys = held.keys + source * held.key_row + h / each_group * held.key_head;
          const float* values = held.values + source * held.value_row + h / each_group * held.value_head;
          look_at(
              count, [&](int64_t j) { return keys + j * held.key_column; },
              [&](int64_t j) { return values + j * held.value_column; }, held.size, held.value_size,
              many.seen ? many.seen + source * many.seen_row : nullptr, layer.cross_scale, rows + i * Q + h * held.size,
              scores.data(), looked + i * out + h * held.value_size);
        }
      }
      transposed(looked, p.step(), out, out, p.read, p.step());
    }
    product(layer.cross_output, &Panel::read, &Panel::made);
  }

  void feedforward(const Layer& layer) {
    if (layer.gate.kind) product(layer.gate, given, &Panel::gate);
    product(layer.up, given, &Panel::hidden);
    for (Panel& p : panels)
      for (int64_t i = 0; i < layer.up.rows * p.step(); i += LANES) {
        const Floats up = load<Floats>(p.hidden + i);
        store(p.hidden + i, layer.gate.kind ? activated(load<Floats>(p.gate + i), layer.activation) * up
                                            : activated(up, layer.activation));
      }
    product(layer.down, &Panel::hidden, &Panel::made);
  }
};

}  // namespace panels
}  // namespace
