// The product of rows with the output table and its ranking: logits are looked at where they are made and never written.
#pragma once

#include <sched.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "best.h"
#include "many_rows.h"

namespace {
namespace panels {

constexpr float NOTHING_YET = -std::numeric_limits<float>::infinity();

// The table of the output and what is found in its products with the rows.
struct Output {
  const float *table, *bias;
  int64_t tokens, width;
  float scale;
  const int64_t* never;  // tokens that are passed over, though they have their share
  int64_t nevers, count;
  float *values, *sums;  // of each row that goes on: its best logits (rows, count), and log of the sum of exponentials
  int64_t* places;
};

// Logits of a panel as they come, a block of tokens at a time.
struct Ranked {
  const Output& out;
  Panel panel;
  Floats most[BROAD], total[BROAD] = {}, least[BROAD];

  Ranked(const Output& o, const Panel& p) : out(o), panel(p) {
    for (int c = 0; c < BROAD; ++c) most[c] = all(-1e30f), least[c] = all(NOTHING_YET);
    std::fill_n(out.values + p.first * out.count, p.count * out.count, NOTHING_YET);
    std::fill_n(out.places + p.first * out.count, p.count * out.count, int64_t(-1));
  }

  void take(const float* logits, int64_t first, int64_t count) {
    const int64_t step = panel.step();
    for (int c = 0; c < panel.broad; ++c) {
      const float* from = logits + c * LANES;
      Floats peak = load<Floats>(from);
      for (int64_t n = 1; n < count; ++n) {
        const Floats v = load<Floats>(from + n * step);
        peak = v > peak ? v : peak;
      }
      if (higher(peak, least[c]))
        for (int64_t n = 0; n < count; ++n)
          if (const uint32_t lanes = higher(load<Floats>(from + n * step), least[c])) offer(from + n * step, c, first + n, lanes);
      peak = peak > most[c] ? peak : most[c];
      Floats sums = total[c] * exponential(most[c] - peak), more = {};
      int64_t n = 0;
      for (; n + 2 <= count; n += 2) {  // two sums run side by side
        sums += exponential(load<Floats>(from + n * step) - peak);
        more += exponential(load<Floats>(from + (n + 1) * step) - peak);
      }
      if (n < count) sums += exponential(load<Floats>(from + n * step) - peak);
      most[c] = peak, total[c] = sums + more;
    }
  }

  // The lanes in which a is higher, a bit each.
  static uint32_t higher(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(__m512(a), __m512(b), _CMP_GT_OQ);
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(__m256(a), __m256(b), _CMP_GT_OQ)));
#else
    const Words above = a > b;
    uint32_t lanes = 0;
    for (int lane = 0; lane < LANES; ++lane) lanes |= uint32_t(above[lane] & 1) << lane;
    return lanes;
#endif
  }

  void offer(const float* logits, int c, int64_t token, uint32_t lanes) {
    if (std::find(out.never, out.never + out.nevers, token) != out.never + out.nevers) return;
    for (; lanes; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      const int64_t row = int64_t(c) * LANES + lane;
      if (row >= panel.count) continue;
      Best best{out.values + (panel.first + row) * out.count, out.places + (panel.first + row) * out.count, out.count};
      best.offer(logits[lane], token);
      least[c][lane] = best.least();
    }
  }

  void finish() {
    for (int64_t row = 0; row < panel.count; ++row) {
      const int c = int(row / LANES), lane = int(row % LANES);
      out.sums[panel.first + row] = most[c][lane] + std::log(total[c][lane]);
    }
  }
};

// Some panels with the whole table, a block of tokens at a time.
inline void rank(const std::vector<Panel>& panels, const Output& out) {
  std::vector<Ranked> ranked;
  for (const Panel& p : panels) {
    if (out.scale != 1.0f)
      for (int64_t i = 0; i < out.width * p.step(); ++i) p.x[i] *= out.scale;
    ranked.emplace_back(out, p);
  }
  alignas(64) float logits[BLOCK * BROAD * LANES];
  for (int64_t n = 0; n < out.tokens; n += BLOCK) {
    const int64_t count = std::min(BLOCK, out.tokens - n), left = out.tokens - n - count;
    const float* table = out.table + n * out.width;
    Soon soon(table + count * out.width, std::min(BLOCK, left) * out.width, count, out.width, panels.size());
    for (size_t i = 0; i < panels.size(); ++i) {
      tiles(panels[i].broad, table, count, out.width, panels[i].x, out.bias ? out.bias + n : nullptr, logits, soon);
      ranked[i].take(logits, n, count);
    }
  }
  for (Ranked& one : ranked) one.finish();
}

// Panels that wait to be ranked by whoever comes first: threads are not equally quick.
class Waiting {
 public:
  void add(const std::vector<Panel>& some) {
    const std::lock_guard<std::mutex> alone(lock);
    panels.insert(panels.end(), some.begin(), some.end());
  }

  // A thread adds no more; each says so once, whatever has become of it.
  void leave() {
    const std::lock_guard<std::mutex> alone(lock);
    ++left;
  }

  // Some of them, and none when all threads of the team have left.  A few at a time share what is read of the table.
  std::vector<Panel> take(int threads) {
    for (int tries = 0;; ++tries) {
      {
        const std::lock_guard<std::mutex> alone(lock);
        if (!panels.empty()) {
          const auto first = panels.end() - std::max<int64_t>(1, int64_t(panels.size()) / threads);
          std::vector<Panel> some(first, panels.end());
          panels.erase(first, panels.end());
          return some;
        }
        if (left == threads) return {};
      }
      if (tries > 100) sched_yield();
    }
  }

 private:
  std::mutex lock;
  std::vector<Panel> panels;
  int left = 0;  // threads that have come out of the stack
};

}  // namespace panels
}  // namespace
