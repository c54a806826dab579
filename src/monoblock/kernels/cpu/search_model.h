// What beam searches with one model share: its stack, its output table and its token table.
//
// Threads may share a SearchModel.  Weights are referenced, never copied, and only read.  The one thing that changes is
// the memory kept between batches: it is handed out under a lock, to one search at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "checks.h"
#include "stack_weights.h"

namespace {

class SearchModel : public torch::CustomClassHolder {
 public:
  const c10::intrusive_ptr<NativeStack> stack;
  const at::Tensor output_table;                  // (V, D)
  const OptionalTensor output_bias, token_table;  // (V,); (V', D), where tokens are embedded by a search itself
  const float output_scale, token_scale;

  SearchModel(c10::intrusive_ptr<NativeStack> stack, at::Tensor output_table, OptionalTensor output_bias,
              double output_scale, OptionalTensor token_table, double token_scale)
      : stack(std::move(stack)), output_table(std::move(output_table)), output_bias(std::move(output_bias)),
        token_table(std::move(token_table)), output_scale(float(output_scale)), token_scale(float(token_scale)) {
    TORCH_CHECK(this->stack, "stack is None; a NativeStack is needed");
    TORCH_CHECK(this->stack->supports_batches(),
                "stack has blocks that a search does not support; ask supports_batches()");
    check();
    TORCH_CHECK(vocabulary() > 0, "output_table has no rows; one for each token is needed");
    TORCH_CHECK(!this->token_table || this->token_table->size(0) > 0,
                "token_table has no rows; one for each token is needed");
  }

  // Before every step: weights may have been resized or moved since.
  void check() const {
    stack->check_weights();
    check_tensor("output_table", output_table, at::kFloat, {ANY, stack->width});
    if (output_bias) check_tensor("output_bias", *output_bias, at::kFloat, {vocabulary()});
    if (token_table) check_tensor("token_table", *token_table, at::kFloat, {ANY, stack->width});
  }

  int64_t vocabulary() const { return output_table.size(0); }

  // Uninitialised fp32 memory for keys and values: that of the last search once nobody else holds it, since fresh pages
  // cost more than what is written to them.  What a much larger search needed is given back.
  at::Tensor cache_memory(int64_t size) {
    check_range("size", size, 0, MAX_SIZE);
    const std::lock_guard<std::mutex> guard(lock);
    const bool is_free = memory.defined() && memory.storage().use_count() == 1;
    std::atomic_thread_fence(std::memory_order_acquire);  // after the last write of the thread that let go of it
    if (!is_free || memory.numel() < size || memory.numel() / 2 > size) {
      memory.reset();
      memory = at::empty({size}, output_table.options());
    }
    return memory.alias();
  }

 private:
  std::mutex lock;
  at::Tensor memory;
};

}  // namespace
