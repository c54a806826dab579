// Causal attention of whole sequences and its gradients, for sequences so short that a head fits in a core's cache.
//
//     P = softmax(Q K')    O = P V                       Q is scaled first; a query attends up to its own key
//     dV = P' dO           dS = P (dO V' - sum(dO O))    dQ = dS K    dK = dS' Q
//
// A thread takes all queries that share one head of keys, BLOCK of them at a time, so each sum has one order, whatever
// the number of threads.  Between the passes only the log of each row's sum is kept; P is computed again.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>
#include <vector>

#include "checks.h"
#include "linear/matvec.h"
#include "stack/activations.h"

namespace {
namespace causal {

// -- small matrices in a core's cache: heads that are copied in, some of them transposed, and their products ----------

constexpr int64_t BLOCK = 32;          // queries at a time
constexpr int64_t PREFETCH_ROWS = 32;  // rows that are fetched ahead

constexpr int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// (rows, columns) in rows of whole vectors, filled up with zeros; one more vector between rows avoids cache conflicts
// between columns.
struct Scratch {
  int64_t rows, columns, step;
  std::vector<float> memory;
  Scratch(int64_t r, int64_t c) : rows(r), columns(round_up(c, LANES)), step(columns + LANES) {
    memory.assign(round_up(rows, BLOCK) * step, 0.0f);
  }
  float* row(int64_t n) { return memory.data() + n * step; }
  void clear() { std::fill(memory.begin(), memory.end(), 0.0f); }
};

// One head of a tensor (B, H, T, size) with a contiguous last axis.
struct Head {
  float* data;
  int64_t step, size;
  Head(const at::Tensor& t, int64_t b, int64_t h)
      : data(static_cast<float*>(t.data_ptr()) + b * t.stride(0) + h * t.stride(1)), step(t.stride(2)),
        size(t.size(3)) {}
  float* row(int64_t n) const { return data + n * step; }
  // Rows lie far apart, perhaps each on a page of its own, so hardware prefetchers do not find them.
  void fetch(int64_t first, int64_t count) const {
    for (int64_t n = first; n < first + count; ++n)
      for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(row(n) + i);
  }
};

inline void copy_scaled(const float* from, int64_t count, float scale, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * scale;
}

void copy_rows(const Head& from, int64_t first, int64_t count, float scale, Scratch& to) {
  for (int64_t n = 0; n < count; ++n) {
    from.fetch(first + n + PREFETCH_ROWS, 1);
    copy_scaled(from.row(first + n), from.size, scale, to.row(n));
  }
}

void copy_transposed(const Head& from, int64_t count, Scratch& to) {
  for (int64_t first = 0; first < count; first += LANES) {  // few rows at a time, which stay in the cache
    from.fetch(first + PREFETCH_ROWS, LANES);
    for (int64_t i = 0; i < from.size; ++i)
      for (int64_t n = first; n < std::min(first + LANES, count); ++n) to.row(i)[n] = from.row(n)[i];
  }
}

// The left factor: its entry (m, k) is at data[m * down + k * along], so that it can be read transposed.
struct LeftFactor {
  const float* data;
  int64_t down, along;
};

#if defined(__ARM_NEON)

constexpr int STRIP = 3;  // vectors of c in a tile, as many as registers hold

// Add the products of the steps in which the numbers of a lie side by side, four of a row or one of each row, and are
// multiplied from the lanes of a vector; return the number of these steps.
template <int N>
INLINED int64_t add_lanes(const LeftFactor& a, const float* b, int64_t b_step, int64_t depth, Floats (&sums)[ROWS][N]) {
  static_assert(LANES == 4 && ROWS == 4);
  int64_t k = 0;
  for (; a.along == 1 && k + LANES <= depth; k += LANES) {
    float32x4_t left[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) left[r] = vld1q_f32(a.data + r * a.down + k);
    const auto add_step = [&]<int LANE>() {
      UNROLL for (int n = 0; n < N; ++n) {
        const float32x4_t right = vld1q_f32(b + (k + LANE) * b_step + n * LANES);
        UNROLL for (int r = 0; r < ROWS; ++r) sums[r][n] = vfmaq_laneq_f32(sums[r][n], right, left[r], LANE);
      }
    };
    add_step.template operator()<0>(), add_step.template operator()<1>();
    add_step.template operator()<2>(), add_step.template operator()<3>();
  }
  for (; a.down == 1 && k < depth; ++k) {
    const float32x4_t left = vld1q_f32(a.data + k * a.along);
    UNROLL for (int n = 0; n < N; ++n) {
      const float32x4_t right = vld1q_f32(b + k * b_step + n * LANES);
      sums[0][n] = vfmaq_laneq_f32(sums[0][n], right, left, 0);
      sums[1][n] = vfmaq_laneq_f32(sums[1][n], right, left, 1);
      sums[2][n] = vfmaq_laneq_f32(sums[2][n], right, left, 2);
      sums[3][n] = vfmaq_laneq_f32(sums[3][n], right, left, 3);
    }
  }
  return k;
}

#else

constexpr int STRIP = 2;

template <int N>
inline int64_t add_lanes(const LeftFactor&, const float*, int64_t, int64_t, Floats (&)[ROWS][N]) {
  return 0;  // here a number of a is broadcast from memory
}

#endif

// ROWS rows and N vectors of c = a b, or of c += a b.
template <int N, bool ACCUMULATE>
inline void tile(const LeftFactor& a, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_step) {
  Floats sums[ROWS][N];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int n = 0; n < N; ++n) sums[r][n] = ACCUMULATE ? load<Floats>(c + r * c_step + n * LANES) : Floats{};
  for (int64_t k = add_lanes(a, b, b_step, depth, sums); k < depth; ++k) {
    Floats right[N];
    UNROLL for (int n = 0; n < N; ++n) right[n] = load<Floats>(b + k * b_step + n * LANES);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const float left = a.data[r * a.down + k * a.along];
      UNROLL for (int n = 0; n < N; ++n) sums[r][n] += left * right[n];
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int n = 0; n < N; ++n) store(c + r * c_step + n * LANES, sums[r][n]);
}

// c (rows, columns) = a (rows, depth) b (depth, columns), or c += a b; rows and columns are rounded up to
// whole tiles.
template <bool ACCUMULATE = false>
void multiply(const LeftFactor& a, Scratch& b, int64_t rows, int64_t depth, int64_t columns, Scratch& c) {
  const auto multiply_strip = [&]<int N>(int64_t column) {  // a strip of b stays in the cache for all rows
    for (int64_t m = 0; m < rows; m += ROWS)
      tile<N, ACCUMULATE>({a.data + m * a.down, a.down, a.along}, b.row(0) + column, b.step, depth, c.row(m) + column,
                          c.step);
  };
  const int64_t end = round_up(columns, LANES);
  int64_t column = 0;
  for (; column + STRIP * LANES <= end; column += STRIP * LANES) multiply_strip.template operator()<STRIP>(column);
  for (; column < end; column += LANES) multiply_strip.template operator()<1>(column);
}

LeftFactor plain(Scratch& a) { return {a.row(0), a.step, 1}; }
LeftFactor transposed(Scratch& a) { return {a.row(0), 1, a.step}; }

// -- softmax ----------------------------------------------------------------------------------------------------------

constexpr float MASKED = -std::numeric_limits<float>::infinity();  // the score of a later key

inline float max_of(const float* x, int64_t vectors) {
  Floats top = all(MASKED);
  for (int64_t n = 0; n < vectors; ++n) {
    const Floats v = load<Floats>(x + n * LANES);
    top = v > top ? v : top;
  }
  return max_lane(top);
}

// x = e^(x - top), 0 where masked unless top is NaN; returns the sum.
inline float exp_row(float* x, int64_t vectors, float top) {
  Floats total = {};
  transform(x, vectors * LANES, [&](Floats v, int64_t, int) { return exponential_or_zero(v - top); });
  for (int64_t n = 0; n < vectors; ++n) total += load<Floats>(x + n * LANES);
  return sum(total);
}

// Mask the scores of the keys behind a query; `visible` are the keys of its block.
inline float* mask_row(Scratch& scores, int64_t row, int64_t first_masked, int64_t visible) {
  std::fill(scores.row(row) + first_masked, scores.row(row) + round_up(visible, LANES), MASKED);
  return scores.row(row);
}

// -- one head of keys -------------------------------------------------------------------------------------------------

struct AttentionShape {
  int64_t batch, heads, kv_heads, length, size, value_size;
  float scale;
  AttentionShape(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale_) : scale(float(scale_)) {
    check_heads("q", q, {ANY, ANY, ANY, ANY});
    batch = q.size(0), heads = q.size(1), length = q.size(2), size = q.size(3);
    check_heads("k", k, {batch, ANY, length, size});
    kv_heads = k.size(1);
    check_heads("v", v, {batch, kv_heads, length, ANY});
    value_size = v.size(3);
    TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "k has ", kv_heads, " heads, which do not divide the ", heads,
                " heads of q");
  }
  // All queries, a block at a time, between `begin` and `end` for the keys they share.
  template <class Worker>
  void run(Worker worker) const {
    at::parallel_for(0, batch * kv_heads, 1, [&](int64_t from, int64_t to) {
      Worker local = worker;
      for (int64_t n = from; n < to; ++n) {
        const int64_t b = n / kv_heads, g = n % kv_heads, shared = heads / kv_heads;
        local.begin(b, g);
        for (int64_t h = g * shared; h < (g + 1) * shared; ++h)
          for (int64_t first = 0; first < length; first += BLOCK)
            local.run(b, h, first, std::min(BLOCK, length - first));
        local.end(b, g);
      }
    });
  }
};

