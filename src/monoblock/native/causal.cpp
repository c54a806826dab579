// Causal attention of whole sequences and its gradients, where they are so short that a head fits in a core's cache.
//
//     P = softmax(Q K')    O = P V                       Q is scaled beforehand; a query sees the keys up to its own
//     dV = P' dO           dS = P (dO V' - sum(dO O))    dQ = dS K    dK = dS' Q
//
// A thread takes all queries that share one head of keys, BLOCK of them at a time, so each sum has one order, whatever
// the number of threads.  Between the passes only the logarithm of each row's sum is kept; P is made again.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "attention.h"
#include "matrices.h"

namespace {
namespace causal {

// -- softmax ----------------------------------------------------------------------------------------------------------

constexpr float NEVER = -std::numeric_limits<float>::infinity();  // the score of a key that may not be seen

inline float greatest(Floats v) {
  float tops[LANES];
  std::memcpy(tops, &v, sizeof v);
  for (int apart = LANES / 2; apart; apart /= 2)
    for (int i = 0; i < apart; ++i) tops[i] = std::max(tops[i], tops[i + apart]);
  return tops[0];
}

inline float greatest(const float* x, int64_t vectors) {
  Floats top = all(NEVER);
  for (int64_t n = 0; n < vectors; ++n) {
    const Floats v = load<Floats>(x + n * LANES);
    top = v > top ? v : top;
  }
  return greatest(top);
}

// Each x becomes e^(x - top), nothing where a key is never seen; returns the sum.
inline float raised(float* x, int64_t vectors, float top) {
  Floats total = {};
  for (int64_t n = 0; n < vectors; ++n) {
    Floats v = load<Floats>(x + n * LANES);
    v = v == NEVER ? Floats{} : exponential(v - top);
    std::memcpy(x + n * LANES, &v, sizeof v);
    total += v;
  }
  return sum(total);
}

// Of a row of scores, those of keys that this query may not see are hidden.
inline float* hidden(Matrix& scores, int64_t row, int64_t own, int64_t seen) {
  std::fill(scores.row(row) + own, scores.row(row) + whole(seen, LANES), NEVER);
  return scores.row(row);
}

// -- one head of keys -------------------------------------------------------------------------------------------------

struct Shape {
  int64_t batch, heads, groups, length, size, value_size;
  float scale;
  Shape(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double by)
      : batch(q.size(0)), heads(q.size(1)), groups(k.size(1)), length(q.size(2)), size(q.size(3)),
        value_size(v.size(3)), scale(float(by)) {
    for (const at::Tensor& t : {q, k, v}) {
      TORCH_CHECK(t.dim() == 4 && t.scalar_type() == at::kFloat && t.stride(3) == 1, "expected heads in fp32");
      TORCH_CHECK(t.size(0) == batch && t.size(2) == length, "expected a key and a value for each query");
    }
    TORCH_CHECK(k.size(3) == size && v.size(1) == groups && heads % groups == 0, "heads differ");
  }
  // All queries, a block at a time, after what `begin` does for the keys they share; `end` comes last.
  template <class Worker>
  void run(Worker worker) const {
    at::parallel_for(0, batch * groups, 1, [&](int64_t from, int64_t to) {
      Worker own = worker;
      for (int64_t n = from; n < to; ++n) {
        const int64_t b = n / groups, g = n % groups, shared = heads / groups;
        own.begin(b, g);
        for (int64_t h = g * shared; h < (g + 1) * shared; ++h)
          for (int64_t first = 0; first < length; first += BLOCK)
            own.run(b, h, first, std::min(BLOCK, length - first));
        own.end(b, g);
      }
    });
  }
};

// Heads (B, heads, T, size) in columns of a tensor (B, T, *), as the products before and after have them.
at::Tensor heads_in(const at::Tensor& columns, int64_t from, int64_t heads, int64_t size) {
  return columns.narrow(2, from, heads * size).unflatten(2, {heads, size}).transpose(1, 2);
}

struct Forward {
  const Shape& shape;
  const at::Tensor &q, &k, &v;
  at::Tensor columns = at::empty({shape.batch, shape.length, shape.heads * shape.value_size}, q.options());
  at::Tensor out = heads_in(columns, 0, shape.heads, shape.value_size);
  at::Tensor logs = at::empty({shape.batch, shape.heads, shape.length, 1}, q.options());
  Matrix keys_turned{shape.size, shape.length}, values{shape.length, shape.value_size};
  Matrix block{BLOCK, shape.size}, weights{BLOCK, shape.length}, mixed{BLOCK, shape.value_size};

  void begin(int64_t b, int64_t g) {
    turned(Head(k, b, g), shape.length, keys_turned);
    copied(Head(v, b, g), 0, shape.length, 1.0f, values);
  }

