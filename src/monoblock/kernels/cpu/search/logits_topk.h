// The product of rows with the output table and the top k of each row: logits are ranked as they are computed and never
// written to memory.
#pragma once

#include <sched.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "stack/batched_step.h"
#include "search/topk.h"

namespace {
namespace panels {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// The output table, and the results of each row of the batch.
struct LogitsTopK {
  const WeightMatrix& table;  // (tokens, width)
  int64_t tokens, width;
  float scale;
  const std::vector<int64_t>& suppressed;  // never among the top k, though they keep their probability
  int64_t k;
  std::vector<float> values, log_sums;  // (rows, k) logits, largest first; (rows,) log of the sum of exponentials
  std::vector<int64_t> ids;             // (rows, k), -1 where a row has fewer

  void resize(int64_t rows) { values.assign(rows * k, MINUS_INFINITY), log_sums.resize(rows), ids.resize(rows * k); }
};

// The top k of the rows of one panel, a block of logits at a time.
class PanelTopK {
 public:
  PanelTopK(LogitsTopK& o, const Panel& p) : out(o), panel(p) {
    for (int c = 0; c < MAX_VECTORS; ++c) highest[c] = all(-1e30f), least[c] = all(MINUS_INFINITY);
    std::fill_n(out.values.data() + p.first * out.k, p.count * out.k, MINUS_INFINITY);
    std::fill_n(out.ids.data() + p.first * out.k, p.count * out.k, int64_t(-1));
  }

  void add(const float* logits, int64_t first, int64_t count) {
    const int64_t step = panel.step();
    for (int c = 0; c < panel.vectors; ++c) {
      const float* from = logits + c * LANES;
      Floats peak = load<Floats>(from);
      for (int64_t n = 1; n < count; ++n) {
        const Floats v = load<Floats>(from + n * step);
        peak = v > peak ? v : peak;
      }
      if (greater_lanes(peak, least[c]))
        for (int64_t n = 0; n < count; ++n)
          if (const uint32_t lanes = greater_lanes(load<Floats>(from + n * step), least[c]))
            offer(from + n * step, c, first + n, lanes);
      peak = peak > highest[c] ? peak : highest[c];
      const Floats before = total[c] * exponential(highest[c] - peak);
      highest[c] = peak, total[c] = add_exponentials(before, from, count, step, peak);
    }
  }

  void finish() {
    for (int64_t row = 0; row < panel.count; ++row) {
      const int c = int(row / LANES), lane = int(row % LANES);
      out.log_sums[panel.first + row] = highest[c][lane] + std::log(total[c][lane]);
    }
  }

 private:
  LogitsTopK& out;
  Panel panel;
  Floats highest[MAX_VECTORS], total[MAX_VECTORS] = {}, least[MAX_VECTORS];

  // The lanes in which a > b, one bit each.
  static uint32_t greater_lanes(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(__m512(a), __m512(b), _CMP_GT_OQ);
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(__m256(a), __m256(b), _CMP_GT_OQ)));
#elif defined(__ARM_NEON)
    const uint32x4_t numbers = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcgtq_f32(a, b), numbers));
#else
    const Ints is_greater = a > b;
    uint32_t lanes = 0;
    for (int lane = 0; lane < LANES; ++lane) lanes |= uint32_t(is_greater[lane] & 1) << lane;
    return lanes;
#endif
  }

  void offer(const float* logits, int c, int64_t token, uint32_t lanes) {
    if (std::find(out.suppressed.begin(), out.suppressed.end(), token) != out.suppressed.end()) return;
    for (; lanes; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      const int64_t row = int64_t(c) * LANES + lane, first = (panel.first + row) * out.k;
      if (row >= panel.count) continue;
      TopK top{out.values.data() + first, out.ids.data() + first, out.k};
      top.offer(logits[lane], token);
      least[c][lane] = top.least();
    }
  }
};

// Rank some panels against the whole table, a block of tokens at a time.
inline void rank_panels(const std::vector<Panel>& panels, LogitsTopK& out) {
  std::vector<PanelTopK> ranked;
  std::vector<PanelRows> rows;
  for (const Panel& p : panels) {
    if (out.scale != 1.0f)
      for (int64_t i = 0; i < out.width * p.step(); ++i) p.x[i] *= out.scale;
    ranked.emplace_back(out, p), rows.push_back({p.x, p.vectors});
  }
  alignas(64) float logits[TOGETHER][BLOCK_ROWS * MAX_VECTORS * LANES];
  PanelProducts products;
  products.set_inputs(std::move(rows), out.width);
  products.multiply(
      out.table, [&](size_t i, int64_t) { return logits[i % TOGETHER]; },
      [&](size_t i, int64_t n, int64_t count, float* y) { ranked[i].add(y, n, count); });
  for (PanelTopK& panel : ranked) panel.finish();
}

// Panels that are ready to be ranked by any thread of the team: threads are not equally fast.
class PanelQueue {
 public:
  void add(const std::vector<Panel>& ready) {
    const std::lock_guard<std::mutex> guard(lock);
    panels.insert(panels.end(), ready.begin(), ready.end());
  }

  // A thread adds no more.  Each calls this once, also after an error.
  void close() {
    const std::lock_guard<std::mutex> guard(lock);
    ++closed;
  }

  // A few panels, which share what is read of the table; none once all threads have closed and the queue is empty.
  std::vector<Panel> take(int threads) {
    for (int tries = 0;; ++tries) {
      {
        const std::lock_guard<std::mutex> guard(lock);
        if (!panels.empty()) {
          const int64_t share = std::max<int64_t>(1, int64_t(panels.size()) / threads);
          const auto first = panels.end() - (share < TOGETHER ? share : share / TOGETHER * TOGETHER);
          std::vector<Panel> taken(first, panels.end());
          panels.erase(first, panels.end());
          return taken;
        }
        if (closed == threads) return {};
      }
      if (tries > 100) sched_yield();
    }
  }

 private:
  std::mutex lock;
  std::vector<Panel> panels;
  int closed = 0;
};

}  // namespace panels
}  // namespace
