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

// to[i] = f(arrays[0][i], …) for N arrays, vector by vector.
template <size_t N, class Function>
void fill(const at::Tensor& to, const float* const (&arrays)[N], Function f) {
  constexpr int VECTORS = PARALLEL_VECTORS, BLOCK = VECTORS * LANES;
  const int64_t size = to.numel(), blocks = size / BLOCK;
  float* out = to.mutable_data_ptr<float>();
  at::parallel_for(0, blocks, ELEMENTS_PER_THREAD / BLOCK, [&](int64_t from, int64_t end) {
    for (int64_t i = from * BLOCK; i < end * BLOCK; i += BLOCK) {
      Floats inputs[VECTORS][N], results[VECTORS];
      UNROLL for (int v = 0; v < VECTORS; ++v)
        UNROLL for (size_t n = 0; n < N; ++n) inputs[v][n] = load<Floats>(arrays[n] + i + v * LANES);
      UNROLL for (int v = 0; v < VECTORS; ++v) results[v] = f(inputs[v]);
      UNROLL for (int v = 0; v < VECTORS; ++v) store(out + i + v * LANES, results[v]);
    }
  });
  for (int64_t i = blocks * BLOCK; i < size; i += LANES) {
    const int count = int(std::min<int64_t>(LANES, size - i));
    Floats inputs[N];
    for (size_t n = 0; n < N; ++n) inputs[n] = load_lanes(arrays[n] + i, count);
    const Floats result = f(inputs);
    std::memcpy(out + i, &result, 4 * count);
  }
}

at::Tensor contiguous_fp32(const char* name, const at::Tensor& t) {
  check_dtype(name, t, at::kFloat);
  return t.contiguous();
}

at::Tensor forward(const at::Tensor& input) {
  const at::Tensor x = contiguous_fp32("x", input), y = at::empty_like(x);
  fill(y, {x.const_data_ptr<float>()}, [](const Floats* inputs) { return value(inputs[0]); });
  return y;
}

at::Tensor backward(const at::Tensor& grad, const at::Tensor& input) {
  const at::Tensor x = contiguous_fp32("x", input), g = contiguous_fp32("grad", grad), y = at::empty_like(x);
  TORCH_CHECK(g.sizes() == x.sizes(), "grad has shape ", shape_text(g.sizes()), "; ", shape_text(x.sizes()),
              " is needed");
  fill(y, {g.const_data_ptr<float>(), x.const_data_ptr<float>()},
       [](const Floats* inputs) { return inputs[0] * derivative(inputs[1]); });
  return y;
}

}  // namespace gelu
}  // namespace
