// What beam searches with one model share: its stack, its output table and its token table.
//
// Threads may share a SearchModel.  Weights are referenced, never copied, and only read.  The one thing that changes is
// the memory kept between batches: a search owns what it is given, and gives it back under a lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/custom_class.h>

#include <memory>
#include <mutex>
#include <utility>

#include "checks.h"
#include "stack/stack_weights.h"

namespace {

// Keeps the memory of the last search for the next one, since fresh pages cost more than what is written to them.
class MemoryPool {
 public:
  at::Tensor take(int64_t size) {
    const std::lock_guard<std::mutex> guard(lock);
    at::Tensor memory = std::move(kept);
    kept = at::Tensor();
    const bool fits = memory.defined() && memory.numel() >= size && memory.numel() / 2 <= size;  // not far too large
    return fits ? memory : at::empty({size}, at::kFloat);
  }

  void give_back(at::Tensor memory) {
    const std::lock_guard<std::mutex> guard(lock);
    kept = std::move(memory);
  }

 private:
  std::mutex lock;
  at::Tensor kept;
};

class SearchModel : public torch::CustomClassHolder {
 public:
  const c10::intrusive_ptr<NativeStack> stack;
  const at::Tensor output_table;  // (V, D); quantized with scales, and with minima in four bits, (V, groups) each
  const OptionalTensor table_scale, table_least;
  const OptionalTensor output_bias, token_table;  // (V,); (V', D), where tokens are embedded by a search itself
  const float output_scale, token_scale;
  const int table_limit;  // of the integers to which rows are rounded, if the table is quantized

  SearchModel(c10::intrusive_ptr<NativeStack> stack, at::Tensor output_table, OptionalTensor table_scale,
              OptionalTensor table_least, OptionalTensor output_bias, double output_scale, OptionalTensor token_table,
              double token_scale, int64_t activation_bits)
      : stack(std::move(stack)), output_table(std::move(output_table)), table_scale(std::move(table_scale)),
        table_least(std::move(table_least)), output_bias(std::move(output_bias)),
        token_table(std::move(token_table)), output_scale(float(output_scale)), token_scale(float(token_scale)),
        table_limit(activation_limit("activation_bits", activation_bits)) {
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
    TORCH_CHECK(!table_least || table_scale, "table_least is given without table_scale; leave it out");
    table_scale ? check_quantized_table() : check_tensor("output_table", output_table, at::kFloat, {ANY, stack->width});
    if (output_bias) check_tensor("output_bias", *output_bias, at::kFloat, {vocabulary()});
    if (token_table) check_tensor("token_table", *token_table, at::kFloat, {ANY, stack->width});
  }

  int64_t vocabulary() const { return output_table.size(0); }

  WeightMatrix output_matrix() const {
    WeightMatrix m;
    m.format = !table_scale ? WeightMatrix::DENSE : table_least ? WeightMatrix::INT4 : WeightMatrix::INT8;
    m.weight = output_table.const_data_ptr(), m.bias = fp32_or_null(output_bias), m.rows = vocabulary();
    m.limit = table_limit;
    m.columns = output_table.size(1) * (table_least ? 2 : 1);
    if (table_scale) m.scale = bf16_bits(*table_scale), m.groups = table_scale->size(1);
    if (table_least) m.least = bf16_bits(*table_least);
    return m;
  }

  // Uninitialised fp32 memory for keys and values.  The tensor owns it until the last view of it is gone.
  at::Tensor cache_memory(int64_t size) {
    check_range("size", size, 0, MAX_SIZE);
    at::Tensor memory = pool->take(size);
    const auto give_back = [pool = pool, memory](void*) mutable { pool->give_back(std::move(memory)); };
    return at::from_blob(memory.mutable_data_ptr(), {memory.numel()}, give_back, memory.options());
  }

 private:
  static const uint16_t* bf16_bits(const at::Tensor& t) { return static_cast<const uint16_t*>(t.const_data_ptr()); }

  void check_quantized_table() const {
    check_tensor("output_table", output_table, table_least ? at::kByte : at::kChar, {ANY, ANY});
    check_tensor("table_scale", *table_scale, at::kBFloat16, {vocabulary(), ANY});
    if (table_least) check_tensor("table_least", *table_least, at::kBFloat16, {vocabulary(), table_scale->size(1)});
    const int64_t columns = output_table.size(1) * (table_least ? 2 : 1), groups = table_scale->size(1);
    check_groups("output_table", columns, groups, stack->width);
    TORCH_CHECK(can_multiply_many_rows(columns / groups), "output_table is quantized in groups of ", columns / groups,
                ", for which this processor has no products of many rows; ask can_multiply_many_rows()");
  }

  const std::shared_ptr<MemoryPool> pool = std::make_shared<MemoryPool>();
};

}  // namespace
