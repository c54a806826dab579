// NativeStack.run: the tokens of a pass through a whole stack of blocks in one call.  New keys and values are written to
// the pages of their rows.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>

#include "stack/pass_thread.h"

namespace {

// The tokens of each row: counts[r] new ones after lengths[r] others.
void set_tokens(Pass& pass, int64_t rows, int64_t columns, const at::Tensor& lengths, const at::Tensor& counts,
                const OptionalTensor& positions, bool causal) {
  check_tensor("lengths", lengths, at::kLong, {rows}), check_tensor("counts", counts, at::kLong, {rows});
  if (positions) check_tensor("positions", *positions, at::kLong, {rows, columns});
  const int64_t *before = lengths.const_data_ptr<int64_t>(), *news = counts.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows; ++r) {
    check_range(Argument("counts", r), news[r], 0, columns);
    if (news[r]) check_range(Argument("lengths", r), before[r], 0, MAX_SIZE);
    for (int64_t t = 0; t < news[r]; ++t) {
      const int64_t index = before[r] + t;
      pass.rows.push_back(r), pass.columns.push_back(t), pass.index.push_back(index);
      pass.positions.push_back(positions ? positions->const_data_ptr<int64_t>()[r * columns + t] : index);
      check_range(Argument("positions", r), pass.positions.back(), 0, MAX_SIZE);
      pass.own.end.push_back(causal ? index + 1 : before[r] + news[r]);
    }
  }
}

// Every page that is read or written must be in all pools.
void check_tables(const Argument& name, const Pass& pass, const SeenKeys& seen, const at::Tensor& tables, int64_t pages) {
  const int32_t* entries = tables.const_data_ptr<int32_t>();
  const int64_t size = tables.size(1);
  for (int64_t n = 0; n < pass.tokens(); ++n) {
    if (n + 1 < pass.tokens() && pass.rows[n + 1] == pass.rows[n]) continue;  // the last token sees most
    const int64_t needed = pages::count_pages(seen.end[n]);
    TORCH_CHECK(needed <= size, name, " has ", size, " pages a row; row ", pass.rows[n], " needs ", needed);
    for (int64_t p = 0; p < needed; ++p)
      check_range(name, entries[pass.rows[n] * size + p], 0, pages - 1);
  }
}

void set_pools(SeenKeys& seen, const char* key_name, const char* value_name, const Tensors& keys, const Tensors& values,
               const std::vector<std::array<int64_t, 3>>& sizes, int64_t& pages) {
  check_count(key_name, keys.size(), sizes.size(), "block that reads them");
  check_count(value_name, values.size(), sizes.size(), "block that reads them");
  pages = MAX_SIZE;
  for (size_t n = 0; n < sizes.size(); ++n) {
    const auto [heads, key_size, value_size] = sizes[n];
    const Argument key(key_name, n), value(value_name, n);
    check_heads(key, keys[n], {ANY, heads, pages::PAGE, key_size}), pages::check_page(key, keys[n]);
    check_heads(value, values[n], {keys[n].size(0), heads, pages::PAGE, value_size}), pages::check_page(value, values[n]);
    pages = std::min(pages, keys[n].size(0));
    seen.pools.emplace_back(keys[n], values[n]);
  }
}

