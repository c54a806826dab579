// Numbers to 8 bits, as quantize/packing.py says it: the largest number of a group becomes 127 times its scale, which is
// rounded up to bfloat16, so that nothing is cut off.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "integers.h"

namespace {

uint16_t rounded_up(float given) {
  uint32_t bits;
  std::memcpy(&bits, &given, sizeof bits);
  return uint16_t((bits + 0xffff) >> 16);  // of what is not negative, the next larger one unless it is one
}

// weight (…, group) -> numbers of the same shape, a scale for each group
std::tuple<at::Tensor, at::Tensor> pack8(const at::Tensor& weight) {
  const int64_t group = weight.size(-1), groups = weight.numel() / std::max<int64_t>(group, 1);
  TORCH_CHECK(weight.scalar_type() == at::kFloat && weight.is_contiguous(), "expected contiguous fp32");
  TORCH_CHECK(group % LANES == 0, "expected groups of whole vectors");
  at::Tensor numbers = at::empty(weight.sizes(), weight.options().dtype(at::kChar));
  at::Tensor scales = at::empty({groups}, weight.options().dtype(at::kBFloat16));
  const float* from = weight.const_data_ptr<float>();
  int8_t* to = numbers.mutable_data_ptr<int8_t>();
  uint16_t* scale = static_cast<uint16_t*>(scales.mutable_data_ptr());
  using Bytes = int8_t __attribute__((vector_size(LANES)));
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number
  at::parallel_for(0, groups, std::max<int64_t>(1, GRAIN / group), [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      scale[g] = rounded_up(largest_size(from + g * group, group) / 127);
      const uint32_t bits = uint32_t(scale[g]) << 16;
      float by;
      std::memcpy(&by, &bits, sizeof by);
      if (by == 0) by = 1;
      for (int64_t i = 0; i < group; i += LANES) {
        const Floats n = (load<Floats>(from + g * group + i) / by + shift) - shift;
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(n, Words), Bytes);
        std::memcpy(to + g * group + i, &bytes, sizeof bytes);
      }
    }
  });
  return {numbers, scales};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(monoblock, library) { library.def("pack8(Tensor weight) -> (Tensor, Tensor)"); }

TORCH_LIBRARY_IMPL(monoblock, CPU, library) { library.impl("pack8", &pack8); }
