// The products of matvec.h as operators: a few rows x with a whole matrix.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

#include <vector>

#include "checks.h"
#include "linear/integer_panels.h"
#include "linear/integer_tiles.h"
#include "linear/matvec.h"
#include "linear/split_products.h"

namespace {

// x (…, inputs) as rows filled up with zeros to whole groups, and what products with quantized weights need.
class LinearInput {
 public:
  at::Tensor x;
  MatvecInput in;

  LinearInput(const at::Tensor& activations, int64_t columns, int64_t group) : x(activations.contiguous()) {
    const int64_t inputs = activations.size(-1), batch = activations.numel() / inputs;
    const float* rows = x.const_data_ptr<float>();
    if (inputs != columns) {
      padded.assign(batch * columns, 0.0f);
      for (int64_t b = 0; b < batch; ++b) std::copy_n(rows + b * inputs, inputs, padded.data() + b * columns);
      rows = padded.data();
    }
    in = {rows, nullptr, batch, columns, group, columns / group, columns};
  }

  void quantize(bool has_offset, int limit) { quantized.fill(in, has_offset, limit); }

 private:
  std::vector<float> padded;
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

OptionalTensor to_fp32(const OptionalTensor& bias) {
  return bias ? OptionalTensor(bias->to(at::kFloat).contiguous()) : std::nullopt;
}

// (…, rows) for x (…, inputs).
at::Tensor empty_output(const at::Tensor& x, int64_t rows) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = rows;
  return at::empty(shape, x.options());
}

template <class Format>
at::Tensor multiply(const Format& format, const LinearInput& x, const OptionalTensor& bias, int64_t rows) {
  at::Tensor out = empty_output(x.x, rows);
  const OptionalTensor fp32_bias = to_fp32(bias);
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

#if MONOBLOCK_TILES
// x W' + bias in tiles; the operand with fewer rows is the one that is packed first.
template <int PARTS, class Weight>
at::Tensor multiply_in_tiles(const at::Tensor& x, const Weight& weight, const OptionalTensor& bias) {
  const at::Tensor input = x.contiguous();
  at::Tensor out = empty_output(input, weight.rows);
  const OptionalTensor fp32_bias = to_fp32(bias);
  const int64_t inputs = x.size(-1), batch = x.numel() / inputs;
  const split::DenseRows rows{input.const_data_ptr<float>(), batch, inputs};
  float* y = out.mutable_data_ptr<float>();
  if (batch < weight.rows)
    split::multiply<PARTS>(weight, rows, {y, weight.rows, batch, weight.rows, fp32_or_null(fp32_bias), true});
  else
    split::multiply<PARTS>(rows, weight, {y, batch, weight.rows, weight.rows, fp32_or_null(fp32_bias), false});
  return out;
}

at::Tensor multiply_in_integers(const Int8Format& format, const at::Tensor& x, const OptionalTensor& bias,
                                int64_t rows, int limit) {
  const LinearInput input(x, format.columns, format.columns / format.groups);
  at::Tensor out = empty_output(input.x, rows);
  const OptionalTensor fp32_bias = to_fp32(bias);
  const auto multiply = limit == LIMIT_8_BITS ? &integer_tiles::multiply<1> : &integer_tiles::multiply<2>;
  multiply(format, input.in, rows, fp32_or_null(fp32_bias), out.mutable_data_ptr<float>());
  return out;
}

// x (…, inputs) rounded to integers of at most `limit`, times their step.
at::Tensor round_rows(const at::Tensor& x, int64_t columns, int64_t group, int limit) {
  const LinearInput input(x, columns, group);
  const int64_t inputs = x.size(-1);
  at::Tensor out = at::empty_like(input.x);
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, input.in.batch, 8, [&](int64_t begin, int64_t end) {
    std::vector<int16_t> integers(columns);
    std::vector<float> steps(columns / group);
    for (int64_t b = begin; b < end; ++b) {
      quantize_row(input.in.x + b * columns, columns / group, group, integers.data(), steps.data(), limit);
      for (int64_t i = 0; i < inputs; ++i) to[b * inputs + i] = integers[i] * steps[i / group];
    }
  });
  return out;
}
#endif

template <class Elements, class Format>
at::Tensor multiply_in_panels(const Format& format, const at::Tensor& x, const OptionalTensor& bias, int64_t rows,
                              int limit) {
  const at::Tensor input = x.contiguous();
  at::Tensor out = empty_output(input, rows);
  const OptionalTensor fp32_bias = to_fp32(bias);
  integer_panels::multiply<Elements>(format, input.const_data_ptr<float>(), x.numel() / x.size(-1), x.size(-1), limit,
                                     rows, fp32_or_null(fp32_bias), out.mutable_data_ptr<float>());
  return out;
}

// The same for a quantized weight: many rows of x are multiplied in tiles, where the processor has them, or in panels.
template <class Format>
at::Tensor multiply_quantized(const Format& format, const at::Tensor& x, const OptionalTensor& bias, int64_t rows,
                              int limit) {
  using namespace integer_panels;
  const int64_t group = format.columns / format.groups;
  if (x.numel() / x.size(-1) >= MANY_ROWS && can_multiply_many_rows(group)) {
#if MONOBLOCK_TILES
    if (can_use_tiles()) {
      if constexpr (!Format::offset)
        if (group <= MAX_PRODUCTS) return multiply_in_integers(format, x, bias, rows, limit);
      const at::Tensor rounded = limit == LIMIT_8_BITS ? round_rows(x, format.columns, group, limit) : x;
      return multiply_in_tiles<2>(rounded, split::QuantizedRows<Format>{format, rows, format.columns, group}, bias);
    }
#endif
    if (HAS_BYTE_PRODUCTS && limit == LIMIT_8_BITS)
      return multiply_in_panels<ByteElements>(format, x, bias, rows, limit);
    return multiply_in_panels<ShortElements>(format, x, bias, rows, limit);
  }
  LinearInput input(x, format.columns, group);
  input.quantize(Format::offset, limit);
  return ::multiply(format, input, bias, rows);
}

// x (…, inputs) times weight (rows, inputs) in fp32 or bfloat16 -> (…, rows).
at::Tensor linear_dense(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  check_linear(x, weight, bias);
  const auto type = weight.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "weight has dtype ", type, "; Float or BFloat16 is needed");
  const int64_t rows = weight.size(0), columns = weight.size(1);
  TORCH_CHECK(columns == x.size(-1) && columns % CHUNK == 0, "weight has ", columns, " columns; ", x.size(-1),
              " are needed, a multiple of ", CHUNK);
  const LinearInput input(x, columns, columns);
  if (type == at::kBFloat16)
    return multiply(Bf16Format{group_values("weight", weight, rows, columns), columns}, input, bias, rows);
  return multiply(Fp32Format{weight.const_data_ptr<float>(), columns}, input, bias, rows);
}