// Tables by position: cosines and sines (positions, pairs), biases (heads, distances).
void set_position_tables(Pass& pass, const Tensors& cos, const Tensors& sin, const Tensors& biases) {
  int64_t length = 0, distances = 0;
  for (int64_t n = 0; n < pass.tokens(); ++n)
    length = std::max(length, pass.positions[n] + 1), distances = std::max(distances, pass.own.end[n]);
  check_count("rotary_sin", sin.size(), cos.size(), "element of rotary_cos");
  const auto check_length = [](const Argument& name, int64_t given, int64_t needed) {
    TORCH_CHECK(given >= needed, name, " has ", given, " positions; ", needed, " are needed");
  };
  for (size_t n = 0; n < cos.size(); ++n) {
    check_tensor(Argument("rotary_cos", n), cos[n], at::kFloat, {ANY, ANY});
    check_tensor(Argument("rotary_sin", n), sin[n], at::kFloat, {cos[n].size(0), cos[n].size(1)});
    check_length(Argument("rotary_cos", n), cos[n].size(0), length);
    pass.rotary_cos.push_back(cos[n].const_data_ptr<float>()), pass.rotary_sin.push_back(sin[n].const_data_ptr<float>());
    pass.rotary_pairs.push_back(cos[n].size(1));
  }
  for (size_t n = 0; n < biases.size(); ++n) {
    check_tensor(Argument("position_biases", n), biases[n], at::kFloat, {ANY, ANY});
    check_length(Argument("position_biases", n), biases[n].size(1), distances);
    pass.biases.push_back(biases[n].const_data_ptr<float>()), pass.bias_columns.push_back(biases[n].size(1));
  }
  for (const Layer& l : pass.stack.layers) {
    TORCH_CHECK(l.rotary_table < int64_t(cos.size()), "rotary_cos has ", cos.size(), " tables; table ", l.rotary_table,
                " is needed");
    TORCH_CHECK(l.rotary_table < 0 || 2 * cos[l.rotary_table].size(1) <= l.key_size(),
                Argument("rotary_cos", l.rotary_table), " has more pairs than a head of ", l.key_size(), " has");
    TORCH_CHECK(l.bias_table < int64_t(biases.size()), "position_biases has ", biases.size(), " tables; table ",
                l.bias_table, " is needed");
    TORCH_CHECK(l.bias_table < 0 || biases[l.bias_table].size(0) == l.heads, Argument("position_biases", l.bias_table),
                " does not have a row for each of ", l.heads, " heads");
  }
}

// Scratch that the threads hand to each other, in memory that the calling thread keeps between passes.
PassScratch allocate_scratch(const Pass& pass, int64_t threads, Vectors<CacheLine>& memory) {
  PassScratch s;
  const NativeStack& stack = pass.stack;
  int64_t longest = 0, parts_memory = 0;
  for (const SeenKeys* seen : {&pass.own, &pass.source})
    for (int64_t end : seen->end) longest = std::max(longest, end);
  s.parts_of_row = std::max<int64_t>(1, (longest + pages::PART - 1) / pages::PART);
  const auto add_work = [&](auto& works, const SeenKeys& seen, int64_t window, int64_t groups, int64_t heads, int64_t V) {
    auto [at, is_new] = works.try_emplace({window, groups});
    if (is_new) at->second = share_attention(pass, seen, window, groups, threads);
    const int64_t parts = at->second.is_split ? s.parts_of_row : 1;
    if (int64_t(s.sums.size()) < pass.tokens() * heads * parts) s.sums.resize(pass.tokens() * heads * parts);
    if (parts > 1 || at->second.is_split) parts_memory = std::max(parts_memory, heads * parts * V);
  };
  size_t source = 0;
  for (size_t l = 0; l < stack.layers.size(); ++l) {
    const Layer& layer = stack.layers[l];
    s.query_step = std::max({s.query_step, layer.query.rows, layer.cross_query.rows});
    s.key_step = std::max(s.key_step, layer.key.rows), s.value_step = std::max(s.value_step, layer.value.rows);
    add_work(s.own_work, pass.own, layer.window, layer.kv_heads, layer.heads, layer.value_size());
    if (layer.cross_heads)
      add_work(s.source_work, pass.source, 0, layer.cross_kv_heads, layer.cross_heads, pass.source.pools[source++].value_size);
  }
  const std::pair<float**, int64_t> buffers[] = {
      {&s.x, stack.width},         {&s.normed, stack.max_inputs}, {&s.other, stack.max_inputs}, {&s.queries, s.query_step},
      {&s.keys, s.key_step},       {&s.values, s.value_step},     {&s.attended, stack.max_heads}, {&s.hidden, stack.max_hidden},
      {&s.gates, stack.max_hidden}, {&s.first, stack.width},      {&s.second, stack.width},       {&s.parts, parts_memory}};
  const int64_t rows = (pass.tokens() + LANES - 1) / LANES * LANES;  // whole panels
  const auto lines = [&](int64_t size) { return (rows * size * 4 + 63) / 64; };
  int64_t total = 0;
  for (const auto& [buffer, size] : buffers) total += lines(size);
  CacheLine* next = memory.resize(total);
  for (const auto& [buffer, size] : buffers) *buffer = reinterpret_cast<float*>(next), next += lines(size);
  return s;
}

