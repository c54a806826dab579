// Searches for many texts at once, a step in one call: embedding, the stack, the product with the output table, the
// ranking, and what becomes of the beams.  Threads share out the rows; who is done early ranks some of the others'.
//
// Beams change places at every step.  What they remember stays where it was written; `origins` tells for each token of
// a row in which row of the cache it lies.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <omp.h>

#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "beams.h"
#include "ranked.h"

namespace {
namespace panels {

using Tensors = std::vector<at::Tensor>;
using Maybe = std::optional<at::Tensor>;
using Told = std::tuple<std::vector<double>, Tensors>;  // hypotheses: their scores and their tokens

const float* numbers(const Maybe& t) { return t ? t->const_data_ptr<float>() : nullptr; }

// What takes the steps of searches with one model.
struct Searcher : torch::CustomClassHolder {
  c10::intrusive_ptr<Plan> plan;
  at::Tensor table;
  Maybe bias, tokens;  // tokens: the table of the input, where rows are looked up in it, scaled and given their places
  double scale, token_scale;

  Searcher(c10::intrusive_ptr<Plan> plan_, at::Tensor table_, Maybe bias_, double scale_, Maybe tokens_, double token_scale_)
      : plan(std::move(plan_)), table(std::move(table_)), bias(std::move(bias_)), tokens(std::move(tokens_)),
        scale(scale_), token_scale(token_scale_) {
    check(table);
    if (tokens) check(*tokens);
    TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->is_cpu() &&
                          bias->numel() == table.size(0)), "expected an fp32 number for each row of the table");
  }

  void check(const at::Tensor& t) const {
    TORCH_CHECK(t.dim() == 2 && t.scalar_type() == at::kFloat && t.is_contiguous() && t.is_cpu(), "expected an fp32 table");
    TORCH_CHECK(t.size(1) == plan->width, "a table of another width");
  }

  bool fits() const { return says(*plan); }

  // Memory for what rows remember: that of the last search once nobody reads it any more.  Fresh pages cost more than
  // what is written to them; but what one large search needed is not kept for ever.
  at::Tensor room(int64_t size) {
    const std::lock_guard<std::mutex> alone(lock);
    if (!memory.defined() || memory.storage().use_count() > 1 || memory.numel() < size || memory.numel() / 2 > size) {
      memory.reset();
      memory = at::empty({size}, table.options());
    }
    return memory.alias();
  }

 private:
  std::mutex lock;
  at::Tensor memory;
};

// Keys and values of a block for at least so many columns; `made`, `made_values`: how many numbers a token has in each.
Held held(const at::Tensor& keys, const at::Tensor& values, int64_t rows, int64_t groups, int64_t columns, int64_t made,
          int64_t made_values) {
  for (const auto& [t, size] : {std::pair{&keys, made}, {&values, made_values}}) {
    TORCH_CHECK(t->dim() == 4 && t->scalar_type() == at::kFloat && t->stride(3) == 1 && t->is_cpu(), "expected fp32 heads");
    TORCH_CHECK(t->size(0) == rows && t->size(1) == groups && t->size(2) >= columns && t->size(3) * groups == size,
                "keys or values that do not fit");
  }
  return {static_cast<float*>(keys.data_ptr()), static_cast<float*>(values.data_ptr()), keys.stride(0), keys.stride(1),
          keys.stride(2), values.stride(0), values.stride(1), values.stride(2), keys.size(3), values.size(3)};
}

