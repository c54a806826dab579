// What the products of a few rows read: rows of x, and rows of a weight.
#pragma once

#include "linear/integer_dot.h"

namespace {

struct MatvecInput {
  const float* x;     // (batch, stride), of which columns are read
  const float* sums;  // (batch, groups, LANES): a group added up lane by lane, for formats with an offset
  int64_t batch, columns, group, groups, stride;
  const int16_t* int16 = nullptr;  // (batch, columns) x quantized, for products in integers
  const float* steps = nullptr;    // (batch, groups)
  const int8_t* nibble_bytes = nullptr;  // x as nibble_dot.h has it, for 4 bits
  const float *nibble_steps = nullptr, *group_sums = nullptr;  // group_sums (batch, groups), also for neon_dot.h
  bool is_wide = true;  // whether integers have 16 bits
};

// Rows of a weight that one tile multiplies.  They lie far apart: the processor prefetches each as a stream of its own,
// while short rows that follow each other would be one stream that is read in leaps.
struct WeightRows {
  int64_t first, step;
  int count;
  int64_t operator[](int number) const { return first + number * step; }
  WeightRows from(int number) const { return {first + number * step, step, count - number}; }
};

// Where R such rows are read, `step` numbers apart: few registers hold the addresses of eight.
template <class Stored>
class RowAddresses {
 public:
  RowAddresses(const Stored* first, int64_t step) : low(first), high(first + 4 * step), step(step) {}
  const Stored* operator[](int number) const { return (number < 4 ? low : high) + number % 4 * step; }
  void advance(int64_t count) { low += count, high += count; }

 private:
  const Stored *low, *high;
  const int64_t step;
};

}  // namespace
