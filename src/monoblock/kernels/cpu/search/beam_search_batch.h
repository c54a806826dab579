// Beam searches for the prompts of one batch, a step in one call: embedding, the stack, the product with the output
// table, the top k, and the next beams.  Threads share out the rows; one that is done early ranks rows of the others.
//
// Beams change rows at every step.  Their keys and values stay where they were written; `cache_rows` has the row of the
// cache in which each token of a row lies.
//
// A batch belongs to one decoder state.  Its methods lock it, so that threads that share one by mistake wait for each
// other.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "search/beam_hypotheses.h"
#include "search/search_caches.h"
#include "search/search_model.h"
#include "search/search_threads.h"

namespace {
namespace panels {

using ScoredTokens = std::tuple<std::vector<double>, Tensors>;  // hypotheses: their scores and their tokens

inline at::Tensor to_tensor(const std::vector<int64_t>& list) {
  at::Tensor t = at::empty({int64_t(list.size())}, at::kLong);
  std::copy(list.begin(), list.end(), t.mutable_data_ptr<int64_t>());
  return t;
}

inline std::vector<int64_t> to_list(const at::Tensor& t) {
  return {t.const_data_ptr<int64_t>(), t.const_data_ptr<int64_t>() + t.numel()};
}

inline ScoredTokens to_scored_tokens(const std::vector<Hypothesis>& hypotheses) {
  ScoredTokens out;
  for (const Hypothesis& h : hypotheses)
    std::get<0>(out).push_back(h.score), std::get<1>(out).push_back(to_tensor(h.tokens));
  return out;
}

inline BeamSettings read_settings(int64_t beams, int64_t max_new_tokens, const std::string& early_stopping,
                                  std::vector<int64_t> eos_tokens, double length_penalty,
                                  double length_offset) {
  check_range("beams", beams, 1, MAX_HEADS), check_range("max_new_tokens", max_new_tokens, 1, MAX_SIZE);
  const bool is_true = early_stopping == "true", is_never = early_stopping == "never";
  TORCH_CHECK(is_true || is_never || early_stopping == "false", "early_stopping is '", early_stopping,
              "'; one of false, true, never is needed");
  return {beams, max_new_tokens,
          is_true    ? BeamSettings::YES
          : is_never ? BeamSettings::NEVER
                     : BeamSettings::NO,
          length_penalty, length_offset, std::move(eos_tokens)};
}

class BeamSearchBatch : public torch::CustomClassHolder {
 public:
  // Keys and values (rows, heads, columns, size) of each block, `beams` rows a prompt; those of the sources (prompts,
  // …) of each block with cross-attention.  lengths (rows,): tokens before the next of each row.  position_table
  // (columns, D): added to embedded tokens.
  BeamSearchBatch(c10::intrusive_ptr<SearchModel> model_, const Tensors& keys, const Tensors& values,
                  const Tensors& source_keys, const Tensors& source_values, const OptionalTensor& source_mask,
                  const at::Tensor& lengths_, OptionalTensor position_table, int64_t beams, int64_t max_new_tokens,
                  const std::string& early_stopping, std::vector<int64_t> eos_tokens, double length_penalty,
                  double length_offset)
      : model(std::move(model_)), position_table(std::move(position_table)),
        settings(read_settings(beams, max_new_tokens, early_stopping, std::move(eos_tokens), length_penalty, length_offset)),
        batch{*checked(model)->stack} {
    check_tensor("lengths", lengths_, at::kLong, {ANY});
    rows = lengths_.numel(), batch.rows_per_source = beams, row_lengths = to_list(lengths_);
    TORCH_CHECK(rows > 0 && rows % beams == 0, "lengths has ", rows, " rows, which beams=", beams, " does not divide");
    columns = set_caches(batch, pinned, keys, values, rows);
    set_sources(batch, pinned, source_keys, source_values, rows / beams);
    if (source_mask) set_source_mask(batch, pinned, *source_mask);
    for (int64_t b = 0; b < rows; ++b) check_range(Argument("lengths", b), row_lengths[b], 0, columns);
    if (this->position_table) check_position_table(*this->position_table);
    origins.resize(rows * columns);
    for (int64_t n = 0; n < rows * columns; ++n) origins[n] = n / columns;
  }

