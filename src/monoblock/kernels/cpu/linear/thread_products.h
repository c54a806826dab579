// The matrix products of several threads: what they share, and the part of each.
#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "linear/integer_panels.h"
#include "linear/matvec.h"
#include "linear/panel_products.h"
#include "stack/stack_weights.h"
#include "threads.h"

namespace {

constexpr int64_t MANY_DENSE_ROWS = 9;  // rows of x for which fp32 weights are multiplied in panels

// Many rows of x as products read them; all threads write a share of them, and read all.
class SharedRows {
 public:
  Vectors<Floats> panels;  // of MAX_VECTORS vectors but the last, (columns, vectors) each
  bool is_exact = false;   // whether the bits of a row are those of the row alone

  template <class Elements>
  integer_panels::QuantizedRows<Elements>& get() {
    if constexpr (std::is_same_v<Elements, integer_panels::ByteElements>) return bytes;
    else return shorts;
  }

 private:
  integer_panels::QuantizedRows<integer_panels::ByteElements> bytes;
  integer_panels::QuantizedRows<integer_panels::ShortElements> shorts;
};

// Those of the calling thread, for all threads of its next products.
inline SharedRows& shared_rows(bool is_exact) {
  thread_local SharedRows rows;
  rows.is_exact = is_exact;
  return rows;
}

struct Product {
  const WeightMatrix* matrix;
  float* y;
  int64_t y_stride;
};

class ThreadProducts {
 public:
  ThreadProducts(int64_t batch, SharedRows& rows, Barrier& b, int n, int c)
      : batch(batch), rows_in_panels{batch}, many_rows(rows), barrier(b), number(n), count(c) {}

  // This thread's share of several products of one x.
  void multiply(std::initializer_list<Product> products, const float* x, int64_t stride) {
    int64_t total = 0, before = 0;
    for (const Product& p : products) total += bands(*p.matrix);
    const auto [begin, end] = share(total);
    const WeightMatrix* last = nullptr;
    for (const Product& p : products) {
      prepare(*p.matrix, x, stride, std::exchange(last, p.matrix));
      const int64_t size = bands(*p.matrix);
      const int64_t b = std::max(begin - before, int64_t(0)), e = std::min(end - before, size);
      if (b < e) multiply_bands(*p.matrix, x, stride, b, e, p.y, p.y_stride);
      before += size;
    }
  }

 protected:
  const int64_t batch;  // rows of x
  const panels::Panels rows_in_panels;
  SharedRows& many_rows;
  Barrier& barrier;
  const int number, count;  // of this thread, and of all

  // This thread's share of so many equal pieces of work.
  std::pair<int64_t, int64_t> share(int64_t size) const { return {size * number / count, size * (number + 1) / count}; }

  // Whole groups are read: zero what a larger layer may have left behind the inputs of a matrix.
  static void zero_padding(const WeightMatrix& m, float* row, int64_t inputs) {
    if (inputs < m.columns) std::fill(row + inputs, row + m.columns, 0.0f);
  }

  // Before a product: round x (batch, stride) together with the other threads, if it has many rows.  `before` is the
  // product of the same x that was last prepared, if there is one.
  void prepare(const WeightMatrix& m, const float* x, int64_t stride, const WeightMatrix* before = nullptr) {
    if (!has_many_rows(m) || (before && before->packing() == m.packing())) return;
    if (before) barrier.wait();  // until it is no longer read
    if (has_panels(m)) return fill_panels(m, x, stride);
    quantize(m, {x, batch, stride, m.columns});
  }

