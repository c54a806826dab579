// An encoder's pass over many texts in one call: their tokens are rows side by side, without any padding between them.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "many_rows.h"

namespace {
namespace panels {

constexpr int64_t AT_ONCE = 128;  // rows of a thread that pass the weights together, and stay near meanwhile

bool sayable(const c10::intrusive_ptr<Plan>& plan) { return says(*plan); }

// x (N, D), the tokens of texts of these lengths one after the other -> (N, D).  A thread reads some texts at a time.
at::Tensor read(const c10::intrusive_ptr<Plan>& plan, const at::Tensor& x, const at::Tensor& lengths) {
  const int64_t N = x.size(0), D = plan->width, *length = lengths.const_data_ptr<int64_t>();
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() == N * D && N > 0, "expected fp32 rows");
  TORCH_CHECK(lengths.scalar_type() == at::kLong && lengths.is_contiguous() && says(*plan), "expected lengths");
  int64_t keys = 0, values = 0;
  for (const Layer& l : plan->layers) keys = std::max(keys, l.key.rows), values = std::max(values, l.value.rows);
  at::Tensor memory = at::empty({N * (keys + values)}, x.options()), out = at::empty({N, D}, x.options());
  float *key = memory.mutable_data_ptr<float>(), *value = key + N * keys;
  Many many{*plan, x.const_data_ptr<float>()};
  for (const Layer& l : plan->layers) {  // one step for all: a thread may be layers ahead of its neighbour
    const int64_t size = l.key.rows / l.groups, value_size = l.value.rows / l.groups;
    many.own.push_back({key, value, keys, size, 0, values, value_size, 0, size, value_size});
  }
  std::vector<int64_t> tokens(N), begins{0};
  std::iota(tokens.begin(), tokens.end(), 0);
  for (int64_t t = 0; t < lengths.numel(); ++t) {
    const int64_t first = begins.back();
    TORCH_CHECK(length[t] >= 0 && first + length[t] <= N, "more tokens than rows");
    for (int64_t i = 0; i < length[t]; ++i) many.rows.push_back({first + i, tokens.data() + first, length[t], 0});
    begins.push_back(first + length[t]);
  }
  TORCH_CHECK(begins.back() == N, "fewer tokens than rows");
  float* to = out.mutable_data_ptr<float>();
  const auto border = [&](int64_t row) { return *std::lower_bound(begins.begin(), begins.end(), std::min(row, N)); };
  std::vector<int64_t> pieces{0};
  while (pieces.back() < N) pieces.push_back(border(pieces.back() + AT_ONCE));
  std::atomic<size_t> next{0};  // threads are not equally quick: who comes first takes the next piece
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  Failure failure;
#pragma omp parallel num_threads(threads)
  failure.keep([&] {
    thread_local std::vector<float> room;
    for (size_t n; (n = next++) + 1 < pieces.size();) {
      Share share(many, pieces[n], pieces[n + 1], room);
      share.run();
      share.leave(to);
    }
  });
  failure.tell();
  return out;
}

}  // namespace panels
}  // namespace

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  library.def("sayable", &panels::sayable);
  library.def("read", &panels::read);
}
