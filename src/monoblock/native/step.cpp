// A few tokens through a whole stack of blocks, in one call: one of each row, or some that follow each other.  New keys
// and values are written where the cache would have put them, and its places noted.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <omp.h>

#include <optional>
#include <utility>
#include <vector>

#include "threads.h"

namespace {

// Keys and values of a block; false where they do not lie as the threads read them.
bool rows_of(const at::Tensor& keys, const at::Tensor& values, std::vector<Rows>& to) {
  for (const at::Tensor* t : {&keys, &values})
    if (t->dim() != 4 || t->scalar_type() != at::kFloat || t->stride(3) != 1 || !t->is_cpu()) return false;
  to.push_back({static_cast<float*>(keys.data_ptr()), static_cast<float*>(values.data_ptr()), keys.stride(0),
                keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2), keys.size(2),
                keys.size(0), values.size(3)});
  return true;
}

// Whether token i of each row is in column i of the cache and stands at place i, as far back as a window sees, and the
// new ones overwrite nothing of that.
bool in_order(const at::Tensor& at, const at::Tensor& index, const int64_t* lengths, int64_t window, int64_t tokens) {
  const int64_t columns = at.size(1), capacity = columns - 1;
  const int64_t *a = at.const_data_ptr<int64_t>(), *n = index.const_data_ptr<int64_t>();
  if (window && tokens + window > columns) return false;
  for (int64_t b = 0; b < at.size(0); ++b) {
    const int64_t length = lengths[b], first = window ? std::max(int64_t(0), length + 1 - window) : 0;
    if (!window && length + tokens > capacity) return false;
    for (int64_t i = first; i < length; ++i) {
      const int64_t column = b * columns + i % capacity;
      if (a[column] != i || n[column] != i) return false;
    }
  }
  return true;
}

// What the cache is told of the tokens that were stored: their places, or how many a row has held at most.
void note(const at::Tensor& tensor, const Step& step, bool by_length) {
  const int64_t columns = by_length ? tensor.size(1) : 1;
  int64_t* to = static_cast<int64_t*>(tensor.data_ptr());
  for (int64_t n = 0; n < step.batch; ++n) {
    const int64_t row = n / step.tokens, length = step.lengths[n];
    if (step.real && !step.real[row]) continue;
    if (by_length)
      to[row * columns + length % (columns - 1)] = length;
    else
      to[row] = std::max(to[row], length + 1);
  }
}

const bool* flags(const std::optional<at::Tensor>& given) {
  return given ? static_cast<const bool*>(given->const_data_ptr()) : nullptr;
}

using Tensors = std::vector<at::Tensor>;

// What the rows look at; false where it is not what the threads can read.
bool looked_at(Step& s, const Tensors& keys, const Tensors& values, const Tensors& source_keys,
               const Tensors& source_values, const std::optional<at::Tensor>& seen) {
  TORCH_CHECK(keys.size() == s.plan.layers.size() && values.size() == keys.size(), "a slot for each block");
  for (size_t l = 0; l < keys.size(); ++l)
    if (!rows_of(keys[l], values[l], s.own) || keys[l].size(0) * s.tokens != s.batch) return false;
  for (size_t l = 0; l < source_keys.size(); ++l) {
    if (!rows_of(source_keys[l], source_values[l], s.sources) || s.batch % source_keys[l].size(0)) return false;
    if (seen && (seen->scalar_type() != at::kBool || seen->size(1) != source_keys[l].size(2))) return false;
    s.longest = std::max(s.longest, source_keys[l].size(2));
  }
  s.seen = flags(seen), s.seen_row = seen && seen->size(0) > 1 ? seen->size(1) : 0;
  return true;
}

// Tables of positions: cosines and sines (places, pairs), biases (heads, distances).
void placed(Step& s, const Tensors& turns, const Tensors& biases) {
  for (size_t n = 0; n < turns.size(); n += 2) {
    TORCH_CHECK(turns[n].is_contiguous() && turns[n + 1].is_contiguous(), "expected contiguous angles");
    TORCH_CHECK(turns[n].size(0) >= s.longest, "angles for too few places");
    s.cos.push_back(turns[n].const_data_ptr<float>()), s.sin.push_back(turns[n + 1].const_data_ptr<float>());
    s.pairs.push_back(turns[n].size(1));
  }
  for (const at::Tensor& bias : biases) {
    TORCH_CHECK(bias.size(1) >= s.longest && bias.is_contiguous(), "biases for too few places");
    s.biases.push_back(bias.const_data_ptr<float>()), s.reach.push_back(bias.size(1));
  }
}

