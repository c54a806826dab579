// The k largest of many numbers, kept in order as they come.
#pragma once

#include <cstdint>

namespace {

// Largest first; of equal numbers the one offered first stays ahead.  The arrays belong to the caller.
struct TopK {
  float* values;
  int64_t* indices;
  int64_t k;

  float least() const { return values[k - 1]; }
  void offer(float value, int64_t index) {
    if (!(value > least())) return;
    int64_t n = k - 1;
    for (; n > 0 && value > values[n - 1]; --n) values[n] = values[n - 1], indices[n] = indices[n - 1];
    values[n] = value, indices[n] = index;
  }
};

}  // namespace
