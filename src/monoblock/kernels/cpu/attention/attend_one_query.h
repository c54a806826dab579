// Attention of one query a row: the beams of a batch, one token further.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "checks.h"

namespace {

// q (B, H, 1, K) attends to keys (R, G, S, K) and values (R, G, S, V), B / R rows to each; mask (R or 1, 1, 1, S): what
// is not padding -> (B, 1, H V), as the next product reads it.
at::Tensor attend_one_query(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            const OptionalTensor& mask, double scale) {
  check_heads("q", q, {ANY, ANY, 1, ANY});
  const int64_t B = q.size(0), H = q.size(1), K = q.size(3);
  check_heads("keys", keys, {ANY, ANY, ANY, K});
  const int64_t R = keys.size(0), G = keys.size(1), S = keys.size(2);
  check_heads("values", values, {R, G, S, ANY});
  TORCH_CHECK(R > 0 && B % R == 0, "keys has ", R, " rows, which do not divide the ", B, " rows of q");
  TORCH_CHECK(G > 0 && H % G == 0, "keys has ", G, " heads, which do not divide the ", H, " heads of q");
  at::Tensor valid;
  if (mask) {
    check_dtype("mask", *mask, at::kBool);
    check_shape("mask", *mask, {mask->dim() && mask->size(0) == 1 ? 1 : R, 1, 1, S});
    valid = mask->contiguous();
  }
  const int64_t V = values.size(3), rows_per_source = B / R, mask_row = mask && valid.size(0) > 1 ? S : 0;
  const bool* valid_columns = mask ? valid.const_data_ptr<bool>() : nullptr;
  at::Tensor out = at::empty({B, 1, H * V}, q.options());
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, B * H, std::max<int64_t>(1, WEIGHTS_PER_THREAD / (S * (K + V) + 1)),
                   [&](int64_t from, int64_t until) {
                     std::vector<float> scores(S + LANES);
                     for (int64_t n = from; n < until; ++n) {
                       const int64_t b = n / H, h = n % H, r = b / rows_per_source, g = h / (H / G);
                       KeyRange range{keys.const_data_ptr<float>() + r * keys.stride(0) + g * keys.stride(1),
                                      values.const_data_ptr<float>() + r * values.stride(0) + g * values.stride(1),
                                      keys.stride(2),
                                      values.stride(2),
                                      K,
                                      V,
                                      0,
                                      S,
                                      S};
                       range.mask = valid_columns ? valid_columns + r * mask_row : nullptr, range.scale = float(scale);
                       attend(range, q.const_data_ptr<float>() + b * q.stride(0) + h * q.stride(1), scores.data(),
                              to + b * H * V + h * V);
                     }
                   });
  return out;
}

}  // namespace
