// What a search over many rows does beside its products: one query a row looks at its keys, and of all continuations of
// a text the best are found without writing a single probability.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "attention.h"
#include "best.h"

namespace {

constexpr int64_t PIECE = 4 * LANES;  // logits that are passed over at once when none of them can matter

// q (B, H, 1, K) looks at keys (R, G, S, K) and values (R, G, S, V), B / R rows at each; seen (R or 1, 1, 1, S) tells
// padding.  What comes out is (B, 1, H V), as the next product reads it.
at::Tensor attend(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                  const std::optional<at::Tensor>& seen, double scale) {
  for (const at::Tensor* t : {&q, &keys, &values})
    TORCH_CHECK(t->dim() == 4 && t->scalar_type() == at::kFloat && t->stride(3) == 1, "expected fp32 heads");
  const int64_t B = q.size(0), H = q.size(1), K = q.size(3), R = keys.size(0), G = keys.size(1), S = keys.size(2);
  const int64_t V = values.size(3), copies = B / R;
  TORCH_CHECK(q.size(2) == 1 && keys.size(3) == K && B % R == 0 && H % G == 0, "heads that do not fit");
  at::Tensor mask;
  if (seen) {
    TORCH_CHECK(seen->scalar_type() == at::kBool && seen->dim() == 4 && seen->size(3) == S, "a mask that does not fit");
    TORCH_CHECK((seen->size(0) == 1 || seen->size(0) == R) && seen->size(1) == 1 && seen->size(2) == 1, "one row a text");
    mask = seen->contiguous();
  }
  const int64_t mask_row = seen && mask.size(0) > 1 ? S : 0;
  const bool* told = seen ? mask.const_data_ptr<bool>() : nullptr;
  at::Tensor out = at::empty({B, 1, H * V}, q.options());
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, B * H, std::max<int64_t>(1, GRAIN / (S * (K + V) + 1)), [&](int64_t from, int64_t until) {
    std::vector<float> scores(S + LANES);
    for (int64_t n = from; n < until; ++n) {
      const int64_t b = n / H, h = n % H, r = b / copies, g = h / (H / G);
      Sight sight{keys.const_data_ptr<float>() + r * keys.stride(0) + g * keys.stride(1),
                  values.const_data_ptr<float>() + r * values.stride(0) + g * values.stride(1),
                  keys.stride(2), values.stride(2), K, V, 0, S, S};
      sight.seen = told ? told + r * mask_row : nullptr, sight.scale = float(scale);
      look(sight, q.const_data_ptr<float>() + b * q.stride(0) + h * q.stride(1), scores.data(), to + b * H * V + h * V);
    }
  });
  return out;
}

inline float largest(const float* x, int64_t count) {
  float most = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  if (count >= LANES) {
    Floats top = load<Floats>(x);
    for (i = LANES; i + LANES <= count; i += LANES) {
      const Floats v = load<Floats>(x + i);
      top = v > top ? v : top;
    }
    for (int lane = 0; lane < LANES; ++lane) most = std::max(most, top[lane]);
  }
  for (; i < count; ++i) most = std::max(most, x[i]);
  return most;
}

// Log of the sum of exponentials, none of them above that of `most`.
inline float log_sum(const float* x, int64_t count, float most) {
  Floats total = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) total += exponential(load<Floats>(x + i) - most);
  float rest = 0;
  for (; i < count; ++i) rest += std::exp(x[i] - most);
  return most + std::log(sum(total) + rest);
}

// Logits (N, V) of rows with these scores (N,), `copies` of which continue one text: for each text the best sums of score
// and log-probability and their places, beam V + token.  Tokens of `without` are passed over, though they had their share.
std::tuple<at::Tensor, at::Tensor> best(const at::Tensor& logits, const at::Tensor& scores, const at::Tensor& without,
                                        int64_t copies, int64_t count) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.is_contiguous(), "expected fp32 logits");
  TORCH_CHECK(scores.scalar_type() == at::kFloat && scores.is_contiguous() && without.is_contiguous(), "expected fp32");
  TORCH_CHECK(without.scalar_type() == at::kLong, "expected tokens");
  const int64_t N = logits.size(0), V = logits.size(1), texts = N / copies;
  TORCH_CHECK(scores.numel() == N && N % copies == 0 && count >= 1 && count <= copies * V, "rows that do not fit");
  at::Tensor values = at::full({texts, count}, -std::numeric_limits<float>::infinity(), logits.options());
  at::Tensor places = at::empty({texts, count}, without.options());
  const float *x = logits.const_data_ptr<float>(), *score = scores.const_data_ptr<float>();
  const int64_t *never = without.const_data_ptr<int64_t>(), nevers = without.numel();
  float* to = values.mutable_data_ptr<float>();
  int64_t* at = places.mutable_data_ptr<int64_t>();
  const int64_t pieces = (V + PIECE - 1) / PIECE;
  at::parallel_for(0, texts, std::max<int64_t>(1, GRAIN / (copies * V)), [&](int64_t from, int64_t until) {
    std::vector<float> peaks(pieces);
    for (int64_t text = from; text < until; ++text) {
      Best found{to + text * count, at + text * count, count};
      for (int64_t n = 0; n < count; ++n) found.places[n] = n;
      for (int64_t beam = 0; beam < copies; ++beam) {
        const float* row = x + (text * copies + beam) * V;
        for (int64_t p = 0; p < pieces; ++p) peaks[p] = largest(row + p * PIECE, std::min(PIECE, V - p * PIECE));
        const float total = log_sum(row, V, largest(peaks.data(), pieces)), own = score[text * copies + beam];
        for (int64_t p = 0; p < pieces; ++p) {
          if (!((peaks[p] - total) + own > found.least())) continue;
          for (int64_t token = p * PIECE; token < std::min(V, (p + 1) * PIECE); ++token) {
            const float value = (row[token] - total) + own;
            if (value > found.least() && std::find(never, never + nevers, token) == never + nevers)
              found.offer(value, beam * V + token);
          }
        }
      }
    }
  });
  return {values, places};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  library.def("attend(Tensor q, Tensor keys, Tensor values, Tensor? seen, float scale) -> Tensor");
  library.def("best(Tensor logits, Tensor scores, Tensor without, int copies, int count) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(monoblock, CPU, library) {
  library.impl("attend", &attend);
  library.impl("best", &best);
}
