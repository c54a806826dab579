// y = x W' + bias for many rows x and a W of 8 bits, in tiles of bytes.  As in simd.h, rows of x are quantized
// with one step a group, and the sums of a group are exact.  Weights are multiplied as they are stored: with x of 8 bits
// in one part, or with the high and with the low bytes of x of 16 bits, x = step (256 high + low).
#pragma once

#include <ATen/Parallel.h>

#include <vector>

#include "linear/split_products.h"

#if MONOBLOCK_TILES

namespace {
namespace integer_tiles {

constexpr int64_t AHEAD = 2;        // what a tile stores can be read only some hundred cycles, or two groups, later
constexpr int64_t BLOCK_TILES = 4;  // tiles of weights that stay in the cache for all rows of x

// x (batch, columns) in tiles of 16 rows, with a step for each row in every group.
template <int PARTS>
struct ByteRows {
  static constexpr int LIMIT = PARTS == 1 ? LIMIT_8_BITS : LIMIT_16_BITS;
  int64_t tiles, columns, groups, inputs;  // inputs of one product: 64, or 32 where a group is no multiple of it
  Vectors<CacheLine> bytes;                // (tiles, columns / inputs, PARTS, inputs / 4)
  Vectors<CacheLine> steps;                // (tiles, groups)

  ByteRows(const MatvecInput& in)
      : tiles((in.batch + TILE - 1) / TILE), columns(in.columns), groups(in.groups), inputs(in.group % 64 ? 32 : 64) {
    bytes.resize(tiles * columns * PARTS / 4), steps.resize(tiles * groups);
    at::parallel_for(0, tiles * groups, 8, [&](int64_t begin, int64_t end) {
      std::vector<int16_t> integers(TILE * in.group);
      for (int64_t n = begin; n < end; ++n) {
        const int64_t tile = n / groups, g = n % groups;
        float* row_steps = reinterpret_cast<float*>(steps.at(n));
        for (int64_t r = 0; r < TILE; ++r) {
          const int64_t b = tile * TILE + r;
          int16_t* to = integers.data() + r * in.group;
          row_steps[r] = 0;
          if (b < in.batch)
            quantize_row(in.x + b * in.stride + g * in.group, 1, in.group, to, row_steps + r, LIMIT);
          else
            std::fill_n(to, in.group, int16_t(0));
        }
        pack_group(integers.data(), in.group, bytes.at(n * in.group * PARTS / 4));
      }
    });
  }

 private:
  // One group of 16 rows (16, group).
  void pack_group(const int16_t* integers, int64_t group, CacheLine* to) const {
    alignas(64) int8_t parts[TILE][128];  // the bytes of `inputs` numbers, or first the high and then the low ones
    Floats square[TILE];
    for (int64_t c = 0; c < group; c += inputs) {
      for (int64_t r = 0; r < TILE; ++r)
        for (int64_t i = 0; i < inputs; i += 32) {
          const __m512i v = load<__m512i>(integers + r * group + c + i);
          const __m256i high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(v, 8)), low = _mm512_cvtepi16_epi8(v);
          if (PARTS == 2) std::memcpy(parts[r] + i, &high, 32);
          std::memcpy(parts[r] + (PARTS - 1) * inputs + i, &low, 32);
        }
      for (int64_t at = 0; at < PARTS * inputs; at += 64) {
        const int64_t lines = std::min(TILE, (PARTS * inputs - at) / 4);  // half a tile for 32 inputs in one part
        UNROLL for (int r = 0; r < TILE; ++r) square[r] = load<Floats>(parts[r] + at);
        transpose_square(square);
        std::memcpy(to, square, lines * sizeof(CacheLine)), to += lines;
      }
    }
  }
};

// 16 rows of a weight: where they lie, and their scales (groups, 16) in fp32.
struct WeightTile {
  const int8_t* from;
  std::vector<float> scales, scratch;
  std::vector<int8_t> copy;  // of the last rows of a matrix, filled up with zeros