  void run(int64_t b, int64_t h, int64_t first, int64_t count) {
    const int64_t seen = first + count, vectors = whole(seen, LANES) / LANES;
    const Head to(out, b, h), log(logs, b, h);
    float sums[BLOCK];
    copied(Head(q, b, h), first, count, shape.scale, block);
    product(as_is(block), keys_turned, count, shape.size, seen, weights);
    for (int64_t r = 0; r < count; ++r) {
      float* row = hidden(weights, r, first + r + 1, seen);
      const float top = greatest(row, vectors);
      sums[r] = raised(row, vectors, top);
      *log.row(first + r) = top + std::log(sums[r]);
    }
    product(as_is(weights), values, count, seen, shape.value_size, mixed);
    for (int64_t r = 0; r < count; ++r) scaled(mixed.row(r), shape.value_size, 1.0f / sums[r], to.row(first + r));
  }

  void end(int64_t, int64_t) {}
};

struct Backward {
  const Shape& shape;
  const at::Tensor &grad, &q, &k, &v, &out, &logs;
  const int64_t first_key = shape.heads * shape.size, first_value = first_key + shape.groups * shape.size;
  const int64_t width = first_value + shape.groups * shape.value_size;
  at::Tensor columns = at::empty({shape.batch, shape.length, width}, q.options());  // side by side, as the input may be
  at::Tensor grad_q = heads_in(columns, 0, shape.heads, shape.size);
  at::Tensor grad_k = heads_in(columns, first_key, shape.groups, shape.size);
  at::Tensor grad_v = heads_in(columns, first_value, shape.groups, shape.value_size);
  Matrix keys{shape.length, shape.size}, keys_turned{shape.size, shape.length};
  Matrix values_turned{shape.value_size, shape.length};
  Matrix block{BLOCK, shape.size}, grads{BLOCK, shape.value_size}, weights{BLOCK, shape.length};
  Matrix slopes{BLOCK, shape.length}, moves{BLOCK, shape.size};
  Matrix key_moves{shape.length, shape.size}, value_moves{shape.length, shape.value_size};

  void begin(int64_t b, int64_t g) {
    copied(Head(k, b, g), 0, shape.length, 1.0f, keys);
    turned(Head(k, b, g), shape.length, keys_turned);
    turned(Head(v, b, g), shape.length, values_turned);
    key_moves.clear();
    value_moves.clear();
  }

  void run(int64_t b, int64_t h, int64_t first, int64_t count) {
    const int64_t seen = first + count, vectors = whole(seen, LANES) / LANES;
    const Head to(grad_q, b, h), made(out, b, h), log(logs, b, h);
    copied(Head(q, b, h), first, count, shape.scale, block);
    copied(Head(grad, b, h), first, count, 1.0f, grads);
    made.fetch(first, count);
    product(as_is(block), keys_turned, count, shape.size, seen, weights);
    product(as_is(grads), values_turned, count, shape.value_size, seen, slopes);
    for (int64_t r = 0; r < count; ++r) {
      const float mean = dot(grads.row(r), made.row(first + r), shape.value_size);
      float *weight = hidden(weights, r, first + r + 1, seen), *slope = slopes.row(r);
      raised(weight, vectors, *log.row(first + r));
      for (int64_t i = 0; i < vectors * LANES; ++i) slope[i] = weight[i] * (slope[i] - mean);
    }
    product(as_is(slopes), keys, count, seen, shape.size, moves);
    product<true>(as_turned(slopes), block, seen, count, shape.size, key_moves);
    product<true>(as_turned(weights), grads, seen, count, shape.value_size, value_moves);
    for (int64_t r = 0; r < count; ++r) scaled(moves.row(r), shape.size, shape.scale, to.row(first + r));
  }

  void end(int64_t b, int64_t g) {
    const Head to_keys(grad_k, b, g), to_values(grad_v, b, g);
    for (int64_t n = 0; n < shape.length; ++n) {
      scaled(key_moves.row(n), shape.size, 1.0f, to_keys.row(n));
      scaled(value_moves.row(n), shape.value_size, 1.0f, to_values.row(n));
    }
  }
};

// -- the operators ----------------------------------------------------------------------------------------------------

using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Two forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  const Shape shape(q, k, v, scale);
  const Forward worker{shape, q, k, v};
  shape.run(worker);
  return {worker.out, worker.logs};
}

Three backward(const at::Tensor& given, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
               const at::Tensor& out, const at::Tensor& logs, double scale) {
  const Shape shape(q, k, v, scale);
  const at::Tensor grad = given.stride(3) == 1 ? given : given.contiguous();
  TORCH_CHECK(grad.sizes() == out.sizes() && out.stride(3) == 1, "expected a gradient for each number");
  const Backward worker{shape, grad, q, k, v, out, logs};
  shape.run(worker);
  return {worker.grad_q, worker.grad_k, worker.grad_v};
}

}  // namespace causal
}  // namespace

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  library.def("attend_causal(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)");
  library.def(
      "attend_causal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logs, float scale) -> "
      "(Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(monoblock, CPU, library) {
  library.impl("attend_causal", &causal::forward);
  library.impl("attend_causal_backward", &causal::backward);
}