  // Add the next prompt: its running beams (beams, tokens so far) and what has finished; with none so far it begins
  // with `first_token`.
  void add(int64_t first_token, const std::vector<double>& scores, const at::Tensor& running,
           const std::vector<double>& finished_scores, const Tensors& finished, bool done) {
    const std::lock_guard<std::mutex> guard(lock);
    TORCH_CHECK(int64_t(prompts.size() + 1) * settings.beams <= rows, "all ", prompts.size(),
                " prompts of this batch are there already");
    check_count("scores", scores.size(), settings.beams, "beam");
    check_count("finished_scores", finished_scores.size(), finished.size(), "element of finished");
    check_tensor("running", running, at::kLong, {settings.beams, ANY});
    BeamHypotheses prompt;
    check_tokens("running", running);
    for (int64_t n = 0; n < settings.beams; ++n) prompt.running.push_back({to_list(running[n]), scores[n]});
    for (size_t n = 0; n < finished.size(); ++n) {
      check_tensor(Argument("finished", n), finished[n], at::kLong, {ANY}), check_tokens("finished", finished[n]);
      prompt.finished.push_back({to_list(finished[n]), finished_scores[n]});
    }
    prompt.is_done = done;
    check_range("first_token", first_token, 0, input_vocabulary() - 1);
    prompts.push_back(std::move(prompt)), first_tokens.push_back(first_token);
  }

  // A step of all prompts that are not done; returns those that are done now.  x (rows, D): what `next_inputs` returns,
  // embedded, unless the model has a token table.  `suppressed` tokens are passed over, though they keep their
  // probability.
  std::vector<int64_t> step(const OptionalTensor& x, const std::vector<int64_t>& suppressed) {
    const std::lock_guard<std::mutex> guard(lock);
    model->check(), pinned.check("BeamSearchBatch");
    const int64_t V = model->vocabulary(), D = model->stack->width;
    for (size_t n = 0; n < suppressed.size(); ++n) check_range(Argument("suppressed", n), suppressed[n], 0, V - 1);
    const int64_t beams_read = collect_rows(), count = int64_t(batch.rows.size());
    if (x) {
      check_tensor("x", *x, at::kFloat, {count, D});
    } else {
      TORCH_CHECK(model->token_table, "x is None; embedded tokens (", count, ", ", D,
                  ") are needed by a model without a token table");
      embed(beams_read);
    }
    batch.x = x ? x->const_data_ptr<float>() : embedded.data();
    const int64_t candidates = std::max<int64_t>(2, 1 + settings.eos_tokens.size()) * settings.beams;
    const WeightMatrix table = model->output_matrix();
    LogitsTopK out{table,
                   V,
                   D,
                   model->output_scale,
                   suppressed,
                   std::min(candidates, settings.beams * V)};
    out.resize(count);
    run_batch(batch, out);
    return advance(out, beams_read);
  }

  // What the rows of prompts that are not done read next: tokens, and the number of tokens before each.
  std::tuple<at::Tensor, at::Tensor> next_inputs() {
    const std::lock_guard<std::mutex> guard(lock);
    std::vector<int64_t> tokens, before;
    for (size_t n = 0; n < prompts.size(); ++n)
      for (int64_t c = 0; c < (is_beginning() ? 1 : settings.beams) && !prompts[n].is_done; ++c)
        tokens.push_back(last_token(n, c)), before.push_back(row_lengths[n * settings.beams + c]);
    return {to_tensor(tokens), to_tensor(before)};
  }

  // The running beams of a prompt, and its finished hypotheses.
  std::tuple<ScoredTokens, ScoredTokens> hypotheses(int64_t prompt) {
    const std::lock_guard<std::mutex> guard(lock);
    check_range("prompt", prompt, 0, int64_t(prompts.size()) - 1);
    return {to_scored_tokens(prompts[prompt].running), to_scored_tokens(prompts[prompt].finished)};
  }

  at::Tensor lengths() {
    const std::lock_guard<std::mutex> guard(lock);
    return to_tensor(row_lengths);
  }

  // (rows, columns)
  at::Tensor cache_rows() {
    const std::lock_guard<std::mutex> guard(lock);
    return to_tensor(origins).view({rows, columns});
  }

 private:
  std::mutex lock;
  const c10::intrusive_ptr<SearchModel> model;
  const OptionalTensor position_table;
  const BeamSettings settings;
  PinnedTensors pinned;
  Batch batch;
  int64_t rows, columns;
  std::vector<BeamHypotheses> prompts;
  std::vector<int64_t> first_tokens, live, row_lengths, origins;  // live: prompts of this step
  std::vector<float> embedded;

  static const c10::intrusive_ptr<SearchModel>& checked(const c10::intrusive_ptr<SearchModel>& model) {
    TORCH_CHECK(model, "model is None; a SearchModel is needed");
    return model;
  }

  void check_position_table(const at::Tensor& table) {
    check_tensor("position_table", table, at::kFloat, {ANY, model->stack->width});
    TORCH_CHECK(table.size(0) >= columns, "position_table has ", table.size(0), " rows; ", columns, " are needed");
    pinned.add(table);
  }

  void check_tokens(const char* name, const at::Tensor& tokens) const {
    const int64_t V = std::max(model->vocabulary(), model->token_table ? model->token_table->size(0) : 0);
    for (int64_t n = 0; n < tokens.numel(); ++n) check_range(name, tokens.const_data_ptr<int64_t>()[n], 0, V - 1);
  }

