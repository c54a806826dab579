// linear_exact: a product whose rows have the same bits alone and in any company, as in an exact pass of a stack.
#pragma once

#include "linear/linear.h"
#include "linear/thread_products.h"

namespace {

class ExactLinear : public ThreadProducts {
 public:
  using ThreadProducts::ThreadProducts;
  void run(const WeightMatrix& m, const float* x, float* y) { multiply({{&m, y, m.rows}}, x, m.columns); }
};

// x (…, inputs) times weight (rows, columns) -> (…, rows).  A weight of 8 bits has a scale, and one of 4 bits a least value
// as well, for each group of a row.
at::Tensor linear_exact(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& scale,
                        const OptionalTensor& least, const OptionalTensor& bias, int64_t activation_bits) {
  check_linear(x, weight, bias);
  TORCH_CHECK(scale || !least, "scale is None; a weight with least values needs it");
  WeightMatrix m{least ? WeightMatrix::INT4 : scale ? WeightMatrix::INT8 : WeightMatrix::DENSE, weight.const_data_ptr()};
  check_dtype("weight", weight, least ? at::kByte : scale ? at::kChar : at::kFloat);
  m.rows = weight.size(0), m.columns = weight.size(1) * (least ? 2 : 1);
  if (scale) {
    m.groups = count_groups(x, weight, m.columns, *scale), m.limit = activation_limit("activation_bits", activation_bits);
    m.scale = group_values("scale", *scale, m.rows, m.groups);
    if (least) m.least = group_values("least", *least, m.rows, m.groups);
  } else {
    check_shape("weight", weight, {ANY, x.size(-1)});
  }
  const OptionalTensor fp32_bias = to_fp32(bias);
  m.bias = fp32_or_null(fp32_bias);
  const LinearInput input(x, m.columns, m.columns / m.groups);
  at::Tensor out = empty_output(input.x, m.rows);
  float* y = out.mutable_data_ptr<float>();
  thread_local SharedRows many_rows;
  SharedRows& shared = many_rows;  // the calling thread's, for all
  shared.is_exact = true;
  run_threads(m.rows * m.columns * input.in.batch, [&](Barrier& barrier, int number, int count) {
    ExactLinear(input.in.batch, shared, barrier, number, count).run(m, input.in.x, y);
  });
  return out;
}

}  // namespace
