// Products of rows x with a whole matrix as operators, and the quantization of a matrix to 8 bits.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

#include <tuple>
#include <vector>

#include "checks.h"
#include "linear/integer_tiles.h"
#include "linear/thread_products.h"

namespace {

// x (…, inputs) as rows filled up with zeros to whole groups.
class LinearInput {
 public:
  const at::Tensor x;
  const int64_t inputs, batch;
  const float* rows;

  LinearInput(const at::Tensor& activations, int64_t columns)
      : x(activations.contiguous()), inputs(x.size(-1)), batch(x.numel() / inputs), rows(x.const_data_ptr<float>()) {
    if (inputs == columns) return;
    padded.assign(batch * columns, 0.0f);
    for (int64_t b = 0; b < batch; ++b) std::copy_n(rows + b * inputs, inputs, padded.data() + b * columns);
    rows = padded.data();
  }

 private:
  std::vector<float> padded;
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

OptionalTensor to_fp32(const OptionalTensor& bias) {
  return bias ? OptionalTensor(bias->to(at::kFloat).contiguous()) : std::nullopt;
}

// (…, rows) for x (…, inputs).
at::Tensor empty_output(const at::Tensor& x, int64_t rows) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = rows;
  return at::empty(shape, x.options());
}

#if MONOBLOCK_TILES
// x W' + bias in tiles; the operand with fewer rows is the one that is packed first.
template <int PARTS, class Weight>
void multiply_in_tiles(const split::DenseRows& x, const Weight& weight, const float* bias, float* y) {
  if (x.rows < weight.rows)
    split::multiply<PARTS>(weight, x, {y, weight.rows, x.rows, weight.rows, bias, true});
  else
    split::multiply<PARTS>(x, weight, {y, x.rows, weight.rows, weight.rows, bias, false});
}

// The same for a quantized weight: bytes are multiplied as they are, in groups that one integer adds up.
void multiply_quantized_in_tiles(const WeightMatrix& m, const LinearInput& input, float* y) {
  const int64_t group = m.columns / m.groups;
  with_format(m, [&]<class Format>(const Format& format) {
    if constexpr (!Format::offset)
      if (group <= MAX_PRODUCTS) {
        const auto multiply = m.limit == LIMIT_8_BITS ? &integer_tiles::multiply<1> : &integer_tiles::multiply<2>;
        const MatvecInput in{input.rows, nullptr, input.batch, m.columns, group, m.groups, m.columns};
        return multiply(format, in, m.rows, m.bias, y);
      }
    std::vector<float> rounded;  // to the integers of a group, times their step
    if (m.limit == LIMIT_8_BITS) {
      rounded.resize(input.batch * m.columns);
      at::parallel_for(0, input.batch, 8, [&](int64_t begin, int64_t end) {
        std::vector<int16_t> integers(m.columns);
        std::vector<float> steps(m.groups);
        for (int64_t b = begin; b < end; ++b) {
          quantize_row(input.rows + b * m.columns, m.groups, group, integers.data(), steps.data(), m.limit);
          for (int64_t i = 0; i < m.columns; ++i) rounded[b * m.columns + i] = integers[i] * steps[i / group];
        }
      });
    }
    const float* x = rounded.empty() ? input.rows : rounded.data();
    const split::QuantizedRows<Format> weight{format, m.rows, m.columns, group};
    multiply_in_tiles<2>({x, input.batch, m.columns}, weight, m.bias, y);
  });
}
#endif

// x (…, inputs) times weight (rows, columns) -> (…, rows).  A weight of 8 bits has a scale, and one of 4 bits a least
// value as well, for each group of a row; x is rounded to `activation_bits` for them.  exact: the bits of a row do not
// depend on the other rows, as in an exact pass of a stack.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& scale,
                  const OptionalTensor& least, const OptionalTensor& bias, int64_t activation_bits, bool exact) {
  check_linear(x, weight, bias);
  TORCH_CHECK(scale || !least, "scale is None; a weight with least values needs it");
  WeightMatrix m{least ? WeightMatrix::INT4 : scale ? WeightMatrix::INT8 : WeightMatrix::DENSE, weight.const_data_ptr()};
  check_dtype("weight", weight, least ? at::kByte : scale ? at::kChar : at::kFloat);
  m.rows = weight.size(0), m.columns = weight.size(1) * (least ? 2 : 1);
  if (scale) {
    check_memory("scale", *scale), check_shape("scale", *scale, {m.rows, ANY});
    m.groups = scale->size(1), m.limit = activation_limit("activation_bits", activation_bits);
    check_groups("weight", m.columns, m.groups, x.size(-1));
    m.scale = group_values("scale", *scale, m.rows, m.groups);
    if (least) m.least = group_values("least", *least, m.rows, m.groups);
  } else {
    check_shape("weight", weight, {ANY, x.size(-1)});
  }
  const OptionalTensor fp32_bias = to_fp32(bias);
  m.bias = fp32_or_null(fp32_bias);
  const LinearInput input(x, m.columns);
  at::Tensor out = empty_output(input.x, m.rows);
  float* y = out.mutable_data_ptr<float>();
#if MONOBLOCK_TILES
  if (m.is_quantized() && !exact && input.batch >= MANY_ROWS && can_use_tiles())
    return multiply_quantized_in_tiles(m, input, y), out;
#endif
  SharedRows& shared = shared_rows(exact);
  run_threads(m.rows * m.columns * input.batch, [&](Barrier& barrier, int number, int count) {
    ThreadProducts(input.batch, shared, barrier, number, count).multiply({{&m, y, m.rows}}, input.rows, m.columns);
  });
  return out;
}