// The texts of one batch, `asked.size` rows each, and what their rows remember.
struct Search : torch::CustomClassHolder {
  // lengths (B,): tokens before the next of each row; places (columns, D): added to embedded tokens; numbers: beams,
  // longest, stop, and the tokens that end a text.
  Search(c10::intrusive_ptr<Searcher> by_, Tensors keys_, Tensors values_, Tensors source_keys_, Tensors source_values_,
         Maybe seen_, const at::Tensor& lengths, Maybe places_, std::vector<int64_t> numbers, double penalty)
      : by(std::move(by_)), keys(std::move(keys_)), values(std::move(values_)), source_keys(std::move(source_keys_)),
        source_values(std::move(source_values_)), seen(std::move(seen_)), places(std::move(places_)), many{*by->plan} {
    TORCH_CHECK(numbers.size() >= 3 && numbers[0] > 0, "expected beams, longest, stop, ends");
    asked = {numbers[0], numbers[1], numbers[2], penalty, {numbers.begin() + 3, numbers.end()}};
    rows = lengths.numel(), many.copies = asked.size;
    TORCH_CHECK(lengths.scalar_type() == at::kLong && lengths.is_contiguous() && rows % asked.size == 0, "rows that do not fit");
    length.assign(lengths.const_data_ptr<int64_t>(), lengths.const_data_ptr<int64_t>() + rows);
    hold(by->plan->layers);
    TORCH_CHECK(!places || (places->size(0) >= columns && places->size(1) == by->plan->width && places->is_contiguous() &&
                            places->scalar_type() == at::kFloat), "places that do not fit");
    origins.resize(rows * columns);
    for (int64_t n = 0; n < rows * columns; ++n) origins[n] = n / columns;
  }

  // The next text: its running beams (beams, tokens so far) and what has ended; with none so far it begins with `first`.
  void add(int64_t first, const std::vector<double>& scores, const at::Tensor& running, const std::vector<double>& ended,
           const Tensors& texts, bool done) {
    TORCH_CHECK(int64_t(scores.size()) == asked.size && running.size(0) == asked.size, "another number of beams");
    TORCH_CHECK(ended.size() == texts.size(), "a score for each text");
    Beams one;
    for (int64_t n = 0; n < asked.size; ++n) one.running.push_back({list(running[n]), scores[n]});
    for (size_t n = 0; n < texts.size(); ++n) one.ended.push_back({list(texts[n]), ended[n]});
    one.done = done;
    beams.push_back(std::move(one)), firsts.push_back(first);
  }

  // A step of all texts that are not done; those that are done now.  x (rows, D): what `newest` tells embedded, where
  // that is not done here; `without`: tokens that are passed over, though they have their share.
  std::vector<int64_t> step(const Maybe& x, const std::vector<int64_t>& without) {
    live.clear();
    for (int64_t n = 0; n < int64_t(beams.size()); ++n)
      if (!beams[n].done) live.push_back(n);
    TORCH_CHECK(!live.empty() && int64_t(beams.size()) * asked.size == rows, "texts that do not fit");
    const int64_t each = beginning() ? 1 : asked.size;  // all beams of a text begin alike
    many.rows.clear();
    for (int64_t n : live)
      for (int64_t c = 0; c < asked.size; ++c) {
        const int64_t b = n * asked.size + c;
        TORCH_CHECK(length[b] >= 0 && length[b] < columns, "a row that does not fit");
        origins[b * columns + length[b]] = c < each ? b : b - c;
        if (c < each) many.rows.push_back({b, origins.data() + b * columns, length[b] + 1, length[b]});
      }
    const int64_t count = int64_t(many.rows.size()), width = by->plan->width;
    TORCH_CHECK(x || by->tokens, "expected embedded rows");
    if (!x) embed(each);
    TORCH_CHECK(!x || (x->scalar_type() == at::kFloat && x->is_contiguous() && x->numel() == count * width), "expected fp32 rows");
    many.x = x ? x->const_data_ptr<float>() : embedded.data();
    const int64_t V = by->table.size(0), candidates = std::max<int64_t>(2, 1 + asked.ends.size()) * asked.size;
    const int64_t wanted = std::min(candidates, asked.size * V);
    found.assign(count * wanted, NOTHING_YET), sums.resize(count), found_at.resize(count * wanted);
    const Output out{by->table.const_data_ptr<float>(), numbers(by->bias), V, width, float(by->scale), without.data(),
                     int64_t(without.size()), wanted, found.data(), sums.data(), found_at.data()};
    run(many, out);
    return advanced(out, each);
  }

  // What the rows of texts that are not done read next, and how many tokens stand before.
  std::tuple<at::Tensor, at::Tensor> newest() const {
    std::vector<int64_t> said, before;
    for (size_t n = 0; n < beams.size(); ++n)
      for (int64_t c = 0; c < (beginning() ? 1 : asked.size) && !beams[n].done; ++c)
        said.push_back(token(n, c)), before.push_back(length[n * asked.size + c]);
    return {tensor(said), tensor(before)};
  }

