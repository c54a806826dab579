// One step of a stack by several threads: what they share, and each one's part of the products.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "plan.h"

namespace {

// Threads that have nothing to do spin for a little while, then let others run.
struct Barrier {
  const int threads;
  std::atomic<int> here{0}, round{0};

  explicit Barrier(int count) : threads(count) {}

  void wait() {
    if (threads == 1) return;
    const int mine = round.load(std::memory_order_relaxed);
    if (here.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      here.store(0, std::memory_order_relaxed);
      round.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == mine; ++spins) {
      if (spins > 2000) sched_yield();
#if defined(__AVX2__)
      _mm_pause();
#endif
    }
  }
};

struct Rows {  // (B, G, columns, size) keys and values of one block
  float *keys, *values;
  int64_t key_row, key_head, key_step, value_row, value_head, value_step, columns, sources, value_size;
};

struct Step {
  const Plan& plan;
  int64_t batch, tokens;  // all tokens of this step, and how many of them each row has, one after the other
  std::vector<int64_t> lengths;  // how many stand before each token
  const bool* real;  // rows that take their tokens; null: all
  std::vector<Rows> own, sources;
  std::vector<const float*> cos, sin, biases;
  std::vector<int64_t> pairs, reach;  // reach: columns of a bias table
  const bool* seen;
  int64_t seen_row, longest;
  float *queries, *keys, *values, *looked, *hidden, *gates, *first, *second;  // shared
  int64_t query_step, key_step, value_step;
};

struct Job {
  const Matrix* matrix;
  float* y;
  int64_t stride;
};

struct Products {
  const Step& step;
  Barrier& barrier;
  const int number, count;
  std::vector<float> sums, scales, leasts;
  Whole whole;

  Products(const Step& s, Barrier& b, int n, int c) : step(s), barrier(b), number(n), count(c) {}

  std::pair<int64_t, int64_t> share(int64_t size) const { return {size * number / count, size * (number + 1) / count}; }

  Input input(const Matrix& m, const float* from, int64_t stride) {
    const int64_t tail = m.kind == Matrix::DENSE ? m.columns % CHUNK : 0, columns = m.columns - tail;
    Input in{from, nullptr, step.batch, columns, columns / m.groups, columns ? m.groups : 0, stride};
    if (m.kind == Matrix::DENSE) return in;
    if (int64_t(scales.size()) < ROWS * m.groups) scales.resize(ROWS * m.groups), leasts.resize(ROWS * m.groups);
    if (INTEGERS) whole.read(in);
    if (m.kind != Matrix::INT4) return in;
    sums.resize(step.batch * m.groups * LANES);
    for (int64_t b = 0; b < step.batch; ++b)
      for (int64_t g = 0; g < m.groups; ++g) {
        Floats total = {};
        for (int64_t i = 0; i < in.group; i += LANES) total += load<Floats>(from + b * stride + g * in.group + i);
        std::memcpy(sums.data() + (b * m.groups + g) * LANES, &total, sizeof total);
      }
    in.sums = sums.data();
    return in;
  }

  // Whole groups are read; behind the inputs of a matrix a larger layer may have left something.
  static void clear(const Matrix& m, float* row, int64_t inputs) {
    if (inputs < m.columns) std::fill(row + inputs, row + m.columns, 0.0f);
  }

  void rows(const Matrix& m, const float* from, int64_t stride, int64_t begin, int64_t end, float* y,
            int64_t y_stride) {
    const Input in = input(m, from, stride);
    const int64_t low = begin * ROWS, high = std::min(end * ROWS, m.rows);
    switch (m.kind) {
      case Matrix::DENSE: dense(m, in, low, high, y, y_stride); break;
      case Matrix::INT8:
        part_of(Int8{static_cast<const int8_t*>(m.weight), m.scale, m.columns, m.groups}, in, low, high, m.bias, y,
                y_stride, scales.data(), leasts.data());
        break;
      default:
        part_of(Int4{static_cast<const uint8_t*>(m.weight), m.scale, m.least, m.columns, m.groups}, in, low, high,
                m.bias, y, y_stride, scales.data(), leasts.data());
    }
  }

  void dense(const Matrix& m, const Input& in, int64_t low, int64_t high, float* y, int64_t y_stride) {
    const float* weight = static_cast<const float*>(m.weight);
    part_of(Single{weight, m.columns}, in, low, high, m.bias, y, y_stride, nullptr, nullptr);
    if (in.columns == m.columns) return;
    for (int64_t b = 0; b < step.batch; ++b)  // rows that are no whole chunks
      for (int64_t row = low; row < high; ++row)
        y[b * y_stride + row] += dot(in.x + b * in.stride + in.columns, weight + row * m.columns + in.columns,
                                     m.columns - in.columns);
  }

  void products(std::initializer_list<Job> jobs, const float* from, int64_t stride) {
    int64_t total = 0, before = 0;
    for (const Job& job : jobs) total += bands(*job.matrix);
    const auto [begin, end] = share(total);
    for (const Job& job : jobs) {
      const int64_t size = bands(*job.matrix);
      const int64_t b = std::max(begin - before, int64_t(0)), e = std::min(end - before, size);
      if (b < e) rows(*job.matrix, from, stride, b, e, job.y, job.stride);
      before += size;
    }
  }

  static int64_t bands(const Matrix& m) { return (m.rows + ROWS - 1) / ROWS; }
};

}  // namespace
