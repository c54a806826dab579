// What a pass of some tokens through a stack reads: its tokens, pages and tables, checked.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "attention/paged_attention.h"
#include "stack/stack_weights.h"

namespace {

// Keys and values that the tokens of a pass see: those of their own row, or of its source.
struct SeenKeys {
  std::vector<pages::Pools> pools;    // one a block that reads them
  const int32_t* tables = nullptr;    // (rows, table_step)
  int64_t table_step = 0;
  std::vector<int64_t> end;           // of each token: it sees the keys before this one
};

struct Pass {
  const NativeStack& stack;
  std::vector<int64_t> rows, columns;          // of x (R, T, D), for each token
  std::vector<int64_t> index, positions;       // in its row: the number of tokens before it; for rotary angles
  SeenKeys own, source;
  bool is_exact = false;                       // products of a few tokens are those of many
  std::vector<const float*> rotary_cos, rotary_sin, biases;
  std::vector<int64_t> rotary_pairs, bias_columns;

  int64_t tokens() const { return int64_t(rows.size()); }

  // Whether all keys that two tokens see lie in the same pages: tokens of one row, or of beams with one source.
  bool have_one_table(const SeenKeys& seen, int64_t a, int64_t b) const {
    const int32_t *first = seen.tables + rows[a] * seen.table_step, *second = seen.tables + rows[b] * seen.table_step;
    return first == second || std::equal(first, first + pages::count_pages(std::max(seen.end[a], seen.end[b])), second);
  }
};

// Part of the attention of one block: some tokens that see one row of keys, and some of the parts of these.
struct AttentionItem {
  int64_t token, tokens, part, parts;
};

// How the threads share out the attention of blocks with one window.
struct AttentionWork {
  int64_t groups = 0;
  bool is_split = false;                // whether the parts of one row are different items, to be added up afterwards
  std::vector<AttentionItem> items;
  std::vector<int64_t> costs;           // of the items before each, and of all

  // The first of all (item, group) whose work thread `number` of `count` does.
  int64_t begin(int64_t number, int64_t count) const {
    if (number == count) return int64_t(items.size()) * groups;
    const int64_t cost = costs.back() * groups * number / count;
    const int64_t item = std::upper_bound(costs.begin(), costs.end() - 1, cost / groups) - costs.begin() - 1;
    return item * groups + (cost - costs[item] * groups) / (costs[item + 1] - costs[item]);
  }
};

constexpr int64_t TOKENS_TOGETHER = 16;  // that attend to one row of keys while a part of it is in the cache

inline int64_t first_key(int64_t end, int64_t window) { return window ? std::max<int64_t>(0, end - window) : 0; }

inline AttentionWork share_attention(const Pass& pass, const SeenKeys& seen, int64_t window, int64_t groups,
                                     int64_t threads) {
  using pages::PART;
  AttentionWork work{groups};
  std::vector<AttentionItem> blocks;
  bool has_parts = false;
  for (int64_t n = 0, size; n < pass.tokens(); n += size) {
    const int64_t limit = std::min(TOKENS_TOGETHER, pass.tokens() - n);
    for (size = 1; size < limit && pass.have_one_table(seen, n, n + size);) ++size;
    const auto [least, most] = std::minmax_element(&seen.end[n], &seen.end[n] + size);
    const int64_t first = first_key(*least, window) / PART, end = (*most + PART - 1) / PART;
    blocks.push_back({n, size, first, std::max<int64_t>(0, end - first)});
    has_parts = has_parts || end - first > 1;
  }
  work.is_split = has_parts && int64_t(blocks.size()) * groups < 4 * threads;
  const auto add = [&](const AttentionItem& item) {
    const int64_t first = std::max(first_key(seen.end[item.token], window), item.part * PART);
    const int64_t end = std::min(seen.end[item.token + item.tokens - 1], (item.part + item.parts) * PART);
    work.items.push_back(item);
    work.costs.push_back(work.costs.back() + item.tokens * (std::max<int64_t>(0, end - first) + PART / 16));
  };
  work.costs = {0};
  for (const AttentionItem& block : blocks) {
    if (!work.is_split || block.parts <= 1) {
      add(block);
      continue;
    }
    for (int64_t part = 0; part < block.parts; ++part) add({block.token, block.tokens, block.part + part, 1});
  }
  return work;
}

}  // namespace
