// Keys and values in pages: token i of a row lies in column i % PAGE of page table[i / PAGE].
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "checks.h"

namespace {
namespace pages {

constexpr int64_t PAGE = 16;  // tokens

inline int64_t count_pages(int64_t tokens) { return (tokens + PAGE - 1) / PAGE; }

// The pages of one block, (pages, heads, PAGE, size) each.
struct Pools {
  float *keys, *values;
  int64_t key_page, key_head, value_page, value_head, key_size, value_size;

  Pools(const at::Tensor& k, const at::Tensor& v)
      : keys(static_cast<float*>(k.data_ptr())), values(static_cast<float*>(v.data_ptr())), key_page(k.stride(0)),
        key_head(k.stride(1)), value_page(v.stride(0)), value_head(v.stride(1)), key_size(k.size(3)),
        value_size(v.size(3)) {}

  float* key(int64_t page, int64_t head) const { return keys + page * key_page + head * key_head; }
  float* value(int64_t page, int64_t head) const { return values + page * value_page + head * value_head; }
};

// The tokens of a page lie one after the other.
inline void check_page(const Argument& name, const at::Tensor& pool) {
  TORCH_CHECK(pool.dim() == 4 && pool.size(2) == PAGE, name, " has shape ", shape_text(pool.sizes()), "; (any, any, ",
              PAGE, ", any) is needed");
  TORCH_CHECK(pool.stride(3) == 1 && pool.stride(2) == pool.size(3), name, " with strides ",
              shape_text(pool.strides()), " has gaps between the tokens of a page; call contiguous()");
}

// Copy the first used[i] tokens of page sources[i] to page targets[i], in every pool (pages, heads, PAGE, size).
void copy_pages(const Tensors& pools, const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& used) {
  check_tensor("sources", sources, at::kLong, {ANY});
  const int64_t count = sources.numel(), pool_count = int64_t(pools.size());
  check_tensor("targets", targets, at::kLong, {count}), check_tensor("used", used, at::kLong, {count});
  const int64_t *from = sources.const_data_ptr<int64_t>(), *to = targets.const_data_ptr<int64_t>(),
                *tokens = used.const_data_ptr<int64_t>();
  std::vector<char*> memory;
  for (int64_t n = 0; n < pool_count; ++n) {
    check_memory(Argument("pools", n), pools[n]), check_page(Argument("pools", n), pools[n]);
    for (int64_t i = 0; i < count; ++i) {
      check_range(Argument("sources", i), from[i], 0, pools[n].size(0) - 1);
      check_range(Argument("targets", i), to[i], 0, pools[n].size(0) - 1);
      check_range(Argument("used", i), tokens[i], 0, PAGE);
    }
    memory.push_back(static_cast<char*>(pools[n].data_ptr()));
  }
  at::parallel_for(0, count * pool_count, 8, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / count, i = item % count, bytes = pools[n].itemsize(), page = pools[n].stride(0) * bytes;
      for (int64_t h = 0; h < pools[n].size(1); ++h) {
        char* head = memory[n] + h * pools[n].stride(1) * bytes;
        std::memmove(head + to[i] * page, head + from[i] * page, tokens[i] * pools[n].size(3) * bytes);
      }
    }
  });
}

}  // namespace pages
}  // namespace
