// NativeStack.step: a few tokens through a whole stack of blocks in one call, one of each row or several that follow
// each other.  New keys and values are written where the cache would have put them, and its index is updated.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <omp.h>

#include <optional>
#include <utility>
#include <vector>

#include "stack/stack_step.h"
#include "stack/step_arguments.h"

namespace {

// Scratch that the threads hand to each other.
std::vector<float> allocate_scratch(StackStep& s) {
  const NativeStack& stack = s.stack;
  for (const Layer& layer : stack.layers) {
    s.query_step = std::max({s.query_step, layer.query.rows, layer.cross_query.rows});
    s.key_step = std::max(s.key_step, layer.key.rows), s.value_step = std::max(s.value_step, layer.value.rows);
  }
  const std::pair<float**, int64_t> buffers[] = {{&s.queries, s.query_step},    {&s.keys, s.key_step},
                                                 {&s.values, s.value_step},     {&s.attended, stack.max_heads},
                                                 {&s.hidden, stack.max_hidden}, {&s.gates, stack.max_hidden},
                                                 {&s.first, stack.width},       {&s.second, stack.width}};
  int64_t total = 0;
  for (const auto& [buffer, size] : buffers) total += s.batch * size + LANES;
  std::vector<float> memory(total, 0.0f);
  float* next = memory.data();
  for (const auto& [buffer, size] : buffers) *buffer = next, next += s.batch * size + LANES;
  return memory;
}

at::Tensor run_threads(const StackStep& s, const at::Tensor& x) {
  const at::Tensor input = x.contiguous(), out = at::empty(input.sizes(), x.options());
  const bool is_small = s.stack.width * s.stack.max_hidden < WEIGHTS_PER_THREAD;
  const int threads = at::in_parallel_region() || is_small ? 1 : at::get_num_threads();
  std::optional<Barrier> barrier;
  ThreadErrors errors;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    barrier.emplace(omp_get_num_threads());  // perhaps fewer than were asked for
    const int number = omp_get_thread_num(), count = omp_get_num_threads();
    errors.run(
        [&] {
          StackThread thread(s, *barrier, number, count, input.const_data_ptr<float>());
          thread.run();
          thread.finish(static_cast<float*>(out.data_ptr()));
        },
        [&] { barrier->abandon(); });
  }
  errors.rethrow();
  return out;
}

// Record the tokens that were stored: in the columns of an index, or as the most tokens that a row ever held.
void record_columns(const at::Tensor& index, const StackStep& s) {
  const int64_t columns = index.size(1);
  int64_t* to = static_cast<int64_t*>(index.data_ptr());
  for (int64_t n = 0; n < s.batch; ++n) {
    const int64_t row = n / s.tokens;
    if (!s.active || s.active[row]) to[row * columns + s.lengths[n] % (columns - 1)] = s.lengths[n];
  }
}

void record_written(const at::Tensor& written, const StackStep& s) {
  int64_t* to = static_cast<int64_t*>(written.data_ptr());
  for (int64_t n = 0; n < s.batch; ++n) {
    const int64_t row = n / s.tokens;
    if (!s.active || s.active[row]) to[row] = std::max(to[row], s.lengths[n] + 1);
  }
}

// x (B, T, D): tokens at `positions` (B or 1, T) after `lengths` (B,) others in each row -> (B, T, D), or None where
// the cache does not hold its tokens in order.  `active` (B,): rows that store their tokens.  `written` (B,): the most
// tokens that each row ever held.  For the others see CacheTensors, CacheIndexes and set_tables.
OptionalTensor step_stack(const c10::intrusive_ptr<NativeStack>& stack, const at::Tensor& x,
                          const at::Tensor& positions, const at::Tensor& lengths, const OptionalTensor& active,
                          const at::Tensor& written, const Tensors& keys, const Tensors& values,
                          const Tensors& source_keys, const Tensors& source_values, const OptionalTensor& source_mask,
                          const Tensors& cache_positions, const Tensors& cache_index,
                          const std::vector<int64_t>& windows, const Tensors& rotary_cos, const Tensors& rotary_sin,
                          const Tensors& position_biases) {
  stack->check_weights();
  check_dtype("x", x, at::kFloat), check_shape("x", x, {ANY, ANY, stack->width});
  const int64_t rows = x.size(0), tokens = x.size(1);
  TORCH_CHECK(rows > 0 && tokens > 0, "x has shape ", shape_text(x.sizes()), "; one token or more is needed");
  check_dtype("positions", positions, at::kLong), check_shape("positions", positions, {ANY, tokens});
  TORCH_CHECK(positions.size(0) == rows || positions.size(0) == 1, "positions has ", positions.size(0), " rows; 1 or ",
              rows, " are needed");
  check_tensor("lengths", lengths, at::kLong, {rows}), check_tensor("written", written, at::kLong, {rows});
  if (active) check_tensor("active", *active, at::kBool, {rows});
  StackStep s{*stack, rows * tokens, tokens, {}, active ? active->const_data_ptr<bool>() : nullptr};
  const CacheIndexes indexes{cache_positions, cache_index, windows};
  indexes.check(rows);
  set_caches(s, {keys, values, source_keys, source_values, source_mask}, indexes);
  if (!set_lengths(s, positions, lengths) || !indexes.are_in_order(lengths.const_data_ptr<int64_t>(), tokens))
    return std::nullopt;
  set_tables(s, rotary_cos, rotary_sin, position_biases);
  const std::vector<float> scratch = allocate_scratch(s);
  SharedRows many_rows;
  s.many_rows = &many_rows;
  const at::Tensor out = run_threads(s, x);
  for (const Tensors* list : {&cache_positions, &cache_index})
    for (const at::Tensor& index : *list) record_columns(index, s);
  record_written(written, s);
  return out;
}

}  // namespace
