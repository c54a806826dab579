// Matrix tiles of the processor (AMX): 16 rows of 64 bytes; one instruction adds the product of two to a third, 16 x 16
// sums over 32 bfloat16 or 64 bytes each.
//
// A has a row in each tile row; B has a column in each 32-bit lane, with two bfloat16 or four bytes in every tile row.
// Linux grants tiles to a process that asks for them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "simd.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__linux__)
#define MONOBLOCK_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define MONOBLOCK_TILES 0
#endif

namespace {

constexpr int64_t TILE = 16;        // rows of a tile, and sums in a row
constexpr int64_t TILE_INPUTS = 32; // numbers that one product adds up

// Memory for tiles: a row that crosses a cache line would take two reads.
struct alignas(64) CacheLine {
  char bytes[64];
};

// Memory for vectors or cache lines that is kept until more is needed, and not set to anything.
template <class Vector>
class Vectors {
 public:
  Vector* at(int64_t index) const { return reinterpret_cast<Vector*>(memory.get()) + index; }
  Vector* resize(int64_t count) {
    const int64_t lines = (count * int64_t(sizeof(Vector)) + 63) / 64;
    if (lines > size) memory.reset(new CacheLine[lines]), size = lines;
    return at(0);
  }

 private:
  std::unique_ptr<CacheLine[]> memory;
  int64_t size = 0;
};

// Cache lines that will be read soon, a few at a time.
struct Fetch {
  const char* next = nullptr;
  int64_t lines = 0, each = 0;
  void fetch() {
    for (int64_t n = std::min(each, lines); n > 0; --n, --lines, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

#if MONOBLOCK_TILES

// Whether this process may use tiles.  MONOBLOCK_NO_TILES=1 in the environment forbids it, for tests of the other paths.
inline bool can_use_tiles() {
  constexpr int request_permission = 0x1023, tile_data = 18;  // of arch_prctl
  static const bool is_granted =
      !std::getenv("MONOBLOCK_NO_TILES") && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return is_granted;
}

// The eight tiles of this thread while it lives: sums in 0 to 3, A in 4 and 5 with so many bytes in a row, B in 6 and 7.
class TileScope {
 public:
  explicit TileScope(int bytes = 64) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    config.row_bytes[4] = config.row_bytes[5] = bytes, config.rows[6] = config.rows[7] = bytes / 4;
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// Write the sums of the tiles 0 to 3.
inline void store_sum_tiles(Floats (*sums)[TILE]) {
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

// Before tiles are loaded from memory that was just written: the intrinsics do not tell the compiler that they read it.
inline void finish_writes() { asm volatile("" ::: "memory"); }

#else

inline bool can_use_tiles() { return false; }

#endif

}  // namespace