// x (…, inputs) times weight (rows, inputs), both fp32, in tiles where the processor has them -> (…, rows).
at::Tensor linear_tiles(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  check_linear(x, weight, bias), check_tensor("weight", weight, at::kFloat, {ANY, x.size(-1)});
  const OptionalTensor fp32_bias = to_fp32(bias);
#if MONOBLOCK_TILES
  if (can_use_tiles() && x.numel() && weight.numel()) {
    const LinearInput input(x, x.size(-1));
    at::Tensor out = empty_output(input.x, weight.size(0));
    multiply_in_tiles<3>({input.rows, input.batch, input.inputs},
                         split::DenseRows{weight.const_data_ptr<float>(), weight.size(0), input.inputs},
                         fp32_or_null(fp32_bias), out.mutable_data_ptr<float>());
    return out;
  }
#endif
  return at::linear(x, weight, fp32_bias);
}

// The gradient of x (…, inputs), from that of the output (…, rows) and weight (rows, inputs).
at::Tensor linear_tiles_grad_input(const at::Tensor& grad, const at::Tensor& weight) {
  check_linear(grad, weight, std::nullopt);
  check_tensor("weight", weight, at::kFloat, {grad.size(-1), ANY});
#if MONOBLOCK_TILES
  if (can_use_tiles() && grad.numel() && weight.numel()) {
    const int64_t inputs = weight.size(1);
    const LinearInput from(grad, grad.size(-1));
    at::Tensor out = empty_output(from.x, inputs);
    split::multiply<3>(split::DenseRows{from.rows, from.batch, from.inputs},
                       split::DenseColumns{weight.const_data_ptr<float>(), inputs, from.inputs, inputs},
                       {out.mutable_data_ptr<float>(), from.batch, inputs, inputs, nullptr, false});
    return out;
  }
#endif
  return at::matmul(grad, weight);
}

// The smallest bfloat16 that is not below x >= 0.
uint16_t round_up_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return uint16_t((bits + 0xffff) >> 16);
}

// Quantization to 8 bits, as quantization/packing.py has it: the largest |w| of a group becomes 127 times its scale,
// which is rounded up to bfloat16, so that nothing is clipped.  weight (…, group) -> integers of the same shape, and a
// scale for each group.
std::tuple<at::Tensor, at::Tensor> quantize_int8(const at::Tensor& weight) {
  check_dtype("weight", weight, at::kFloat), check_contiguous("weight", weight);
  TORCH_CHECK(weight.dim() >= 1 && weight.size(-1) > 0 && weight.size(-1) % LANES == 0, "weight has shape ",
              shape_text(weight.sizes()), "; groups of a multiple of ", LANES, " are needed");
  const int64_t group = weight.size(-1), groups = weight.numel() / group;
  at::Tensor integers = at::empty(weight.sizes(), weight.options().dtype(at::kChar));
  at::Tensor scales = at::empty({groups}, weight.options().dtype(at::kBFloat16));
  const float* from = weight.const_data_ptr<float>();
  int8_t* to = integers.mutable_data_ptr<int8_t>();
  uint16_t* scale = static_cast<uint16_t*>(scales.mutable_data_ptr());
  using Bytes = int8_t __attribute__((vector_size(LANES)));
  at::parallel_for(0, groups, std::max<int64_t>(1, WEIGHTS_PER_THREAD / group), [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      scale[g] = round_up_to_bf16(max_abs(from + g * group, group) / 127);
      const uint32_t bits = uint32_t(scale[g]) << 16;
      float step;
      std::memcpy(&step, &bits, sizeof step);
      if (step == 0) step = 1;
      for (int64_t i = 0; i < group; i += LANES) {
        const Floats n = (load<Floats>(from + g * group + i) / step + SHIFT) - SHIFT;
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(n, Ints), Bytes);
        std::memcpy(to + g * group + i, &bytes, sizeof bytes);
      }
    }
  });
  return {integers, scales};
}

}  // namespace
