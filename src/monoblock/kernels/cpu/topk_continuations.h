// The best continuations of each prompt among all tokens of all its beams, without writing a probability.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "checks.h"
#include "stack/activations.h"

namespace {

// Largest first; of equal numbers the one offered first stays ahead.  The arrays belong to the caller.
struct TopK {
  float* values;
  int64_t* indices;
  int64_t k;

  float least() const { return values[k - 1]; }
  void offer(float value, int64_t index) {
    if (!(value > least())) return;
    int64_t n = k - 1;
    for (; n > 0 && value > values[n - 1]; --n) values[n] = values[n - 1], indices[n] = indices[n - 1];
    values[n] = value, indices[n] = index;
  }
};

constexpr int64_t SEGMENT = 4 * LANES;  // logits that are skipped together when their largest is too small

inline float largest(const float* x, int64_t count) {
  float result = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  if (count >= LANES) {
    Floats top = load<Floats>(x);
    for (i = LANES; i + LANES <= count; i += LANES) {
      const Floats v = load<Floats>(x + i);
      top = v > top ? v : top;
    }
    result = max_lane(top);
  }
  for (; i < count; ++i) result = std::max(result, x[i]);
  return result;
}

// log of the sum of e^x, where x <= highest.
inline float log_sum_exp(const float* x, int64_t count, float highest) {
  const Floats total = sum_exponentials(x, count / LANES, all(highest));
  float rest = 0;
  for (int64_t i = count / LANES * LANES; i < count; ++i) rest += std::exp(x[i] - highest);
  return highest + std::log(sum(total) + rest);
}

// Logits (N, V) of rows with scores (N,), `rows_per_prompt` of which continue one prompt: for each prompt the `count`
// best sums of score and log-probability, and their indices, beam V + token.  `suppressed` (M,) tokens are passed over,
// though they keep their probability.
std::tuple<at::Tensor, at::Tensor> topk_continuations(const at::Tensor& logits, const at::Tensor& scores,
                                                      const at::Tensor& suppressed, int64_t rows_per_prompt,
                                                      int64_t count) {
  check_tensor("logits", logits, at::kFloat, {ANY, ANY});
  const int64_t N = logits.size(0), V = logits.size(1);
  TORCH_CHECK(V > 0, "logits has no columns; one for each token is needed");
  check_tensor("scores", scores, at::kFloat, {N}), check_tensor("suppressed", suppressed, at::kLong, {ANY});
  check_range("rows_per_prompt", rows_per_prompt, 1, std::max<int64_t>(1, N));
  TORCH_CHECK(N % rows_per_prompt == 0, "rows_per_prompt is ", rows_per_prompt, ", which does not divide the ", N,
              " rows of logits");
  check_range("count", count, 1, rows_per_prompt * V);
  const int64_t *excluded = suppressed.const_data_ptr<int64_t>(), *excluded_end = excluded + suppressed.numel();
  for (const int64_t* token = excluded; token < excluded_end; ++token)
    check_range(Argument("suppressed", token - excluded), *token, 0, V - 1);
  const int64_t prompts = N / rows_per_prompt, segments = (V + SEGMENT - 1) / SEGMENT;
  at::Tensor values = at::full({prompts, count}, -std::numeric_limits<float>::infinity(), logits.options());
  at::Tensor indices = at::empty({prompts, count}, suppressed.options());
  const float *x = logits.const_data_ptr<float>(), *score = scores.const_data_ptr<float>();
  float* to_values = values.mutable_data_ptr<float>();
  int64_t* to_indices = indices.mutable_data_ptr<int64_t>();
  at::parallel_for(0, prompts, std::max<int64_t>(1, WEIGHTS_PER_THREAD / (rows_per_prompt * V)),
                   [&](int64_t from, int64_t until) {
                     std::vector<float> peaks(segments);
                     for (int64_t prompt = from; prompt < until; ++prompt) {
                       TopK top{to_values + prompt * count, to_indices + prompt * count, count};
                       for (int64_t n = 0; n < count; ++n) top.indices[n] = n;
                       for (int64_t beam = 0; beam < rows_per_prompt; ++beam) {
                         const float* row = x + (prompt * rows_per_prompt + beam) * V;
                         for (int64_t p = 0; p < segments; ++p)
                           peaks[p] = largest(row + p * SEGMENT, std::min(SEGMENT, V - p * SEGMENT));
                         const float total = log_sum_exp(row, V, largest(peaks.data(), segments)),
                                     own = score[prompt * rows_per_prompt + beam];
                         for (int64_t p = 0; p < segments; ++p) {
                           if (!((peaks[p] - total) + own > top.least())) continue;
                           for (int64_t token = p * SEGMENT; token < std::min(V, (p + 1) * SEGMENT); ++token) {
                             const float value = (row[token] - total) + own;
                             if (value > top.least() && std::find(excluded, excluded_end, token) == excluded_end)
                               top.offer(value, beam * V + token);
                           }
                         }
                       }
                     }
                   });
  return {values, indices};
}

}  // namespace
