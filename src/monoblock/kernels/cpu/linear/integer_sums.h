// The sums of integer_panels.h: one group of a tile of weights (group / CHUNK, TILE_ROWS, CHUNK) with V vectors of x.
#pragma once

#include "linear/integer_elements.h"
#include "linear/panel.h"
#include "linear/tiles.h"

namespace {
namespace integer_panels {

using panels::TILE_ROWS;

#if MONOBLOCK_NEON_DOT

// Four inputs of V vectors, one row in each 32-bit lane, with number `LANE` of the four inputs in each weight.
template <int LANE, int V>
inline void add_inputs(const int8_t* weight, const Ints* x, Ints (&sums)[TILE_ROWS][V]) {
  int8x16_t rows[V];
  UNROLL for (int v = 0; v < V; ++v) rows[v] = vreinterpretq_s8_s32(x[v]);
  UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
    const int8x16_t w = vld1q_s8(weight + r * CHUNK);
    UNROLL for (int v = 0; v < V; ++v) sums[r][v] = vdotq_laneq_s32(sums[r][v], rows[v], w, LANE);
  }
}

template <class Elements, int V>
inline void sum_group(const int8_t* weight, const Ints* x, int64_t chunks, Fetch& fetch, Ints (&sums)[TILE_ROWS][V]) {
  for (int64_t c = 0; c < chunks; ++c, weight += TILE_ROWS * CHUNK) {
    fetch.fetch();
    UNROLL for (int half = 0; half < 2; ++half, x += 4 * V) {
      const int8_t* w = weight + half * CHUNK / 2;
      add_inputs<0, V>(w, x, sums), add_inputs<1, V>(w, x + V, sums);
      add_inputs<2, V>(w, x + 2 * V, sums), add_inputs<3, V>(w, x + 3 * V, sums);
    }
  }
}

#else

template <class Elements, int V>
inline void sum_group(const typename Elements::Weight* weight, const Ints* x, int64_t chunks, Fetch& fetch,
                      Ints (&sums)[TILE_ROWS][V]) {
  constexpr int64_t steps = CHUNK / Elements::INPUTS;
  for (int64_t c = 0; c < chunks; ++c, weight += TILE_ROWS * CHUNK, x += steps * V) {
    fetch.fetch();
    UNROLL for (int64_t p = 0; p < steps; ++p) {
      Ints rows[V];
      UNROLL for (int v = 0; v < V; ++v) rows[v] = x[p * V + v];
      UNROLL for (int r = 0; r < TILE_ROWS; ++r) {
        int32_t inputs;
        std::memcpy(&inputs, weight + r * CHUNK + p * Elements::INPUTS, sizeof inputs);
        const Ints w = Ints{} + inputs;
        UNROLL for (int v = 0; v < V; ++v) sums[r][v] = Elements::add_products(sums[r][v], w, rows[v]);
      }
    }
  }
}

#endif

}  // namespace integer_panels
}  // namespace