// Heads (B, H, T, size) as columns of a tensor (B, T, *), the layout of the products before and after.
at::Tensor heads_of(const at::Tensor& columns, int64_t from, int64_t heads, int64_t size) {
  return columns.narrow(2, from, heads * size).unflatten(2, {heads, size}).transpose(1, 2);
}

struct Forward {
  const AttentionShape& shape;
  const at::Tensor &q, &k, &v;
  at::Tensor columns = at::empty({shape.batch, shape.length, shape.heads * shape.value_size}, q.options());
  at::Tensor out = heads_of(columns, 0, shape.heads, shape.value_size);
  at::Tensor log_sums = at::empty({shape.batch, shape.heads, shape.length, 1}, q.options());
  Scratch keys_t{shape.size, shape.length}, values{shape.length, shape.value_size};
  Scratch block{BLOCK, shape.size}, weights{BLOCK, shape.length}, mixture{BLOCK, shape.value_size};

  void begin(int64_t b, int64_t g) {
    copy_transposed(Head(k, b, g), shape.length, keys_t);
    copy_rows(Head(v, b, g), 0, shape.length, 1.0f, values);
  }

  void run(int64_t b, int64_t h, int64_t first, int64_t count) {
    const int64_t visible = first + count, vectors = round_up(visible, LANES) / LANES;
    const Head to(out, b, h), log_sum(log_sums, b, h);
    float sums[BLOCK];
    copy_rows(Head(q, b, h), first, count, shape.scale, block);
    multiply(plain(block), keys_t, count, shape.size, visible, weights);
    for (int64_t r = 0; r < count; ++r) {
      float* row = mask_row(weights, r, first + r + 1, visible);
      const float top = max_of(row, vectors);
      sums[r] = exp_row(row, vectors, top);
      *log_sum.row(first + r) = top + std::log(sums[r]);
    }
    multiply(plain(weights), values, count, visible, shape.value_size, mixture);
    for (int64_t r = 0; r < count; ++r)
      copy_scaled(mixture.row(r), shape.value_size, 1.0f / sums[r], to.row(first + r));
  }