// x (…, inputs), rounded to `activation_bits`, times weight (rows, columns) of 8 bits with a scale (rows, groups) ->
// (…, rows).
at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                       const OptionalTensor& bias, int64_t activation_bits) {
  check_linear(x, weight, bias), check_dtype("weight", weight, at::kChar);
  const int64_t rows = weight.size(0), columns = weight.size(1), groups = count_groups(x, weight, columns, scale);
  const Int8Format format{weight.const_data_ptr<int8_t>(), group_values("scale", scale, rows, groups), columns, groups};
  return multiply_quantized(format, x, bias, rows, activation_limit("activation_bits", activation_bits));
}

// x (…, inputs) times weight (rows, columns / 2) of 4 bits with scale and least (rows, groups) -> (…, rows).
at::Tensor linear_int4(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale, const at::Tensor& least,
                       const OptionalTensor& bias, int64_t activation_bits) {
  check_linear(x, weight, bias), check_dtype("weight", weight, at::kByte);
  const int64_t rows = weight.size(0), columns = 2 * weight.size(1), groups = count_groups(x, weight, columns, scale);
  const Int4Format format{weight.const_data_ptr<uint8_t>(), group_values("scale", scale, rows, groups),
                          group_values("least", least, rows, groups), columns, groups};
  return multiply_quantized(format, x, bias, rows, activation_limit("activation_bits", activation_bits));
}

// x (…, inputs) times weight (rows, inputs), both fp32, in tiles where the processor has them -> (…, rows).
at::Tensor linear_tiles(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  check_linear(x, weight, bias), check_tensor("weight", weight, at::kFloat, {ANY, x.size(-1)});
#if MONOBLOCK_TILES
  if (can_use_tiles() && x.numel() && weight.numel())
    return multiply_in_tiles<3>(x, split::DenseRows{weight.const_data_ptr<float>(), weight.size(0), x.size(-1)}, bias);
#endif
  return at::linear(x, weight, to_fp32(bias));
}

// The gradient of x (…, inputs), from that of the output (…, rows) and weight (rows, inputs).
at::Tensor linear_tiles_grad_input(const at::Tensor& grad, const at::Tensor& weight) {
  check_linear(grad, weight, std::nullopt);
  check_tensor("weight", weight, at::kFloat, {grad.size(-1), ANY});
#if MONOBLOCK_TILES
  if (can_use_tiles() && grad.numel() && weight.numel()) {
    const int64_t rows = grad.size(-1), inputs = weight.size(1), batch = grad.numel() / rows;
    const at::Tensor from = grad.contiguous();
    at::Tensor out = empty_output(from, inputs);
    split::multiply<3>(split::DenseRows{from.const_data_ptr<float>(), batch, rows},
                       split::DenseColumns{weight.const_data_ptr<float>(), inputs, rows, inputs},
                       {out.mutable_data_ptr<float>(), batch, inputs, inputs, nullptr, false});
    return out;
  }
#endif
  return at::matmul(grad, weight);
}

}  // namespace