  void read(const Int8Format& format, int64_t row, int64_t count) {
    from = format.weight + row * format.columns;
    if (count < TILE) {
      copy.assign(TILE * format.columns, 0);
      std::memcpy(copy.data(), from, count * format.columns), from = copy.data();
    }
    scratch.resize(TILE * format.groups), scales.resize(TILE * format.groups);
    bf16_to_fp32(format.scale(row), count * format.groups, scratch.data());
    panels::transpose(scratch.data(), TILE, format.groups, format.groups, scales.data(), TILE);
  }
};

// The integer sums of one group: 16 rows of the weight with 16 rows of x, for each part.
template <int PARTS>
inline void sum_group(const int8_t* a, int64_t columns, const CacheLine* b, int64_t group, int64_t inputs,
                      int32_t (&to)[PARTS][TILE * TILE]) {
  _tile_zero(0);
  if constexpr (PARTS == 2) _tile_zero(1);
  for (int64_t c = 0; c < group; c += inputs, a += inputs, b += PARTS * inputs / 4) {
    _tile_loadd(4, a, columns);
    _tile_loadd(6, b, 64);
    _tile_dpbssd(0, 4, 6);
    if constexpr (PARTS == 2) {
      _tile_loadd(7, b + inputs / 4, 64);
      _tile_dpbsud(1, 4, 7);
    }
  }
  _tile_stored(0, to[0], 64);
  if constexpr (PARTS == 2) _tile_stored(1, to[1], 64);
}

// 16 rows of the weight with 16 rows of x -> (16 weight rows, 16 rows of x).
template <int PARTS>
inline void multiply_tile(const WeightTile& weight, const ByteRows<PARTS>& x, int64_t tile, Fetch& fetch, Floats* out) {
  constexpr int64_t buffers = 2 * AHEAD;
  alignas(64) int32_t sums[buffers][PARTS][TILE * TILE];
  const int64_t group = x.columns / x.groups;
  const CacheLine *bytes = x.bytes.at(tile * x.columns * PARTS / 4), *steps = x.steps.at(tile * x.groups);
  Floats total[TILE];
  UNROLL for (int r = 0; r < TILE; ++r) total[r] = Floats{};
  for (int64_t next = 0; next < x.groups + AHEAD; ++next) {
    if (next < x.groups)
      sum_group<PARTS>(weight.from + next * group, x.columns, bytes + next * group * PARTS / 4, group, x.inputs,
                       sums[next % buffers]);
    if (next < AHEAD) continue;
    fetch.fetch();
    const int64_t g = next - AHEAD;
    const auto& from = sums[g % buffers];
    const float* scales = weight.scales.data() + g * TILE;
    const Floats step = load<Floats>(reinterpret_cast<const float*>(steps + g));
    UNROLL for (int r = 0; r < TILE; ++r) {
      Ints v = load<Ints>(from[0] + r * TILE);
      if constexpr (PARTS == 2) v = (v << 8) + load<Ints>(from[1] + r * TILE);
      total[r] += to_floats(v) * step * scales[r];
    }
  }
  UNROLL for (int r = 0; r < TILE; ++r) out[r] = total[r];
}

template <int PARTS>
void multiply(const Int8Format& format, const MatvecInput& in, int64_t rows, const float* bias, float* y) {
  const ByteRows<PARTS> x(in);
  const int64_t tiles = (rows + TILE - 1) / TILE, blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    const TileScope scope(int(x.inputs));
    WeightTile weights[BLOCK_TILES];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * BLOCK_TILES, count = std::min(BLOCK_TILES, tiles - first);
      for (int64_t n = 0; n < count; ++n)
        weights[n].read(format, (first + n) * TILE, std::min(TILE, rows - (first + n) * TILE));
      finish_writes();
      const int64_t next = (first + count) * TILE, next_rows = std::max<int64_t>(0, std::min(64L, rows - next));
      const int64_t lines = next_rows * format.columns / 64;
      Fetch fetch{reinterpret_cast<const char*>(format.weight + next * format.columns), lines,
                  lines / (x.tiles * count * x.groups) + 1};
      for (int64_t tile = 0; tile < x.tiles; ++tile)
        for (int64_t n = 0; n < count; ++n) {
          const int64_t row = (first + n) * TILE, live = std::min(TILE, rows - row);
          Floats total[TILE];
          multiply_tile(weights[n], x, tile, fetch, total);
          transpose_square(total);
          const Floats added = bias ? split::load_masked(bias + row, live) : Floats{};
          for (int64_t b = 0; b < std::min(TILE, in.batch - tile * TILE); ++b)
            split::store_masked(y + (tile * TILE + b) * rows + row, total[b] + added, live);
        }
    }
  });
}

}  // namespace integer_tiles
}  // namespace

#endif