  void end(int64_t, int64_t) {}
};

struct Backward {
  const AttentionShape& shape;
  const at::Tensor &grad, &q, &k, &v, &out, &log_sums;
  const int64_t first_key = shape.heads * shape.size, first_value = first_key + shape.kv_heads * shape.size;
  const int64_t width = first_value + shape.kv_heads * shape.value_size;
  at::Tensor columns =
      at::empty({shape.batch, shape.length, width}, q.options());  // of q, k and v side by side, as the input may be
  at::Tensor grad_q = heads_of(columns, 0, shape.heads, shape.size);
  at::Tensor grad_k = heads_of(columns, first_key, shape.kv_heads, shape.size);
  at::Tensor grad_v = heads_of(columns, first_value, shape.kv_heads, shape.value_size);
  Scratch keys{shape.length, shape.size}, keys_t{shape.size, shape.length};
  Scratch values_t{shape.value_size, shape.length};
  Scratch block{BLOCK, shape.size}, grads{BLOCK, shape.value_size}, weights{BLOCK, shape.length};
  Scratch score_grads{BLOCK, shape.length}, query_grads{BLOCK, shape.size};
  Scratch key_grads{shape.length, shape.size}, value_grads{shape.length, shape.value_size};

  void begin(int64_t b, int64_t g) {
    copy_rows(Head(k, b, g), 0, shape.length, 1.0f, keys);
    copy_transposed(Head(k, b, g), shape.length, keys_t);
    copy_transposed(Head(v, b, g), shape.length, values_t);
    key_grads.clear();
    value_grads.clear();
  }

