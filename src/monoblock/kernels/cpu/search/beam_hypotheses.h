// Beam search of one prompt: its running beams, its finished hypotheses, and when it is done; as decoding/beam.py has
// it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr double EXCLUDED = -1e9;  // added to the score of a beam that must not be continued

struct Hypothesis {
  std::vector<int64_t> tokens;
  double score;
};

struct Candidate {
  double score;
  int64_t beam, token;
};

struct BeamSettings {
  // When to stop once there are as many finished hypotheses as beams: if no running beam can still be better at its
  // present length, at once, or at any length.
  enum EarlyStopping { NO, YES, NEVER };
  int64_t beams, max_new_tokens;
  int early_stopping;
  double length_penalty, length_offset;
  std::vector<int64_t> eos_tokens;

  // What the score of a hypothesis is divided by.
  double divisor(int64_t length) const {
    return std::pow((length_offset + double(length)) / (length_offset + 1), length_penalty);
  }

  bool is_eos(int64_t token) const {
    return std::find(eos_tokens.begin(), eos_tokens.end(), token) != eos_tokens.end();
  }
};

struct BeamHypotheses {
  std::vector<Hypothesis> running, finished;  // the latter best first
  bool is_done = false;

  int64_t length() const { return int64_t(running[0].tokens.size()); }

  // Take the candidates of a step, best first; return the beams that are continued.
  std::vector<int64_t> advance(const BeamSettings& settings, std::vector<Candidate> candidates) {
    const int64_t length_now = length() + 1;
    const bool is_last = length_now >= settings.max_new_tokens;
    if (is_last ||
        std::any_of(candidates.begin(), candidates.end(), [&](const Candidate& c) { return settings.is_eos(c.token); }))
      take_finished(settings, candidates, length_now, is_last);
    candidates.resize(std::min<size_t>(candidates.size(), settings.beams));
    std::vector<Hypothesis> next;
    std::vector<int64_t> sources;
    for (const Candidate& c : candidates) next.push_back(extend(c, c.score)), sources.push_back(c.beam);
    running = std::move(next);
    is_done = is_done || is_last || is_settled(settings, length_now);
    return sources;
  }

 private:
  Hypothesis extend(const Candidate& candidate, double score) const {
    const std::vector<int64_t>& before = running[candidate.beam].tokens;
    Hypothesis out;
    out.tokens.reserve(before.size() + 1);
    out.tokens = before, out.tokens.push_back(candidate.token), out.score = score;
    return out;
  }

  // Move the candidates that end here to the finished ones, and exclude them from the running ones.
  void take_finished(const BeamSettings& settings, std::vector<Candidate>& candidates, int64_t length_now,
                     bool is_last) {
    for (size_t rank = 0; rank < candidates.size(); ++rank) {
      Candidate& candidate = candidates[rank];
      if (!is_last && !settings.is_eos(candidate.token)) continue;
      if (int64_t(rank) < settings.beams && !is_done && candidate.score > EXCLUDED / 2) {
        Hypothesis ended = extend(candidate, candidate.score / settings.divisor(length_now));
        const auto is_worse = [&](const Hypothesis& other) { return ended.score > other.score; };
        finished.insert(std::find_if(finished.begin(), finished.end(), is_worse), std::move(ended));
        if (int64_t(finished.size()) > settings.beams) finished.pop_back();
      }
      candidate.score += EXCLUDED;
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
  }

  // Whether the finished hypotheses are enough, or cannot be improved on.
  bool is_settled(const BeamSettings& settings, int64_t length_now) const {
    if (int64_t(finished.size()) < settings.beams) return false;
    if (settings.early_stopping == BeamSettings::YES) return true;
    const bool is_long = settings.early_stopping == BeamSettings::NEVER && settings.length_penalty > 0;
    const int64_t best_length = is_long ? settings.max_new_tokens : length_now;
    return running[0].score / settings.divisor(best_length) <= finished.back().score;
  }
};

}  // namespace