  // Bands of ROWS rows from begin to end, of a matrix for which x was prepared.
  void multiply_bands(const WeightMatrix& m, const float* x, int64_t stride, int64_t begin, int64_t end, float* y,
                      int64_t y_stride) {
    const int64_t low = begin * ROWS, high = std::min(end * ROWS, m.rows);
    if (has_many_rows(m) && has_panels(m)) return multiply_panels(m, low, high, y, y_stride);
    if (m.format == WeightMatrix::DENSE) return multiply_dense(m, input(m, x, stride), low, high, y, y_stride);
    if (has_many_rows(m))
      return multiply_integers(m, [&](const auto& format, const auto& x) {
        integer_panels::multiply_to_rows(format, x, low, high, m.bias, y, y_stride);
      });
    with_format(m, [&](const auto& format) {
      const MatvecInput in = input(m, x, stride);  // makes room for scales and leasts
      multiply_rows(format, in, low, high, m.bias, y, y_stride, scales.data(), leasts.data());
    });
  }

  static constexpr int64_t PANEL = panels::PANEL;

  // Whether x is multiplied in panels: in fp32 or, quantized, in integers.  In an exact product a quantized weight
  // multiplies many rows as few; fp32 weights have one order of sums for both.
  bool has_many_rows(const WeightMatrix& m) const {
    if (!m.is_quantized()) return batch >= MANY_DENSE_ROWS;
    return !many_rows.is_exact && batch >= MANY_ROWS && can_multiply_many_rows(m.columns / m.groups);
  }

  // As `prepare`, from panels of `inputs` numbers a row that all threads have written.
  void prepare_panels(const WeightMatrix& m, const float* x, int64_t inputs) {
    barrier.wait();
    has_panels(m) ? panel_products.set_inputs(x, inputs, rows_in_panels) : quantize(m, {x, batch, 0, inputs});
  }

  // The rows from low to high of a matrix for which x was prepared, to panels of m.rows numbers a row.
  void multiply_to_panels(const WeightMatrix& m, int64_t low, int64_t high, float* y) {
    if (!has_panels(m))
      return multiply_integers(m, [&](const auto& format, const auto& x) {
        integer_panels::multiply_to_panels(format, x, low, high, m.bias, y, m.rows);
      });
    panel_products.multiply(
        m.between(low, high),
        [&](int64_t p, int64_t row) { return y + p * PANEL * m.rows + (low + row) * rows_in_panels.step(p); },
        [](int64_t, int64_t, int64_t, const float*) {});
  }

  static int64_t bands(const WeightMatrix& m) { return (m.rows + ROWS - 1) / ROWS; }

 private:
  std::vector<float> scales, leasts;
  Vectors<Floats> products;
  QuantizedInput quantized;
  panels::PanelProducts panel_products;

  MatvecInput input(const WeightMatrix& m, const float* x, int64_t stride) {
    const int64_t tail = m.format == WeightMatrix::DENSE ? m.columns % CHUNK : 0, columns = m.columns - tail;
    MatvecInput in{x, nullptr, batch, columns, columns / m.groups, columns ? m.groups : 0, stride};
    if (m.format == WeightMatrix::DENSE) return in;
    if (int64_t(scales.size()) < ROWS * m.groups) scales.resize(ROWS * m.groups), leasts.resize(ROWS * m.groups);
    quantized.fill(in, m.format == WeightMatrix::INT4, m.limit);
    return in;
  }

  // Whether many rows are multiplied by `panel_products`, from panels in fp32.
  static bool has_panels(const WeightMatrix& m) { return !m.is_quantized() || can_use_tiles(); }

  static constexpr int64_t COLUMNS_TOGETHER = 128;

  void quantize(const WeightMatrix& m, const integer_panels::RowPanels& rows) {
    with_elements(m, [&]<class Elements>() {
      auto& to = many_rows.get<Elements>();
      if (number == 0) to.resize(rows_in_panels, m.columns, m.groups, m.limit);
      barrier.wait();
      const auto [begin, end] = share(rows_in_panels.vectors() * m.groups);
      rows.quantize(to, begin, end);
    });
    barrier.wait();
  }

