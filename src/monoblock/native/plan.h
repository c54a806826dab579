// What a stack of blocks is, said once: its weights as pointers, its choices as numbers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <vector>

#include "attention.h"

namespace {

struct Matrix {
  enum Kind { NONE, DENSE, INT8, INT4 } kind = NONE;
  const void* weight = nullptr;
  const uint16_t *scale = nullptr, *least = nullptr;
  const float* bias = nullptr;
  int64_t rows = 0, columns = 0, groups = 1;  // columns: as stored, in whole groups
};

struct Sublayer {
  Norm norm, output_norm;
  const float* gain = nullptr;
};

enum Place { PRE, POST, OUTPUT, SANDWICH };
enum Residual { SEQUENTIAL, PARALLEL, PARALLEL_SHARED };
enum Over { NOTHING, HEAD, EACH_HEAD, WIDTH };

struct Layer {
  int64_t place, residual, heads, groups, window, turn, interleaved, bias, over, activation, cross_heads, cross_groups;
  float scale, cross_scale, softcap, clip, residual_scale, clamp;
  Sublayer attention, cross, feedforward;
  Matrix query, key, value, output, cross_query, cross_output, gate, up, down;
  Norm query_norm, key_norm;
  const float* sinks;
};

constexpr int INTS = 18, REALS = 8;  // what a row of the two tables holds, in the order they are read below

// The tensors of a stack are handed over one after the other; an empty one stands for none.
struct Reader {
  const std::vector<at::Tensor>& given;
  size_t next = 0;

  const at::Tensor& take() {
    TORCH_CHECK(next < given.size(), "a tensor is missing");
    return given[next++];
  }
  const float* floats() {
    const at::Tensor& t = take();
    if (!t.numel()) return nullptr;
    TORCH_CHECK(t.scalar_type() == at::kFloat && t.is_contiguous() && t.is_cpu(), "expected contiguous fp32");
    return t.const_data_ptr<float>();
  }
  const uint16_t* halves() {
    const at::Tensor& t = take();
    if (!t.numel()) return nullptr;
    TORCH_CHECK(t.scalar_type() == at::kBFloat16 && t.is_contiguous() && t.is_cpu(), "expected contiguous bfloat16");
    return static_cast<const uint16_t*>(t.const_data_ptr());
  }
  Norm norm(int64_t kind, bool offset, float eps) {
    const float* weight = floats();
    return {kind, offset, eps, weight, floats()};
  }
  Matrix matrix(int64_t inputs) {
    Matrix m;
    const at::Tensor weight = take();
    const int64_t groups = next < given.size() && given[next].dim() == 2 ? given[next].size(1) : 1;
    m.scale = halves(), m.least = halves(), m.bias = floats();
    if (!weight.numel()) return m;
    TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.is_cpu(), "expected a contiguous matrix");
    const auto type = weight.scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kChar || type == at::kByte, "expected fp32, int8 or int4");
    m.kind = type == at::kFloat ? Matrix::DENSE : type == at::kChar ? Matrix::INT8 : Matrix::INT4;
    m.weight = weight.const_data_ptr();
    m.rows = weight.size(0), m.columns = weight.size(1) * (m.kind == Matrix::INT4 ? 2 : 1);
    m.groups = groups;
    const bool fits = m.kind == Matrix::DENSE ? m.columns == inputs : m.scale && m.columns >= inputs;
    TORCH_CHECK(fits, "a matrix that does not fit");
    TORCH_CHECK(m.kind != Matrix::INT4 || m.least, "least values are missing");
    TORCH_CHECK(m.kind == Matrix::DENSE || m.columns % (CHUNK * groups) == 0, "expected whole groups");
    return m;
  }
};

struct Plan : torch::CustomClassHolder {
  std::vector<at::Tensor> held;
  std::vector<Layer> layers;
  Norm last;
  int64_t width, widest = 0, hidden = 0, heads = 0;  // strides of what the products read

  Plan(std::vector<at::Tensor> tensors, const at::Tensor& numbers, const at::Tensor& reals, int64_t width_)
      : held(std::move(tensors)), width(width_) {
    TORCH_CHECK(numbers.size(1) == INTS && reals.size(1) == REALS, "tables of another version");
    Reader reader{held};
    const int64_t count = numbers.size(0) - 1;
    const int64_t* n = numbers.const_data_ptr<int64_t>();
    const double* r = reals.const_data_ptr<double>();
    for (int64_t l = 0; l < count; ++l, n += INTS, r += REALS) layers.push_back(layer(reader, n, r));
    last = reader.norm(n[12], n[13], float(r[0]));
    TORCH_CHECK(reader.next == held.size(), "more tensors than a stack has");
  }

  Layer layer(Reader& reader, const int64_t* n, const double* r) {
    Layer out{};
    out.place = n[0], out.residual = n[1], out.heads = n[2], out.groups = n[3], out.window = n[4], out.turn = n[5];
    out.interleaved = n[6], out.bias = n[7], out.over = n[8], out.activation = n[9];
    out.cross_heads = n[10], out.cross_groups = n[11];
    out.scale = float(r[1]), out.cross_scale = float(r[2]), out.softcap = float(r[4]), out.clip = float(r[5]);
    out.residual_scale = float(r[6]), out.clamp = float(r[7]);
    const float eps = float(r[0]), own_eps = float(r[3]);
    auto sublayer = [&](bool is_normed) {
      Sublayer s;
      s.norm = reader.norm(is_normed ? n[12] : 0, n[13], eps);
      s.output_norm = reader.norm(n[12], n[13], eps);
      s.gain = reader.floats();
      return s;
    };
    out.attention = sublayer(n[16]), out.cross = sublayer(true), out.feedforward = sublayer(n[17]);
    out.query = reader.matrix(width), out.key = reader.matrix(width), out.value = reader.matrix(width);
    const int64_t looked = out.value.rows / out.groups * out.heads;
    out.output = reader.matrix(looked);
    out.query_norm = reader.norm(n[8] ? n[14] : 0, n[15], own_eps);
    out.key_norm = reader.norm(n[8] ? n[14] : 0, n[15], own_eps);
    out.sinks = reader.floats();
    out.cross_query = reader.matrix(width);
    out.cross_output = reader.matrix(out.cross_heads ? given_inputs(reader) : 0);
    out.gate = reader.matrix(width), out.up = reader.matrix(width), out.down = reader.matrix(out.up.rows);
    widest = std::max({widest, width, out.query.columns, out.cross_query.columns, out.up.columns, out.gate.columns});
    heads = std::max({heads, looked, out.output.columns, out.cross_output.columns});
    hidden = std::max({hidden, out.up.rows, out.down.columns});
    return out;
  }

  // The inputs of the matrix that comes next, where nothing else tells them.
  int64_t given_inputs(const Reader& reader) const {
    const at::Tensor& t = held.at(reader.next);
    return t.size(1) * (t.scalar_type() == at::kByte ? 2 : 1);
  }
};

}  // namespace
