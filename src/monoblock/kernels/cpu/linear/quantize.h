// Quantization to 8 bits, as quantization/packing.py has it: the largest |w| of a group becomes 127 times its scale,
// which is rounded up to bfloat16, so that nothing is clipped.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "checks.h"
#include "linear/integer_dot.h"

namespace {

// The smallest bfloat16 that is not below x >= 0.
uint16_t round_up_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return uint16_t((bits + 0xffff) >> 16);
}

// weight (…, group) -> integers of the same shape, and a scale for each group.
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
