// An encoder's pass over many texts in one call: their tokens are rows side by side, without padding between them.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "stack/batched_step.h"

namespace {
namespace panels {

constexpr int64_t ROWS_PER_PASS = 128;  // at most, of a thread that pass the weights together and stay in its cache

// Where each text begins, and behind the last one N.
inline std::vector<int64_t> text_bounds(const at::Tensor& lengths, int64_t N) {
  check_tensor("lengths", lengths, at::kLong, {ANY});
  std::vector<int64_t> bounds{0};
  for (int64_t t = 0; t < lengths.numel(); ++t) {
    check_range(Argument("lengths", t), lengths.const_data_ptr<int64_t>()[t], 0, N - bounds.back());
    bounds.push_back(bounds.back() + lengths.const_data_ptr<int64_t>()[t]);
  }
  TORCH_CHECK(bounds.back() == N, "lengths add up to ", bounds.back(), "; x has ", N, " rows");
  return bounds;
}

// x (N, D), the tokens of texts of these lengths one after the other -> (N, D).  A thread reads some texts at a time.
at::Tensor encode(const c10::intrusive_ptr<NativeStack>& stack, const at::Tensor& x, const at::Tensor& lengths) {
  TORCH_CHECK(stack, "stack is None; a NativeStack is needed");
  stack->check_weights();
  const int64_t D = stack->width;
  check_tensor("x", x, at::kFloat, {ANY, D});
  const int64_t N = x.size(0);
  TORCH_CHECK(N > 0, "x has no rows; one token or more is needed");
  TORCH_CHECK(stack->supports_batches(), "stack has blocks that are not supported here; ask supports_batches()");
  int64_t keys = 0, values = 0;
  for (const Layer& l : stack->layers) {
    TORCH_CHECK(!l.cross_heads, "stack has cross-attention; an encoder is needed");
    keys = std::max(keys, l.key.rows), values = std::max(values, l.value.rows);
  }
  at::Tensor memory = at::empty({N * (keys + values)}, x.options()), out = at::empty({N, D}, x.options());
  float *key = memory.mutable_data_ptr<float>(), *value = key + N * keys;
  Batch batch{*stack, x.const_data_ptr<float>()};
  for (const Layer& l : stack->layers) {  // with one row stride: a thread may be some layers ahead of its neighbour
    KeyValues cache;
    cache.keys = key, cache.values = value, cache.key_row = keys, cache.value_row = values;
    cache.key_size = cache.key_head = l.key_size(), cache.value_size = cache.value_head = l.value_size();
    cache.key_column = cache.value_column = 0;
    batch.caches.push_back(cache);
  }
  const std::vector<int64_t> bounds = text_bounds(lengths, N);
  std::vector<int64_t> rows(N);
  std::iota(rows.begin(), rows.end(), 0);
  for (size_t t = 0; t + 1 < bounds.size(); ++t)
    for (int64_t i = bounds[t]; i < bounds[t + 1]; ++i)
      batch.rows.push_back({i, rows.data() + bounds[t], bounds[t + 1] - bounds[t], 0});
  float* to = out.mutable_data_ptr<float>();
  const auto first_after = [&](int64_t row) { return std::upper_bound(bounds.begin(), bounds.end(), row); };
  std::vector<int64_t> pieces{0};
  while (pieces.back() < N) {  // as many whole texts as fit into ROWS_PER_PASS rows, or one longer text
    const int64_t begin = pieces.back(), end = *(first_after(begin + ROWS_PER_PASS) - 1);
    pieces.push_back(end > begin ? end : *first_after(begin));
  }
  std::atomic<size_t> next{0};  // threads are not equally fast: whichever is free takes the next piece
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  ThreadErrors errors;
#pragma omp parallel num_threads(threads)
  errors.run([&] {
    thread_local std::vector<float> scratch;
    for (size_t n; (n = next++) + 1 < pieces.size();) {
      BatchShare share(batch, pieces[n], pieces[n + 1], scratch);
      share.run();
      share.write_rows(to);
    }
  });
  errors.rethrow();
  return out;
}

}  // namespace panels
}  // namespace