  void fill_panels(const WeightMatrix& m, const float* x, int64_t stride) {
    const int64_t parts = (m.columns + COLUMNS_TOGETHER - 1) / COLUMNS_TOGETHER;
    if (number == 0) many_rows.panels.resize(rows_in_panels.count() * panels::MAX_VECTORS * m.columns);
    barrier.wait();
    float* panels = reinterpret_cast<float*>(many_rows.panels.at(0));
    const auto [begin, end] = share(rows_in_panels.count() * parts);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t row = n / parts * PANEL, column = n % parts * COLUMNS_TOGETHER, step = rows_in_panels.step(n / parts);
      const int64_t columns = std::min(COLUMNS_TOGETHER, m.columns - column), rows = std::min(step, batch - row);
      float* to = panels + row * m.columns + column * step;
      if (rows < step) std::fill_n(to, columns * step, 0.0f);
      panels::transpose(x + row * stride + column, rows, columns, stride, to, step);
    }
    panel_products.set_inputs(panels, m.columns, rows_in_panels);
    barrier.wait();
  }

  void multiply_panels(const WeightMatrix& m, int64_t low, int64_t high, float* y, int64_t y_stride) {
    float* memory = reinterpret_cast<float*>(products.resize(panels::TOGETHER * panels::BLOCK_ROWS * panels::MAX_VECTORS));
    panel_products.multiply(
        m.between(low, high),
        [&](int64_t panel, int64_t) { return memory + panel % panels::TOGETHER * panels::BLOCK_ROWS * PANEL; },
        [&](int64_t panel, int64_t row, int64_t rows, const float* from) {
          const int64_t step = rows_in_panels.step(panel), first = panel * PANEL;
          panels::transpose(from, rows, std::min(step, batch - first), step, y + first * y_stride + low + row, y_stride);
        });
  }

  template <class Use>
  static void with_elements(const WeightMatrix& m, Use use) {
    using namespace integer_panels;
    if (HAS_BYTE_PRODUCTS && m.limit == LIMIT_8_BITS) return use.template operator()<ByteElements>();
    use.template operator()<ShortElements>();
  }

  // use(format, x) for a quantized matrix and the integers of x.
  template <class Use>
  void multiply_integers(const WeightMatrix& m, Use use) {
    with_format(m, [&](const auto& format) {
      with_elements(m, [&]<class Elements>() {
        use(format, many_rows.get<Elements>());
      });
    });
  }

  void multiply_dense(const WeightMatrix& m, const MatvecInput& in, int64_t low, int64_t high, float* y,
                      int64_t y_stride) {
    const float* weight = static_cast<const float*>(m.weight);
    if (many_rows.is_exact)
      return panels::multiply_few_rows(weight, low, high, m.columns, in.x, batch, in.stride, m.bias, y, y_stride);
    multiply_rows(Fp32Format{weight, m.columns}, in, low, high, m.bias, y, y_stride, nullptr, nullptr);
    if (in.columns == m.columns) return;
    for (int64_t b = 0; b < batch; ++b)  // the columns behind the last whole chunk
      for (int64_t row = low; row < high; ++row)
        y[b * y_stride + row] +=
            dot(in.x + b * in.stride + in.columns, weight + row * m.columns + in.columns, m.columns - in.columns);
  }
};

inline int count_threads(int64_t products) {
  return at::in_parallel_region() || products < WEIGHTS_PER_THREAD ? 1 : at::get_num_threads();
}

// work(barrier, number, count) in each thread; one alone for so few products that others do not pay.
template <class Work>
void run_threads(int64_t products, Work work) {
  std::optional<Barrier> barrier;
  ThreadErrors errors;
#pragma omp parallel num_threads(count_threads(products))
  {
#pragma omp single
    barrier.emplace(omp_get_num_threads());  // perhaps fewer than were asked for
    errors.run([&] { work(*barrier, omp_get_thread_num(), omp_get_num_threads()); }, [&] { barrier->abandon(); });
  }
  errors.rethrow();
}

}  // namespace