// What the threads hand to each other.
std::vector<float> shared(Step& s) {
  const Plan& plan = s.plan;
  for (const Layer& layer : plan.layers) {
    s.query_step = std::max({s.query_step, layer.query.rows, layer.cross_query.rows});
    s.key_step = std::max(s.key_step, layer.key.rows), s.value_step = std::max(s.value_step, layer.value.rows);
  }
  const std::pair<float**, int64_t> parts[] = {
      {&s.queries, s.query_step}, {&s.keys, s.key_step},     {&s.values, s.value_step}, {&s.looked, plan.heads},
      {&s.hidden, plan.hidden},   {&s.gates, plan.hidden},   {&s.first, plan.width},    {&s.second, plan.width}};
  int64_t total = 0;
  for (const auto& part : parts) total += s.batch * part.second + LANES;
  std::vector<float> memory(total, 0.0f);
  float* next = memory.data();
  for (const auto& part : parts) *part.first = next, next += s.batch * part.second + LANES;
  return memory;
}

at::Tensor run(const Step& s, const at::Tensor& x) {
  const int64_t size = s.batch * s.plan.width;
  const at::Tensor given = x.contiguous(), out = at::empty(given.sizes(), x.options());
  const bool small = s.plan.width * s.plan.hidden < GRAIN;
  const int threads = at::in_parallel_region() || small ? 1 : at::get_num_threads();
  std::optional<Barrier> barrier;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    barrier.emplace(omp_get_num_threads());  // perhaps fewer than were asked for
    Thread thread(s, *barrier, omp_get_thread_num(), omp_get_num_threads());
    std::copy_n(given.const_data_ptr<float>(), size, thread.x.data());
    for (size_t l = 0; l < s.plan.layers.size(); ++l) thread.run(s.plan.layers[l], l);
    if (thread.number == 0) thread.finish(static_cast<float*>(out.data_ptr()));
  }
  return out;
}

// Where the tokens stand, T of each row one after the other; false where they do not follow what the cache holds.
bool stand(Step& s, const at::Tensor& places, const int64_t* lengths) {
  const at::Tensor stands = places.expand({s.batch / s.tokens, s.tokens}).contiguous();
  if (stands.scalar_type() != at::kLong) return false;
  for (int64_t n = 0; n < s.batch; ++n) {
    const int64_t row = n / s.tokens;
    const bool takes = !s.real || s.real[row];
    s.lengths.push_back(lengths[row] + (takes ? n % s.tokens : 0));
    if (takes && stands.const_data_ptr<int64_t>()[n] != s.lengths[n]) return false;
    s.longest = std::max(s.longest, s.lengths[n] + 1);
  }
  return true;
}

// x (B, T, D), tokens at `places` after `lengths` (B,) others in each row -> (B, T, D), or nothing where the cache is
// not one that this reads.  `real` (B,): rows that take their tokens.  `at` and `index` (B, columns): places of caches
// with these windows, 0 for a full one.
at::Tensor step(const c10::intrusive_ptr<Plan>& plan, const at::Tensor& x, const at::Tensor& places,
                const at::Tensor& lengths, const std::optional<at::Tensor>& real, const at::Tensor& written,
                const Tensors& keys, const Tensors& values, const Tensors& source_keys, const Tensors& source_values,
                const std::optional<at::Tensor>& seen, const Tensors& at, const Tensors& index,
                const std::vector<int64_t>& windows, const Tensors& turns, const Tensors& biases) {
  const at::Tensor none = at::empty({0}, x.options());
  const int64_t rows = x.size(0), tokens = x.size(1), *before = lengths.const_data_ptr<int64_t>();
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.numel() == rows * tokens * plan->width, "expected fp32 tokens");
  TORCH_CHECK(lengths.numel() == rows && lengths.is_contiguous() && written.is_contiguous(), "a length for each row");
  Step s{*plan, rows * tokens, tokens, {}, flags(real)};
  if (!stand(s, places, before)) return none;
  for (size_t n = 0; n < at.size(); ++n)
    if (!at[n].is_contiguous() || !index[n].is_contiguous() || !in_order(at[n], index[n], before, windows[n], tokens))
      return none;
  placed(s, turns, biases);
  if (!looked_at(s, keys, values, source_keys, source_values, seen)) return none;
  const std::vector<float> memory = shared(s);
  const at::Tensor out = run(s, x);
  for (size_t n = 0; n < at.size(); ++n) note(at[n], s, true), note(index[n], s, true);
  note(written, s, false);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  library.class_<Plan>("Plan")
      .def(torch::init<std::vector<at::Tensor>, const at::Tensor&, const at::Tensor&, int64_t>())
      .def("step", &step);
}