  int64_t input_vocabulary() const { return model->token_table ? model->token_table->size(0) : MAX_SIZE; }

  // -- a step ---------------------------------------------------------------------------------------------------------

  bool is_beginning() const {
    return std::any_of(prompts.begin(), prompts.end(),
                       [](const BeamHypotheses& p) { return !p.is_done && !p.length(); });
  }

  int64_t last_token(int64_t prompt, int64_t beam) const {
    const std::vector<int64_t>& tokens = prompts[prompt].running[beam].tokens;
    return tokens.empty() ? first_tokens[prompt] : tokens.back();
  }

  // The rows of this step; returns how many beams of each prompt are read: one at the beginning, where all are alike.
  int64_t collect_rows() {
    const bool is_first = is_beginning();
    const int64_t beams = settings.beams, beams_read = is_first ? 1 : beams;
    TORCH_CHECK(int64_t(prompts.size()) * beams == rows, prompts.size(), " prompts of ", beams,
                " beams were added to a batch of ", rows, " rows");
    live.clear(), batch.rows.clear();
    for (int64_t n = 0; n < int64_t(prompts.size()); ++n) {
      if (prompts[n].is_done) continue;
      TORCH_CHECK((prompts[n].length() == 0) == is_first, "prompt ", n,
                  " has begun and another has not; add them to two batches");
      live.push_back(n);
    }
    TORCH_CHECK(!live.empty(), "all prompts of this batch are done");
    for (int64_t n : live)
      for (int64_t c = 0; c < beams; ++c) {
        const int64_t b = n * beams + c, length = row_lengths[b];
        TORCH_CHECK(length < columns, "row ", b, " has ", length, " tokens, and the cache has ", columns,
                    " columns; make a larger one");
        origins[b * columns + length] = c < beams_read ? b : b - c;
        if (c < beams_read) batch.rows.push_back({b, origins.data() + b * columns, length + 1, length});
      }
    return beams_read;
  }

  void embed(int64_t beams_read) {
    const int64_t D = model->stack->width;
    const float *table = fp32_or_null(model->token_table), *positions = fp32_or_null(position_table),
                scale = model->token_scale;
    embedded.resize(batch.rows.size() * D);
    float* to = embedded.data();
    for (size_t n = 0; n < batch.rows.size(); ++n, to += D) {
      const int64_t token = last_token(live[n / beams_read], n % beams_read);
      TORCH_CHECK(token >= 0 && token < input_vocabulary(), "token ", token, " is not in a token_table of ",
                  input_vocabulary(), " rows");
      for (int64_t i = 0; i < D; ++i) to[i] = table[token * D + i] * scale;
      if (positions)
        for (int64_t i = 0; i < D; ++i) to[i] += positions[batch.rows[n].column * D + i];
    }
  }

  // The top k of all rows of a prompt are its candidates.
  std::vector<int64_t> advance(const LogitsTopK& out, int64_t beams_read) {
    std::vector<int64_t> done, ids(out.k), before(settings.beams * columns);
    std::vector<float> values(out.k);
    for (size_t n = 0; n < live.size(); ++n) {
      BeamHypotheses& prompt = prompts[live[n]];
      std::fill(values.begin(), values.end(), MINUS_INFINITY), std::fill(ids.begin(), ids.end(), 0);
      TopK top{values.data(), ids.data(), out.k};
      for (int64_t beam = 0; beam < beams_read; ++beam) {
        const int64_t row = int64_t(n) * beams_read + beam;
        const float score = float(prompt.running[beam].score);
        for (int64_t i = row * out.k; i < (row + 1) * out.k && out.ids[i] >= 0; ++i)
          top.offer((out.values[i] - out.log_sums[row]) + score, beam * out.tokens + out.ids[i]);
      }
      std::vector<Candidate> candidates;
      for (int64_t i = 0; i < out.k; ++i) candidates.push_back({values[i], ids[i] / out.tokens, ids[i] % out.tokens});
      reorder(live[n], prompt.advance(settings, std::move(candidates)), before);
      if (prompt.is_done) done.push_back(live[n]);
    }
    return done;
  }

  // Rows take over where the tokens of the beams lie that they continue; `before` is scratch.
  void reorder(int64_t prompt, const std::vector<int64_t>& sources, std::vector<int64_t>& before) {
    const auto begin = origins.begin() + prompt * settings.beams * columns;
    const int64_t first = prompt * settings.beams;
    std::copy(begin, begin + settings.beams * columns, before.begin());
    for (int64_t c = 0; c < settings.beams; ++c) {
      if (c < int64_t(sources.size()) && sources[c] != c)
        std::copy_n(before.begin() + sources[c] * columns, row_lengths[first + c] + 1, begin + c * columns);
      ++row_lengths[first + c];
    }
  }
};

}  // namespace panels
}  // namespace
