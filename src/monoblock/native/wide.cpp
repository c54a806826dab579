// A step of a search over many rows in one call: the stack, the product with the output table and the ranking.  Threads
// share out the rows and never wait for each other; logits are looked at where they are made and never written down.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "best.h"
#include "many.h"

namespace {
namespace panels {

using Tensors = std::vector<at::Tensor>;
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
          if (higher(load<Floats>(from + n * step), least[c])) offer(from + n * step, c, first + n);
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

  static bool higher(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(__m512(a), __m512(b), _CMP_GT_OQ) != 0;
#else
    const Words above = a > b;
    int any = 0;
    for (int lane = 0; lane < LANES; ++lane) any |= above[lane];
    return any != 0;
#endif
  }

  void offer(const float* logits, int c, int64_t token) {
    if (std::find(out.never, out.never + out.nevers, token) != out.never + out.nevers) return;
    for (int lane = 0; lane < LANES; ++lane) {
      const int64_t row = int64_t(c) * LANES + lane;
      if (!(logits[lane] > least[c][lane]) || row >= panel.count) continue;
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

// The panels of one thread with the whole table, a block of tokens at a time.
void rank(const std::vector<Panel>& panels, const Output& out) {
  std::vector<Ranked> ranked;
  for (const Panel& p : panels) {
    if (out.scale != 1.0f)
      for (int64_t i = 0; i < out.width * p.step(); ++i) p.x[i] *= out.scale;
    ranked.emplace_back(out, p);
  }
  alignas(64) float logits[BLOCK * BROAD * LANES];
  for (int64_t n = 0; n < out.tokens; n += BLOCK) {
    const int64_t count = std::min(BLOCK, out.tokens - n);
    for (size_t i = 0; i < panels.size(); ++i) {
      tiles(panels[i].broad, out.table + n * out.width, count, out.width, panels[i].x, out.bias ? out.bias + n : nullptr,
            logits);
      ranked[i].take(logits, n, count);
    }
  }
  for (Ranked& one : ranked) one.finish();
}

Held held(const at::Tensor& keys, const at::Tensor& values) {
  for (const at::Tensor* t : {&keys, &values})
    TORCH_CHECK(t->dim() == 4 && t->scalar_type() == at::kFloat && t->stride(3) == 1 && t->is_cpu(), "expected fp32 heads");
  return {static_cast<float*>(keys.data_ptr()), static_cast<float*>(values.data_ptr()), keys.stride(0), keys.stride(1),
          keys.stride(2), values.stride(0), values.stride(1), values.stride(2), keys.size(3), values.size(3)};
}

struct Wide : torch::CustomClassHolder {
  c10::intrusive_ptr<Plan> plan;
  at::Tensor table;
  std::optional<at::Tensor> bias;
  double scale;

  Wide(c10::intrusive_ptr<Plan> plan_, at::Tensor table_, std::optional<at::Tensor> bias_, double scale_)
      : plan(std::move(plan_)), table(std::move(table_)), bias(std::move(bias_)), scale(scale_) {
    TORCH_CHECK(table.dim() == 2 && table.scalar_type() == at::kFloat && table.is_contiguous(), "expected an fp32 table");
    TORCH_CHECK(table.size(1) == plan->width, "a table of another width");
  }

  bool fits() const { return says(*plan); }

  // Of `copies` rows for each text, the texts `live` go on: x (live beams, D), one token of each of their first `beams`
  // rows after `lengths` (B,) others; the rest of the rows begin like the first.  For each of these texts the best sums of
  // score (live copies,) and log-probability, and their places, beam V + token.
  std::tuple<at::Tensor, at::Tensor> best(const at::Tensor& x, const at::Tensor& lengths, const at::Tensor& live,
                                          const at::Tensor& origins, const Tensors& keys, const Tensors& values,
                                          const Tensors& source_keys, const Tensors& source_values,
                                          const std::optional<at::Tensor>& seen, const at::Tensor& scores,
                                          const at::Tensor& without, int64_t copies, int64_t beams, int64_t count) {
    const int64_t B = lengths.numel(), texts = B / copies, V = table.size(0);
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "expected fp32 rows");
    TORCH_CHECK(x.numel() == live.numel() * beams * plan->width && scores.numel() == live.numel() * copies, "other rows");
    TORCH_CHECK(origins.size(0) == B && B % copies == 0, "rows that do not fit");
    for (const at::Tensor* t : {&lengths, &live, &origins, &without})
      TORCH_CHECK(t->scalar_type() == at::kLong && t->is_contiguous(), "expected whole numbers");
    TORCH_CHECK(scores.scalar_type() == at::kFloat && scores.is_contiguous(), "expected fp32 scores");
    TORCH_CHECK(keys.size() == plan->layers.size() && values.size() == keys.size(), "a slot for each block");
    Many many{*plan, x.const_data_ptr<float>()};
    many.copies = copies;
    const int64_t columns = origins.size(1), *length = lengths.const_data_ptr<int64_t>();
    int64_t* origin = static_cast<int64_t*>(origins.data_ptr());
    for (int64_t n = 0; n < live.numel(); ++n)
      for (int64_t c = 0; c < copies; ++c) {
        const int64_t b = live.const_data_ptr<int64_t>()[n] * copies + c;
        TORCH_CHECK(b >= 0 && b < B && length[b] >= 0 && length[b] < columns, "a row that does not fit");
        origin[b * columns + length[b]] = c < beams ? b : b - c;
        if (c < beams) many.rows.push_back({b, origin + b * columns, length[b] + 1, length[b]});
      }
    for (size_t l = 0; l < keys.size(); ++l) {
      TORCH_CHECK(keys[l].size(0) == B && keys[l].size(2) >= columns, "a slot that does not fit");
      many.own.push_back(held(keys[l], values[l]));
    }
    for (size_t l = 0; l < source_keys.size(); ++l) many.sources.push_back(held(source_keys[l], source_values[l]));
    if (!source_keys.empty()) looked_at(many, texts, source_keys[0].size(2), seen);
    const int64_t rows = int64_t(many.rows.size());
    at::Tensor found = at::full({rows, count}, NOTHING_YET, x.options()), sums = at::empty({rows}, x.options());
    at::Tensor tokens = at::empty({rows, count}, lengths.options());
    Output out{table.const_data_ptr<float>(), bias ? bias->const_data_ptr<float>() : nullptr, V, plan->width, float(scale),
               without.const_data_ptr<int64_t>(), without.numel(), count, found.mutable_data_ptr<float>(),
               sums.mutable_data_ptr<float>(), tokens.mutable_data_ptr<int64_t>()};
    run(many, out);
    return together(many, out, live, scores, beams);
  }

 private:
  static void looked_at(Many& many, int64_t texts, int64_t columns, const std::optional<at::Tensor>& seen) {
    many.source_lengths.assign(texts, columns);
    if (!seen) return;
    TORCH_CHECK(seen->scalar_type() == at::kBool && seen->is_contiguous() && seen->size(1) == columns, "a mask that does not fit");
    many.seen = seen->const_data_ptr<bool>(), many.seen_row = seen->size(0) > 1 ? columns : 0;
    bool holes = false;
    for (int64_t t = 0; t < texts; ++t) {
      const bool* row = many.seen + t * many.seen_row;
      int64_t& length = many.source_lengths[t];
      while (length > 0 && !row[length - 1]) --length;
      holes = holes || std::find(row, row + length, false) != row + length;
    }
    if (!holes) many.seen = nullptr;  // padding comes last, as it should
  }

  static void run(const Many& many, const Output& out) {
    const int64_t rows = int64_t(many.rows.size()), vectors = (rows + LANES - 1) / LANES;
    const int threads = at::in_parallel_region() ? 1 : int(std::min<int64_t>(at::get_num_threads(), vectors));
#pragma omp parallel num_threads(std::max(1, threads))
    {
      thread_local std::vector<float> memory;  // the same for all steps: fresh pages would cost more than they hold
      const int64_t number = omp_get_thread_num(), of = omp_get_num_threads();
      const int64_t first = vectors * number / of * LANES, until = std::min(rows, vectors * (number + 1) / of * LANES);
      Share share(many, first, until, memory);
      share.run();
      rank(share.panels, out);
    }
  }

  // Of what was found in the rows of a text the best.
  static std::tuple<at::Tensor, at::Tensor> together(const Many& many, const Output& out, const at::Tensor& live,
                                                     const at::Tensor& scores, int64_t beams) {
    at::Tensor values = at::full({live.numel(), out.count}, NOTHING_YET, scores.options());
    at::Tensor places = at::full({live.numel(), out.count}, 0, live.options());
    const float* score = scores.const_data_ptr<float>();
    for (int64_t n = 0; n < live.numel(); ++n) {
      Best best{values.mutable_data_ptr<float>() + n * out.count, places.mutable_data_ptr<int64_t>() + n * out.count,
                out.count};
      for (int64_t beam = 0; beam < beams; ++beam) {
        const int64_t row = n * beams + beam;
        for (int64_t i = row * out.count; i < (row + 1) * out.count && out.places[i] >= 0; ++i)
          best.offer((out.values[i] - out.sums[row]) + score[n * many.copies + beam], beam * out.tokens + out.places[i]);
      }
    }
    return {values, places};
  }
};

}  // namespace panels
}  // namespace

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  library.class_<panels::Wide>("Wide")
      .def(torch::init<c10::intrusive_ptr<Plan>, at::Tensor, std::optional<at::Tensor>, double>())
      .def("fits", &panels::Wide::fits)
      .def("best", &panels::Wide::best);
}