at::Tensor run_pass(const Pass& pass, const at::Tensor& x) {
  const at::Tensor input = x.contiguous(), out = at::zeros_like(input);
  thread_local Vectors<CacheLine> memory;
  thread_local SharedRows many_rows;
  const int64_t products = pass.stack.width * pass.stack.max_hidden * pass.tokens();
  many_rows.is_exact = pass.is_exact;
  PassScratch scratch = allocate_scratch(pass, count_threads(products), memory);
  SharedRows& shared = many_rows;  // the calling thread's, for all
  run_threads(products, [&](Barrier& barrier, int number, int count) {
    PassThread(pass, scratch, shared, barrier, number, count)
        .run(input.const_data_ptr<float>(), static_cast<float*>(out.data_ptr()), x.size(1));
  });
  return out;
}

// x (R, T, D): the first counts[r] tokens of row r follow lengths[r] others -> (R, T, D), zeros for the rest.  keys,
// values: pools (pages, heads, PAGE, size) of each block; tables (R, pages a row) say which are those of a row.  Sources
// likewise, for blocks with cross-attention.  positions (R, T): those of rotary angles, if not the number of tokens before.
// causal: whether a token attends up to itself, else to all of its row.
at::Tensor run_stack(const c10::intrusive_ptr<NativeStack>& stack, const at::Tensor& x, const at::Tensor& lengths,
                     const at::Tensor& counts, const at::Tensor& tables, const Tensors& keys, const Tensors& values,
                     const Tensors& source_keys, const Tensors& source_values, const OptionalTensor& source_tables,
                     const OptionalTensor& source_lengths, const OptionalTensor& positions, const Tensors& rotary_cos,
                     const Tensors& rotary_sin, const Tensors& position_biases, bool exact, bool causal) {
  stack->check_weights();
  check_dtype("x", x, at::kFloat), check_shape("x", x, {ANY, ANY, stack->width});
  const int64_t rows = x.size(0), columns = x.size(1);
  Pass pass{*stack};
  pass.is_exact = exact;
  set_tokens(pass, rows, columns, lengths, counts, positions, causal);
  std::vector<std::array<int64_t, 3>> own, source;
  for (const Layer& l : stack->layers) {
    own.push_back({l.kv_heads, l.key_size(), l.value_size()});
    if (l.cross_heads) source.push_back({l.cross_kv_heads, l.cross_query.rows / l.cross_heads, ANY});
  }
  int64_t pages;
  set_pools(pass.own, "keys", "values", keys, values, own, pages);
  check_tensor("tables", tables, at::kInt, {rows, ANY});
  check_tables("tables", pass, pass.own, tables, pages);
  pass.own.tables = tables.const_data_ptr<int32_t>(), pass.own.table_step = tables.size(1);
  set_pools(pass.source, "source_keys", "source_values", source_keys, source_values, source, pages);
  if (!source.empty()) {
    TORCH_CHECK(source_tables && source_lengths, "source_tables and source_lengths are needed by blocks with cross-attention");
    check_tensor("source_tables", *source_tables, at::kInt, {rows, ANY});
    check_tensor("source_lengths", *source_lengths, at::kLong, {rows});
    for (int64_t row : pass.rows) {
      const int64_t length = source_lengths->const_data_ptr<int64_t>()[row];
      check_range(Argument("source_lengths", row), length, 0, MAX_SIZE);
      pass.source.end.push_back(length);
    }
    check_tables("source_tables", pass, pass.source, *source_tables, pages);
    pass.source.tables = source_tables->const_data_ptr<int32_t>(), pass.source.table_step = source_tables->size(1);
    size_t number = 0;
    for (const Layer& l : stack->layers)
      if (l.cross_heads) check_source(l, source_values[number], number), ++number;
  }
  set_position_tables(pass, rotary_cos, rotary_sin, position_biases);
  return pass.tokens() ? run_pass(pass, x) : at::zeros_like(x);
}

}  // namespace
