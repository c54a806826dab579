// y = x W' + bias for many rows x and a W of 8 bits, in tiles of bytes.  As in integer_dot.h, rows of x are quantized to
// 16 bits with one step a group, x = step (256 high + low), and the sums of a group are exact.  Weights are multiplied
// as they are stored, with the high and with the low bytes of x.
#pragma once

#include <ATen/Parallel.h>

#include <vector>

#include "linear/split_numbers.h"

#if MONOBLOCK_TILES

namespace {
namespace integer_tiles {

constexpr int64_t AHEAD = 2;        // what a tile stores can be read only some hundred cycles, or two groups, later
constexpr int64_t BLOCK_TILES = 4;  // tiles of weights that stay in the cache for all rows of x

// x (batch, columns) in tiles of 16 rows, with a step for each row in every group.
struct ByteRows {
  int64_t tiles, columns, groups, inputs;  // inputs of one product: 64, or 32 where a group is no multiple of it
  std::unique_ptr<CacheLine[]> bytes;      // (tiles, columns / inputs, high and low, inputs / 4)
  std::unique_ptr<CacheLine[]> steps;      // (tiles, groups)

  ByteRows(const MatvecInput& in)
      : tiles((in.batch + TILE - 1) / TILE), columns(in.columns), groups(in.groups), inputs(in.group % 64 ? 32 : 64),
        bytes(new CacheLine[tiles * columns / 2]), steps(new CacheLine[tiles * groups]) {
    at::parallel_for(0, tiles * groups, 8, [&](int64_t begin, int64_t end) {
      std::vector<int16_t> integers(TILE * in.group);
      for (int64_t n = begin; n < end; ++n) {
        const int64_t tile = n / groups, g = n % groups;
        float* row_steps = reinterpret_cast<float*>(&steps[n]);
        for (int64_t r = 0; r < TILE; ++r) {
          const int64_t b = tile * TILE + r;
          int16_t* to = integers.data() + r * in.group;
          row_steps[r] = 0;
          if (b < in.batch)
            quantize_row(in.x + b * in.stride + g * in.group, 1, in.group, to, row_steps + r);
          else
            std::fill_n(to, in.group, int16_t(0));
        }
        pack_group(integers.data(), in.group, &bytes[n * in.group / 2]);
      }
    });
  }

 private:
  // One group of 16 rows (16, group).
  void pack_group(const int16_t* integers, int64_t group, CacheLine* to) const {
    alignas(64) int8_t halves[TILE][128];  // high, then low bytes of `inputs` numbers
    Floats square[TILE];
    for (int64_t c = 0; c < group; c += inputs) {
      for (int64_t r = 0; r < TILE; ++r)
        for (int64_t i = 0; i < inputs; i += 32) {
          const __m512i v = load<__m512i>(integers + r * group + c + i);
          const __m256i high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(v, 8)), low = _mm512_cvtepi16_epi8(v);
          std::memcpy(halves[r] + i, &high, 32), std::memcpy(halves[r] + inputs + i, &low, 32);
        }
      for (int64_t part = 0; part < 2 * inputs; part += 64, to += TILE) {
        UNROLL for (int r = 0; r < TILE; ++r) square[r] = load<Floats>(halves[r] + part);
        panels::transpose_square(square);
        std::memcpy(to, square, sizeof square);
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

// The integer sums of one group: 16 rows of the weight with 16 rows of x.
inline void sum_group(const int8_t* a, int64_t columns, const CacheLine* b, int64_t group, int64_t inputs,
                      int32_t (&to)[2][TILE * TILE]) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t c = 0; c < group; c += inputs, a += inputs, b += inputs / 2) {
    _tile_loadd(4, a, columns);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + inputs / 4, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
  }
  _tile_stored(0, to[0], 64);
  _tile_stored(1, to[1], 64);
}

// 16 rows of the weight with 16 rows of x -> (16 weight rows, 16 rows of x).
inline void multiply_tile(const WeightTile& weight, const ByteRows& x, int64_t tile, Fetch& fetch, Floats* out) {
  constexpr int64_t buffers = 2 * AHEAD;
  alignas(64) int32_t sums[buffers][2][TILE * TILE];
  const int64_t group = x.columns / x.groups;
  const CacheLine *bytes = &x.bytes[tile * x.columns / 2], *steps = &x.steps[tile * x.groups];
  Floats total[TILE];
  UNROLL for (int r = 0; r < TILE; ++r) total[r] = Floats{};
  for (int64_t next = 0; next < x.groups + AHEAD; ++next) {
    if (next < x.groups)
      sum_group(weight.from + next * group, x.columns, bytes + next * group / 2, group, x.inputs, sums[next % buffers]);
    if (next < AHEAD) continue;
    fetch.fetch();
    const int64_t g = next - AHEAD;
    const auto& from = sums[g % buffers];
    const float* scales = weight.scales.data() + g * TILE;
    const Floats step = load<Floats>(reinterpret_cast<const float*>(steps + g));
    UNROLL for (int r = 0; r < TILE; ++r) {
      const Ints v = (load<Ints>(from[0] + r * TILE) << 8) + load<Ints>(from[1] + r * TILE);
      total[r] += to_floats(v) * step * scales[r];
    }
  }
  UNROLL for (int r = 0; r < TILE; ++r) out[r] = total[r];
}

inline void multiply(const Int8Format& format, const MatvecInput& in, int64_t rows, const float* bias, float* y) {
  const ByteRows x(in);
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
          panels::transpose_square(total);
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
