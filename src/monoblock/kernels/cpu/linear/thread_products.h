// One step of a stack by several threads: what they share, and each thread's part of the matrix products.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "linear/integer_panels.h"
#include "linear/matvec.h"
#include "linear/panel_products.h"
#include "stack/stack_weights.h"
#include "threads.h"

namespace {

// Keys and values of one block, (rows, heads, columns, size) each, and the steps between them.
struct KeyValues {
  float *keys, *values;
  int64_t key_row, key_head, key_column, value_row, value_head, value_column, rows, columns, key_size, value_size;

  KeyValues() = default;
  KeyValues(const at::Tensor& k, const at::Tensor& v)
      : keys(static_cast<float*>(k.data_ptr())), values(static_cast<float*>(v.data_ptr())), key_row(k.stride(0)),
        key_head(k.stride(1)), key_column(k.stride(2)), value_row(v.stride(0)), value_head(v.stride(1)),
        value_column(v.stride(2)), rows(k.size(0)), columns(k.size(2)), key_size(k.size(3)), value_size(v.size(3)) {}
};

// Many rows of x as products read them; all threads write a share of them, and read all.
class SharedRows {
 public:
  integer_panels::Vectors<Floats> panels;  // of MAX_VECTORS vectors but the last, (columns, vectors) each
  int64_t many = std::numeric_limits<int64_t>::max();  // rows that an fp32 weight multiplies in panels
  int64_t many_quantized = MANY_ROWS;                  // rows that a quantized weight multiplies in panels

  template <class Elements>
  integer_panels::QuantizedRows<Elements>& get() {
    if constexpr (std::is_same_v<Elements, integer_panels::ByteElements>) return bytes;
    else return shorts;
  }

 private:
  integer_panels::QuantizedRows<integer_panels::ByteElements> bytes;
  integer_panels::QuantizedRows<integer_panels::ShortElements> shorts;
};

// All that the threads of one step read, and the scratch they hand to each other.  Owned by one call.
struct StackStep {
  const NativeStack& stack;
  int64_t batch, tokens;         // all tokens of this step, and how many of them each row has, one after the other
  std::vector<int64_t> lengths;  // tokens before each token of the step
  const bool* active;            // rows that store their tokens; null: all
  std::vector<KeyValues> caches, sources;  // one a block; sources: of those with cross-attention
  std::vector<const float*> rotary_cos, rotary_sin, biases;
  std::vector<int64_t> rotary_pairs, bias_columns;
  const bool* source_mask = nullptr;
  int64_t source_mask_row = 0, max_length = 0, max_keys = 0;  // positions in use, keys of one query
  float *queries = nullptr, *keys = nullptr, *values = nullptr, *attended = nullptr;
  float *hidden = nullptr, *gates = nullptr, *first = nullptr, *second = nullptr;
  int64_t query_step = 0, key_step = 0, value_step = 0;
  SharedRows* many_rows = nullptr;  // for products with quantized weights in panels
};

struct Product {
  const WeightMatrix* matrix;
  float* y;
  int64_t y_stride;
};

class ThreadProducts {
 public:
  ThreadProducts(int64_t batch, SharedRows& rows, Barrier& b, int n, int c)
      : batch(batch), many_rows(rows), barrier(b), number(n), count(c) {}

 protected:
  const int64_t batch;  // rows of x
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
    with_elements(m, [&]<class Elements>() {
      const integer_panels::RowPanels rows{x, batch, stride, m.columns};
      auto& to = many_rows.get<Elements>();
      if (number == 0) to.resize(rows.vectors(), m.columns, m.groups, m.limit);
      barrier.wait();
      const auto [begin, end] = share(rows.vectors() * m.groups);
      rows.quantize(to, begin, end);
    });
    barrier.wait();
  }

  // Bands of ROWS rows from begin to end, of a matrix for which x was prepared.
  void multiply_bands(const WeightMatrix& m, const float* x, int64_t stride, int64_t begin, int64_t end, float* y,
                      int64_t y_stride) {
    const int64_t low = begin * ROWS, high = std::min(end * ROWS, m.rows);
    if (has_many_rows(m) && has_panels(m)) return multiply_panels(m, low, high, y, y_stride);
    if (m.format == WeightMatrix::DENSE) return multiply_dense(m, input(m, x, stride), low, high, y, y_stride);
    with_format(m, [&](const auto& format) {
      if (has_many_rows(m)) return multiply_many_rows(format, m, low, high, y, y_stride);
      const MatvecInput in = input(m, x, stride);  // makes room for scales and leasts
      multiply_rows(format, in, low, high, m.bias, y, y_stride, scales.data(), leasts.data());
    });
  }

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

  static int64_t bands(const WeightMatrix& m) { return (m.rows + ROWS - 1) / ROWS; }

 private:
  std::vector<float> scales, leasts, products;
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