  // The running beams of a text, and those that have ended.
  std::tuple<Told, Told> text(int64_t number) const {
    const Beams& one = beams.at(number);
    return {told(one.running), told(one.ended)};
  }

  at::Tensor lengths() const { return tensor(length); }
  at::Tensor origin() const { return tensor(origins).view({rows, columns}); }

 private:
  c10::intrusive_ptr<Searcher> by;
  Tensors keys, values, source_keys, source_values;
  Maybe seen, places;
  Many many;
  Asked asked;
  int64_t rows, columns;
  std::vector<Beams> beams;
  std::vector<int64_t> firsts, live, length, origins, found_at;
  std::vector<float> embedded, found, sums;

  static std::vector<int64_t> list(const at::Tensor& t) {
    TORCH_CHECK(t.scalar_type() == at::kLong && t.is_contiguous(), "expected tokens");
    return {t.const_data_ptr<int64_t>(), t.const_data_ptr<int64_t>() + t.numel()};
  }

  static at::Tensor tensor(const std::vector<int64_t>& list) {
    at::Tensor t = at::empty({int64_t(list.size())}, at::kLong);
    std::copy(list.begin(), list.end(), t.mutable_data_ptr<int64_t>());
    return t;
  }

  static Told told(const std::vector<Hypothesis>& given) {
    Told out;
    for (const Hypothesis& one : given) std::get<0>(out).push_back(one.score), std::get<1>(out).push_back(tensor(one.tokens));
    return out;
  }

  bool beginning() const {
    return std::any_of(beams.begin(), beams.end(), [](const Beams& one) { return !one.done && !one.length(); });
  }

  int64_t token(int64_t text, int64_t beam) const {
    const std::vector<int64_t>& said = beams[text].running[beam].tokens;
    return said.empty() ? firsts[text] : said.back();
  }

  // Where keys and values lie: a slot for each block, and a source for each that looks at one.
  void hold(const std::vector<Layer>& layers) {
    TORCH_CHECK(!keys.empty() && keys.size() == layers.size() && values.size() == keys.size(), "a slot for each block");
    const size_t looking = std::count_if(layers.begin(), layers.end(), [](const Layer& l) { return l.cross_heads > 0; });
    TORCH_CHECK(source_keys.size() == looking && source_values.size() == looking, "a source for each block that looks at it");
    const int64_t texts = rows / asked.size, size = looking ? source_keys[0].size(2) : 0;
    columns = keys[0].size(2) - 1;  // the last one is for padding
    for (size_t l = 0, s = 0; l < layers.size(); ++l) {
      const Layer& own = layers[l];
      many.own.push_back(held(keys[l], values[l], rows, own.groups, columns + 1, own.key.rows, own.value.rows));
      many.sources.emplace_back();
      if (!own.cross_heads) continue;
      const int64_t each = own.cross_heads / own.cross_groups;
      many.sources.back() = held(source_keys[s], source_values[s], texts, own.cross_groups, size,
                                 own.cross_query.rows / each, own.cross_output.columns / each);
      ++s;
    }
    if (looking) looked_at(texts, size);
  }

  void looked_at(int64_t texts, int64_t size) {
    many.source_lengths.assign(texts, size);
    if (!seen) return;
    TORCH_CHECK(seen->scalar_type() == at::kBool && seen->is_contiguous() && seen->dim() == 2 && seen->size(1) == size &&
                (seen->size(0) == 1 || seen->size(0) == texts), "a mask that does not fit");
    many.seen = seen->const_data_ptr<bool>(), many.seen_row = seen->size(0) > 1 ? size : 0;
    bool holes = false;
    for (int64_t t = 0; t < texts; ++t) {
      const bool* row = many.seen + t * many.seen_row;
      int64_t& length = many.source_lengths[t];
      while (length > 0 && !row[length - 1]) --length;
      holes = holes || std::find(row, row + length, false) != row + length;
    }
    if (!holes) many.seen = nullptr;  // padding comes last, as it should
  }

