// GELU in its tanh form, 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), and its gradient: one pass over
// memory each, and only x is kept between the two.  With v = 2u and e = e^-v it is x s, s = 1 / (1 + e), and its slope
// s + x s (1 - s) v', where 1 - s = e s loses no digits.
//
// Every number is computed by itself, in the same steps wherever it stands, so neither threads nor sizes change a bit.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "attention.h"

namespace {
namespace gelu {

constexpr int64_t NUMBERS = 1 << 14;  // worth a thread
constexpr float FIRST = 1.5957691216f, THIRD = 0.044715f;

struct Squashed {
  Floats e, s;
  explicit Squashed(Floats x) {
    const Floats v = FIRST * (x + THIRD * x * x * x);
    e = v > 87.0f ? Floats{} : exponential(-v);     // where it would stay at the least it holds,
    s = v < -87.0f ? Floats{} : 1.0f / (1.0f + e);  // and at the greatest
  }
};

inline Floats value(Floats x) { return x * Squashed(x).s; }

inline Floats slope(Floats x) {
  const Squashed at(x);
  return at.s + x * (at.e * at.s * at.s) * (FIRST * (1.0f + 3 * THIRD * x * x));
}

// to[i] = f(i, count): a vector from place i on, of which count are wanted.
template <class Function>
void filled(const at::Tensor& to, Function f) {
  const int64_t size = to.numel();
  float* out = to.mutable_data_ptr<float>();
  at::parallel_for(0, (size + LANES - 1) / LANES, NUMBERS / LANES, [&](int64_t from, int64_t end) {
    for (int64_t n = from; n < end; ++n) {
      const int count = int(std::min<int64_t>(LANES, size - n * LANES));
      const Floats v = f(n * LANES, count);
      std::memcpy(out + n * LANES, &v, 4 * count);
    }
  });
}

at::Tensor whole(const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "the kernels read fp32 numbers");
  return x.contiguous();
}

at::Tensor forward(const at::Tensor& given) {
  const at::Tensor x = whole(given), y = at::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  filled(y, [&](int64_t i, int count) { return value(part(from + i, count)); });
  return y;
}

at::Tensor backward(const at::Tensor& grad, const at::Tensor& given) {
  TORCH_CHECK(grad.sizes() == given.sizes(), "a gradient for each number");
  const at::Tensor x = whole(given), g = whole(grad), y = at::empty_like(x);
  const float *from = x.const_data_ptr<float>(), *by = g.const_data_ptr<float>();
  filled(y, [&](int64_t i, int count) { return part(by + i, count) * slope(part(from + i, count)); });
  return y;
}

}  // namespace gelu
}  // namespace

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  library.def("gelu_tanh(Tensor x) -> Tensor");
  library.def("gelu_tanh_backward(Tensor grad, Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(monoblock, CPU, library) {
  library.impl("gelu_tanh", &gelu::forward);
  library.impl("gelu_tanh_backward", &gelu::backward);
}