  void run(int64_t b, int64_t h, int64_t first, int64_t count) {
    const int64_t visible = first + count, vectors = round_up(visible, LANES) / LANES;
    const Head to(grad_q, b, h), result(out, b, h), log_sum(log_sums, b, h);
    copy_rows(Head(q, b, h), first, count, shape.scale, block);
    copy_rows(Head(grad, b, h), first, count, 1.0f, grads);
    result.fetch(first, count);
    multiply(plain(block), keys_t, count, shape.size, visible, weights);
    multiply(plain(grads), values_t, count, shape.value_size, visible, score_grads);
    for (int64_t r = 0; r < count; ++r) {
      const float mean = dot(grads.row(r), result.row(first + r), shape.value_size);
      float *weight = mask_row(weights, r, first + r + 1, visible), *score_grad = score_grads.row(r);
      exp_row(weight, vectors, *log_sum.row(first + r));
      for (int64_t i = 0; i < vectors * LANES; ++i) score_grad[i] = weight[i] * (score_grad[i] - mean);
    }
    multiply(plain(score_grads), keys, count, visible, shape.size, query_grads);
    multiply<true>(transposed(score_grads), block, visible, count, shape.size, key_grads);
    multiply<true>(transposed(weights), grads, visible, count, shape.value_size, value_grads);
    for (int64_t r = 0; r < count; ++r) copy_scaled(query_grads.row(r), shape.size, shape.scale, to.row(first + r));
  }

  void end(int64_t b, int64_t g) {
    const Head to_keys(grad_k, b, g), to_values(grad_v, b, g);
    for (int64_t n = 0; n < shape.length; ++n) {
      copy_scaled(key_grads.row(n), shape.size, 1.0f, to_keys.row(n));
      copy_scaled(value_grads.row(n), shape.value_size, 1.0f, to_values.row(n));
    }
  }
};

// -- the operators ----------------------------------------------------------------------------------------------------

// q (B, H, T, K), k (B, G, T, K), v (B, G, T, V) -> the output (B, H, T, V), and the log of each row's sum (B, H, T,
// 1).
std::tuple<at::Tensor, at::Tensor> attend_causal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                 double scale) {
  const AttentionShape shape(q, k, v, scale);
  const Forward worker{shape, q, k, v};
  shape.run(worker);
  return {worker.out, worker.log_sums};
}

// The gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_causal_backward(const at::Tensor& output_grad,
                                                                      const at::Tensor& q, const at::Tensor& k,
                                                                      const at::Tensor& v, const at::Tensor& out,
                                                                      const at::Tensor& log_sums, double scale) {
  const AttentionShape shape(q, k, v, scale);
  const int64_t B = shape.batch, H = shape.heads, T = shape.length, V = shape.value_size;
  check_dtype("grad", output_grad, at::kFloat), check_shape("grad", output_grad, {B, H, T, V});
  check_heads("out", out, {B, H, T, V}), check_heads("log_sums", log_sums, {B, H, T, 1});
  const at::Tensor grad = output_grad.stride(3) == 1 ? output_grad : output_grad.contiguous();
  const Backward worker{shape, grad, q, k, v, out, log_sums};
  shape.run(worker);
  return {worker.grad_q, worker.grad_k, worker.grad_v};
}

}  // namespace causal
}  // namespace
