// Beam search of one text: its beams, those that ended, and when it is over; as decoding/beam.py says it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr double NEVER = -1e9;  // added to the score of a beam that must not be continued

struct Hypothesis {
  std::vector<int64_t> tokens;
  double score;
};

struct Candidate {
  double score;
  int64_t beam, token;
};

// What all texts of a search are asked for.
struct Asked {
  enum Stop { WHEN_SETTLED, AT_ONCE, NEVER_EARLY };
  int64_t size, longest, stop;  // beams, tokens, and when to stop after so many texts as beams have ended
  double penalty;               // a score is divided by the length to this power
  std::vector<int64_t> ends;

  bool ending(int64_t token) const { return std::find(ends.begin(), ends.end(), token) != ends.end(); }
};

struct Beams {
  std::vector<Hypothesis> running, ended;  // the latter best first
  bool done = false;

  int64_t length() const { return int64_t(running[0].tokens.size()); }

  // Take the candidates of a step, best first; the beams that go on.
  std::vector<int64_t> advance(const Asked& asked, std::vector<Candidate> found) {
    const int64_t now = length() + 1;
    const bool last = now >= asked.longest;
    if (last || std::any_of(found.begin(), found.end(), [&](const Candidate& one) { return asked.ending(one.token); }))
      take_ended(asked, found, now, last);
    found.resize(std::min<size_t>(found.size(), asked.size));
    std::vector<Hypothesis> next;
    std::vector<int64_t> from;
    for (const Candidate& one : found) next.push_back(continued(one, one.score)), from.push_back(one.beam);
    running = std::move(next);
    done = done || last || settled(asked, now);
    return from;
  }

 private:
  Hypothesis continued(const Candidate& one, double score) const {
    const std::vector<int64_t>& before = running[one.beam].tokens;
    Hypothesis out;
    out.tokens.reserve(before.size() + 1);
    out.tokens = before, out.tokens.push_back(one.token), out.score = score;
    return out;
  }

  // Keep what ends here; what goes on comes first in what is left.
  void take_ended(const Asked& asked, std::vector<Candidate>& found, int64_t now, bool last) {
    for (size_t rank = 0; rank < found.size(); ++rank) {
      Candidate& one = found[rank];
      if (!last && !asked.ending(one.token)) continue;
      if (int64_t(rank) < asked.size && !done && one.score > NEVER / 2) {
        Hypothesis over = continued(one, one.score / std::pow(double(now), asked.penalty));
        const auto worse = [&](const Hypothesis& other) { return over.score > other.score; };
        ended.insert(std::find_if(ended.begin(), ended.end(), worse), std::move(over));
        if (int64_t(ended.size()) > asked.size) ended.pop_back();
      }
      one.score += NEVER;
    }
    std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
  }

  // Whether what ended cannot be bettered, or is enough.
  bool settled(const Asked& asked, int64_t now) const {
    if (int64_t(ended.size()) < asked.size) return false;
    if (asked.stop == Asked::AT_ONCE) return true;
    const int64_t hoped = asked.stop == Asked::NEVER_EARLY && asked.penalty > 0 ? asked.longest : now;
    return running[0].score / std::pow(double(hoped), asked.penalty) <= ended.back().score;
  }
};

}  // namespace
