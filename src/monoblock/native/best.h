// The best few of many numbers, kept in order as they come.
#pragma once

#include <cstdint>

namespace {

// The best so far, best first; of equals the one found earlier stays ahead.
struct Best {
  float* values;
  int64_t* places;
  int64_t count;

  float least() const { return values[count - 1]; }
  void offer(float value, int64_t place) {
    if (!(value > least())) return;
    int64_t n = count - 1;
    for (; n > 0 && value > values[n - 1]; --n) values[n] = values[n - 1], places[n] = places[n - 1];
    values[n] = value, places[n] = place;
  }
};

}  // namespace
