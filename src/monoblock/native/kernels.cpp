// The products of product.h as operators of torch: a few rows x with a whole matrix.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "product.h"

namespace {

template <class Format>
void product(const Format& format, const Input& in, const float* bias, float* y, int64_t rows) {
  int64_t bands = (rows + ROWS - 1) / ROWS, grain = std::max<int64_t>(1, GRAIN / (ROWS * in.columns));
  at::parallel_for(0, bands, grain, [&](int64_t from, int64_t to) {
    std::vector<float> scales(ROWS * in.groups), leasts(ROWS * in.groups);
    part_of(format, in, from * ROWS, std::min(to * ROWS, rows), bias, y, rows, scales.data(), leasts.data());
  });
}

// -- the operators -------------------------------------------------------------------------------------------------

// x (…, inputs) in fp32, widened with zeros to whole groups, and the sums of its groups.
struct Prepared {
  at::Tensor x;
  std::vector<float> wide, sums;
  Whole whole;
  Input in;
};

void prepare(Prepared& out, const at::Tensor& given, int64_t columns, int64_t group, bool scaled, bool with_sums) {
  TORCH_CHECK(given.scalar_type() == at::kFloat, "the kernels read fp32 activations");
  out.x = given.contiguous();
  int64_t inputs = given.size(-1), batch = given.numel() / std::max<int64_t>(inputs, 1);
  const float* x = out.x.const_data_ptr<float>();
  if (inputs != columns) {
    out.wide.assign(batch * columns, 0.0f);
    for (int64_t b = 0; b < batch; ++b) std::copy_n(x + b * inputs, inputs, out.wide.data() + b * columns);
    x = out.wide.data();
  }
  out.in = {x, nullptr, batch, columns, group, columns / group, columns};
  if (scaled && INTEGERS) out.whole.read(out.in);
  if (!with_sums) return;
  out.sums.assign(batch * out.in.groups * LANES, 0.0f);
  for (int64_t n = 0; n < batch * out.in.groups; ++n)
    for (int64_t i = 0; i < group; ++i) out.sums[n * LANES + i % LANES] += x[n * group + i];
  out.in.sums = out.sums.data();
}

template <class Format>
at::Tensor finished(const Format& format, const Prepared& given, const std::optional<at::Tensor>& bias, int64_t rows) {
  auto shape = given.x.sizes().vec();
  shape.back() = rows;
  at::Tensor y = at::empty(shape, given.x.options());
  at::Tensor held = bias ? bias->to(at::kFloat).contiguous() : at::Tensor();
  product(format, given.in, bias ? held.const_data_ptr<float>() : nullptr, y.mutable_data_ptr<float>(), rows);
  return y;
}

const uint16_t* halves(const at::Tensor& given) {
  TORCH_CHECK(given.scalar_type() == at::kBFloat16 && given.is_contiguous(), "expected contiguous bfloat16");
  return static_cast<const uint16_t*>(given.const_data_ptr());
}

at::Tensor dense(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  int64_t rows = weight.size(0), columns = weight.size(1);
  TORCH_CHECK(columns % CHUNK == 0 && weight.is_contiguous(), "expected a contiguous weight of whole chunks");
  Prepared given;
  prepare(given, x, columns, columns, false, false);
  if (weight.scalar_type() == at::kBFloat16) return finished(Half{halves(weight), columns}, given, bias, rows);
  return finished(Single{weight.const_data_ptr<float>(), columns}, given, bias, rows);
}

at::Tensor int8(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                const std::optional<at::Tensor>& bias) {
  int64_t rows = weight.size(0), columns = weight.size(1), groups = scale.size(1);
  TORCH_CHECK(columns % (CHUNK * groups) == 0 && weight.is_contiguous(), "expected whole groups");
  Prepared given;
  prepare(given, x, columns, columns / groups, true, false);
  return finished(Int8{weight.const_data_ptr<int8_t>(), halves(scale), columns, groups}, given, bias, rows);
}

at::Tensor int4(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale, const at::Tensor& least,
                const std::optional<at::Tensor>& bias) {
  int64_t rows = weight.size(0), columns = 2 * weight.size(1), groups = scale.size(1);
  TORCH_CHECK(columns % (CHUNK * groups) == 0 && weight.is_contiguous(), "expected whole groups");
  Prepared given;
  prepare(given, x, columns, columns / groups, true, true);
  Int4 format{weight.const_data_ptr<uint8_t>(), halves(scale), halves(least), columns, groups};
  return finished(format, given, bias, rows);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  library.def("dense(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor");
  library.def("int4(Tensor x, Tensor weight, Tensor scale, Tensor least, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(monoblock, CPU, library) {
  library.impl("dense", &dense);
  library.impl("int8", &int8);
  library.impl("int4", &int4);
}