  void embed(int64_t each) {
    const int64_t width = by->plan->width, V = by->tokens->size(0);
    const float *from = numbers(by->tokens), *place = numbers(places), scale = float(by->token_scale);
    embedded.resize(many.rows.size() * width);
    float* to = embedded.data();
    for (size_t n = 0; n < many.rows.size(); ++n, to += width) {
      const int64_t said = token(live[n / each], n % each);
      TORCH_CHECK(said >= 0 && said < V, "a token that is none");
      for (int64_t i = 0; i < width; ++i) to[i] = from[said * width + i] * scale;
      if (place)
        for (int64_t i = 0; i < width; ++i) to[i] += place[many.rows[n].at * width + i];
    }
  }

  static void run(const Many& many, const Output& out) {
    const int64_t rows = int64_t(many.rows.size()), vectors = (rows + LANES - 1) / LANES;
    const int threads = at::in_parallel_region() ? 1 : int(std::min<int64_t>(at::get_num_threads(), vectors));
    Waiting waiting;
    Failure failure;
#pragma omp parallel num_threads(std::max(1, threads))
    {
      const int64_t number = omp_get_thread_num(), of = omp_get_num_threads();  // perhaps fewer than were asked for
      failure.keep([&] {
        thread_local std::vector<float> memory;  // the same for all steps: fresh pages would cost more than they hold
        Share share(many, vectors * number / of * LANES, std::min(rows, vectors * (number + 1) / of * LANES), memory);
        share.run();
        waiting.add(share.panels);
      });
      waiting.leave();
      failure.keep([&] {
        for (std::vector<Panel> some; !(some = waiting.take(of)).empty();) rank(some, out);
      });
    }
    failure.tell();
  }

  // The best of what was found in the rows of a text are its candidates; rows go on where their beams come from.
  std::vector<int64_t> advanced(const Output& out, int64_t each) {
    std::vector<int64_t> over, at(out.count), before(asked.size * columns);
    std::vector<float> value(out.count);
    for (size_t n = 0; n < live.size(); ++n) {
      Beams& text = beams[live[n]];
      std::fill(value.begin(), value.end(), NOTHING_YET), std::fill(at.begin(), at.end(), 0);
      Best best{value.data(), at.data(), out.count};
      for (int64_t beam = 0; beam < each; ++beam) {
        const int64_t row = int64_t(n) * each + beam;
        const float score = float(text.running[beam].score);
        for (int64_t i = row * out.count; i < (row + 1) * out.count && out.places[i] >= 0; ++i)
          best.offer((out.values[i] - out.sums[row]) + score, beam * out.tokens + out.places[i]);
      }
      std::vector<Candidate> candidates;
      for (int64_t i = 0; i < out.count; ++i) candidates.push_back({value[i], at[i] / out.tokens, at[i] % out.tokens});
      moved(live[n], text.advance(asked, std::move(candidates)), before);
      if (text.done) over.push_back(live[n]);
    }
    return over;
  }

  void moved(int64_t text, const std::vector<int64_t>& from, std::vector<int64_t>& before) {
    const auto own = origins.begin() + text * asked.size * columns;
    const int64_t first = text * asked.size;
    std::copy(own, own + asked.size * columns, before.begin());
    for (int64_t c = 0; c < asked.size; ++c) {
      if (c < int64_t(from.size()) && from[c] != c)
        std::copy_n(before.begin() + from[c] * columns, length[first + c] + 1, own + c * columns);
      ++length[first + c];
    }
  }
};

}  // namespace panels
}  // namespace

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  using panels::Maybe, panels::Search, panels::Searcher, panels::Tensors;
  library.class_<Searcher>("Searcher")
      .def(torch::init<c10::intrusive_ptr<Plan>, at::Tensor, Maybe, double, Maybe, double>())
      .def("fits", &Searcher::fits)
      .def("room", &Searcher::room);
  library.class_<Search>("Search")
      .def(torch::init<c10::intrusive_ptr<Searcher>, Tensors, Tensors, Tensors, Tensors, Maybe, const at::Tensor&, Maybe,
                       std::vector<int64_t>, double>())
      .def("add", &Search::add)
      .def("step", &Search::step)
      .def("newest", &Search::newest)
      .def("text", &Search::text)
      .def("lengths", &Search::lengths)
      .def("origins", &Search::origin);
}