  bool has_many_rows(const WeightMatrix& m) const {
    if (!m.is_quantized()) return batch >= many_rows.many;
    return batch >= many_rows.many_quantized && (can_multiply_in_panels(m.columns / m.groups) || has_panels(m));
  }

  // Whether many rows are multiplied by `panel_products`, from panels in fp32.
  bool has_panels(const WeightMatrix& m) const {
    return many_rows.many != std::numeric_limits<int64_t>::max() && (!m.is_quantized() || can_use_tiles());
  }

  static constexpr int64_t PANEL = panels::MAX_VECTORS * LANES, COLUMNS_TOGETHER = 128;

  int64_t panel_vectors(int64_t panel) const {
    return std::min<int64_t>(panels::MAX_VECTORS, (batch - panel * PANEL + LANES - 1) / LANES);
  }

  void fill_panels(const WeightMatrix& m, const float* x, int64_t stride) {
    const int64_t count = (batch + PANEL - 1) / PANEL, parts = (m.columns + COLUMNS_TOGETHER - 1) / COLUMNS_TOGETHER;
    if (number == 0) many_rows.panels.resize(count * panels::MAX_VECTORS * m.columns);
    barrier.wait();
    const auto first = [&](int64_t panel) {
      return reinterpret_cast<float*>(many_rows.panels.at(panel * panels::MAX_VECTORS * m.columns));
    };
    const auto [begin, end] = share(count * parts);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t panel = n / parts, column = n % parts * COLUMNS_TOGETHER, step = panel_vectors(panel) * LANES;
      const int64_t columns = std::min(COLUMNS_TOGETHER, m.columns - column), rows = std::min(step, batch - panel * PANEL);
      float* to = first(panel) + column * step;
      if (rows < step) std::fill_n(to, columns * step, 0.0f);
      panels::transpose(x + panel * PANEL * stride + column, rows, columns, stride, to, step);
    }
    std::vector<panels::PanelRows> list;
    for (int64_t panel = 0; panel < count; ++panel) list.push_back({first(panel), int(panel_vectors(panel))});
    panel_products.set_inputs(std::move(list), m.columns);
    barrier.wait();
  }

  void multiply_panels(const WeightMatrix& m, int64_t low, int64_t high, float* y, int64_t y_stride) {
    WeightMatrix part = m;
    const int64_t bytes = m.format == WeightMatrix::DENSE ? 4 * m.columns : m.columns / (m.format == WeightMatrix::INT4 ? 2 : 1);
    part.weight = static_cast<const char*>(m.weight) + low * bytes, part.rows = high - low;
    if (m.bias) part.bias += low;
    if (m.scale) part.scale += low * m.groups;
    if (m.least) part.least += low * m.groups;
    products.resize(panels::TOGETHER * panels::BLOCK_ROWS * PANEL + LANES);
    float* memory = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(products.data()) + 63) & ~uintptr_t(63));
    panel_products.multiply(
        part, [&](size_t panel, int64_t) { return memory + panel % panels::TOGETHER * panels::BLOCK_ROWS * PANEL; },
        [&](size_t panel, int64_t row, int64_t rows, const float* from) {
          const int64_t step = panel_vectors(panel) * LANES, first = int64_t(panel) * PANEL;
          panels::transpose(from, rows, std::min(step, batch - first), step, y + first * y_stride + low + row, y_stride);
        });
  }

  template <class Use>
  static void with_elements(const WeightMatrix& m, Use use) {
    using namespace integer_panels;
    if (HAS_BYTE_PRODUCTS && m.limit == LIMIT_8_BITS) return use.template operator()<ByteElements>();
    use.template operator()<ShortElements>();
  }

  template <class Format>
  void multiply_many_rows(const Format& format, const WeightMatrix& m, int64_t low, int64_t high, float* y,
                          int64_t y_stride) {
    with_elements(m, [&]<class Elements>() {
      const integer_panels::RowPanels rows{nullptr, batch, 0, 0};
      integer_panels::multiply_to_rows(format, many_rows.get<Elements>(), batch, rows.panels(), low, high,
                                       m.bias, y, y_stride);
    });
  }

  void multiply_dense(const WeightMatrix& m, const MatvecInput& in, int64_t low, int64_t high, float* y,
                      int64_t y_stride) {
    const float* weight = static_cast<const float*>(m.weight);
    multiply_rows(Fp32Format{weight, m.columns}, in, low, high, m.bias, y, y_stride, nullptr, nullptr);
    if (in.columns == m.columns) return;
    for (int64_t b = 0; b < batch; ++b)  // the columns behind the last whole chunk
      for (int64_t row = low; row < high; ++row)
        y[b * y_stride + row] +=
            dot(in.x + b * in.stride + in.columns, weight + row * m.columns + in.columns, m.columns - in.columns);
  }
};

}  // namespace
