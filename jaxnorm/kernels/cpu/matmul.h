// Products with a matrix that lies in panels of 32 columns, (columns / 32, rows, 32), the last filled up with zeros.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

constexpr int64_t kPanel = 32;  // columns, PANEL in Python
constexpr int64_t kPrefetch =
    512;  // elements: how far before its use the matrix is prefetched, which seldom is in the nearest cache
#ifdef __AVX512F__
constexpr int kLanes = 16, kTileRows = 12;
#else
constexpr int kLanes = 8, kTileRows = 6;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

// One panel of the product of a few rows, whose sums stay in registers.
template <int rows>
void multiply_tile(int64_t depth, const float* a, int64_t a_stride, const float* kernel, float* c, int64_t c_stride) {
  for (int64_t column = 0; column < kPanel; column += 2 * kLanes) {
    Lanes sums[rows][2] = {};
    const float* from = kernel + column;
    for (int64_t k = 0; k < depth; ++k, from += kPanel) {
      __builtin_prefetch(from + kPrefetch);
      __builtin_prefetch(from + kPrefetch + kLanes);
      const Lanes left = *(const Lanes*)from, right = *(const Lanes*)(from + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const float value = a[r * a_stride + k];
        sums[r][0] += value * left;
        sums[r][1] += value * right;
      }
    }
    for (int r = 0; r < rows; ++r) {
      *(Lanes*)(c + r * c_stride + column) = sums[r][0];
      *(Lanes*)(c + r * c_stride + column + kLanes) = sums[r][1];
    }
  }
}

template <int... fewer>
constexpr auto make_tiles(std::integer_sequence<int, fewer...>) {
  return std::array{multiply_tile<fewer + 1>...};
}
constexpr auto kTiles = make_tiles(std::make_integer_sequence<int, kTileRows>());  // of 1, 2, ... rows

// c[rows, panels * 32] = a[rows, depth] @ kernel, in as few tiles as can be, of nearly equal size.
inline void multiply(int64_t rows, int64_t depth, int64_t panels, const float* a, int64_t a_stride, const float* kernel,
                     float* c, int64_t c_stride) {
  const int64_t count = (rows + kTileRows - 1) / kTileRows;
  for (int64_t p = 0; p < panels; ++p, kernel += depth * kPanel, c += kPanel)
    for (int64_t t = 0; t < count; ++t) {
      const int64_t first = rows * t / count, size = rows * (t + 1) / count - first;
      kTiles[size - 1](depth, a + first * a_stride, a_stride, kernel, c + first * c_stride, c_stride);
    }
}
