// The products of matvec.h as operators: a few rows x with a whole matrix.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "checks.h"
#include "linear/matvec.h"

namespace {

// x (…, inputs) as rows filled up with zeros to whole groups, and what its quantized products need.
class LinearInput {
 public:
  at::Tensor x;
  MatvecInput in;

  LinearInput(const at::Tensor& activations, int64_t columns, int64_t group, bool is_quantized, bool has_offset)
      : x(activations.contiguous()) {
    const int64_t inputs = activations.size(-1), batch = activations.numel() / inputs;
    const float* rows = x.const_data_ptr<float>();
    if (inputs != columns) {
      padded.assign(batch * columns, 0.0f);
      for (int64_t b = 0; b < batch; ++b) std::copy_n(rows + b * inputs, inputs, padded.data() + b * columns);
      rows = padded.data();
    }
    in = {rows, nullptr, batch, columns, group, columns / group, columns};
    if (is_quantized && HAS_INTEGER_DOT) quantized.fill(in);
    if (!has_offset) return;
    sums.assign(batch * in.groups * LANES, 0.0f);
    for (int64_t n = 0; n < batch * in.groups; ++n)
      for (int64_t i = 0; i < group; ++i) sums[n * LANES + i % LANES] += rows[n * group + i];
    in.sums = sums.data();
  }

 private:
  std::vector<float> padded, sums;
  QuantizedInput quantized;
};

void check_linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  check_dtype("x", x, at::kFloat), check_memory("weight", weight);
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) > 0, "x has shape ", shape_text(x.sizes()), "; (…, inputs) is needed");
  check_shape("weight", weight, {ANY, ANY}), check_contiguous("weight", weight);
  if (!bias) return;
  check_memory("bias", *bias), check_shape("bias", *bias, {weight.size(0)});
  TORCH_CHECK(bias->is_floating_point(), "bias has dtype ", bias->scalar_type(), "; a floating-point dtype is needed");
}

const uint16_t* group_values(const char* name, const at::Tensor& t, int64_t rows, int64_t groups) {
  check_tensor(name, t, at::kBFloat16, {rows, groups});
  return static_cast<const uint16_t*>(t.const_data_ptr());
}

// The groups of a quantized weight, one scale each.
int64_t count_groups(const at::Tensor& x, const at::Tensor& weight, int64_t columns, const at::Tensor& scale) {
  check_memory("scale", scale), check_shape("scale", scale, {weight.size(0), ANY});
  check_groups("weight", columns, scale.size(1), x.size(-1));
  return scale.size(1);
}

template <class Format>
at::Tensor multiply(const Format& format, const LinearInput& x, const OptionalTensor& bias, int64_t rows) {
  std::vector<int64_t> shape = x.x.sizes().vec();
  shape.back() = rows;
  at::Tensor out = at::empty(shape, x.x.options());
  const OptionalTensor fp32_bias = bias ? OptionalTensor(bias->to(at::kFloat).contiguous()) : std::nullopt;
  const MatvecInput& in = x.in;
  float* y = out.mutable_data_ptr<float>();
  const int64_t bands = (rows + ROWS - 1) / ROWS,
                grain = std::max<int64_t>(1, WEIGHTS_PER_THREAD / (ROWS * in.columns));
  at::parallel_for(0, bands, grain, [&](int64_t from, int64_t to) {
    std::vector<float> scales(ROWS * in.groups), leasts(ROWS * in.groups);
    multiply_rows(format, in, from * ROWS, std::min(to * ROWS, rows), fp32_or_null(fp32_bias), y, rows, scales.data(),
                  leasts.data());
  });
  return out;
}

// x (…, inputs) times weight (rows, inputs) in fp32 or bfloat16 -> (…, rows).
at::Tensor linear_dense(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  check_linear(x, weight, bias);
  const auto type = weight.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "weight has dtype ", type, "; Float or BFloat16 is needed");
  const int64_t rows = weight.size(0), columns = weight.size(1);
  TORCH_CHECK(columns == x.size(-1) && columns % CHUNK == 0, "weight has ", columns, " columns; ", x.size(-1),
              " are needed, a multiple of ", CHUNK);
  const LinearInput input(x, columns, columns, false, false);
  if (type == at::kBFloat16)
    return multiply(Bf16Format{group_values("weight", weight, rows, columns), columns}, input, bias, rows);
  return multiply(Fp32Format{weight.const_data_ptr<float>(), columns}, input, bias, rows);
}

// x (…, inputs) times weight (rows, columns) of 8 bits with a scale (rows, groups) -> (…, rows).
at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                       const OptionalTensor& bias) {
  check_linear(x, weight, bias), check_dtype("weight", weight, at::kChar);
  const int64_t rows = weight.size(0), columns = weight.size(1), groups = count_groups(x, weight, columns, scale);
  const Int8Format format{weight.const_data_ptr<int8_t>(), group_values("scale", scale, rows, groups), columns, groups};
  return multiply(format, LinearInput(x, columns, columns / groups, true, false), bias, rows);
}

// x (…, inputs) times weight (rows, columns / 2) of 4 bits with scale and least (rows, groups) -> (…, rows).
at::Tensor linear_int4(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale, const at::Tensor& least,
                       const OptionalTensor& bias) {
  check_linear(x, weight, bias), check_dtype("weight", weight, at::kByte);
  const int64_t rows = weight.size(0), columns = 2 * weight.size(1), groups = count_groups(x, weight, columns, scale);
  const Int4Format format{weight.const_data_ptr<uint8_t>(), group_values("scale", scale, rows, groups),
                          group_values("least", least, rows, groups), columns, groups};
  return multiply(format, LinearInput(x, columns, columns / groups, true, true), bias, rows);
}

}  // namespace
