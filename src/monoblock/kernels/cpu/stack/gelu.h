// GELU in its tanh form, 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), and its gradient: one pass over
// memory each, and only x is kept between the two.  With v = 2u and e = e^-v it is x s, s = 1 / (1 + e), and its
// derivative s + x s (1 - s) v', where 1 - s = e s loses no digits.
//
// Every element is computed in the same way wherever it stands, so neither threads nor sizes change a bit.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include "stack/activations.h"
#include "checks.h"

namespace {
namespace gelu {

constexpr int64_t ELEMENTS_PER_THREAD = 1 << 14;  // fewer are not worth another thread
constexpr float FIRST = 1.5957691216f, THIRD = 0.044715f;

struct Sigmoid {
  Floats e, s;
  explicit Sigmoid(Floats x) {
    const Floats v = FIRST * (x + THIRD * x * x * x);
    e = v > 87.0f ? Floats{} : exponential(-v);     // beyond what `exponential` holds,
    s = v < -87.0f ? Floats{} : 1.0f / (1.0f + e);  // both limits are exact
  }
};

inline Floats value(Floats x) { return x * Sigmoid(x).s; }

inline Floats derivative(Floats x) {
  const Sigmoid at(x);
  return at.s + x * (at.e * at.s * at.s) * (FIRST * (1.0f + 3 * THIRD * x * x));
}

// to[i …] = f(i, count): a vector, of which the first `count` lanes are stored.
template <class Function>
void fill(const at::Tensor& to, Function f) {
  const int64_t size = to.numel();
  float* out = to.mutable_data_ptr<float>();
  at::parallel_for(0, (size + LANES - 1) / LANES, ELEMENTS_PER_THREAD / LANES, [&](int64_t from, int64_t end) {
    for (int64_t n = from; n < end; ++n) {
      const int count = int(std::min<int64_t>(LANES, size - n * LANES));
      const Floats v = f(n * LANES, count);
      std::memcpy(out + n * LANES, &v, 4 * count);
    }
  });
}

at::Tensor contiguous_fp32(const char* name, const at::Tensor& t) {
  check_dtype(name, t, at::kFloat);
  return t.contiguous();
}

at::Tensor forward(const at::Tensor& input) {
  const at::Tensor x = contiguous_fp32("x", input), y = at::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  fill(y, [&](int64_t i, int count) { return value(load_lanes(from + i, count)); });
  return y;
}

at::Tensor backward(const at::Tensor& grad, const at::Tensor& input) {
  const at::Tensor x = contiguous_fp32("x", input), g = contiguous_fp32("grad", grad), y = at::empty_like(x);
  TORCH_CHECK(g.sizes() == x.sizes(), "grad has shape ", shape_text(g.sizes()), "; ", shape_text(x.sizes()),
              " is needed");
  const float *from = x.const_data_ptr<float>(), *grads = g.const_data_ptr<float>();
  fill(y, [&](int64_t i, int count) { return load_lanes(grads + i, count) * derivative(load_lanes(from + i, count)); });
  return y;
}

}  // namespace gelu
}  // namespace
