// Products with a matrix in panels of 32 columns, (columns / 32, rows, 32), the last filled up with zeros (PANEL in Python).
#pragma once

#include <cstdint>

constexpr int64_t kPanel = 32;  // columns
#ifdef __AVX512F__
constexpr int kLanes = 16, kTile = 8;
#else
constexpr int kLanes = 8, kTile = 4;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

// One panel of the product of a few rows, whose sums stay in registers.
template <int rows>
void tile(int64_t depth, const float* a, int64_t a_stride, const float* kernel, float* c, int64_t c_stride) {
  for (int64_t column = 0; column < kPanel; column += 2 * kLanes) {
    Lanes sums[rows][2] = {};
    const float* from = kernel + column;
    for (int64_t k = 0; k < depth; ++k, from += kPanel) {
      const Lanes left = *(const Lanes*)from, right = *(const Lanes*)(from + kLanes);
#pragma GCC unroll 8
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

// c[rows, panels * 32] = a[rows, depth] @ kernel
inline void product(int64_t rows, int64_t depth, int64_t panels, const float* a, int64_t a_stride, const float* kernel, float* c,
                    int64_t c_stride) {
  for (int64_t p = 0; p < panels; ++p, kernel += depth * kPanel, c += kPanel) {
    int64_t r = 0;
    for (; r + kTile <= rows; r += kTile) tile<kTile>(depth, a + r * a_stride, a_stride, kernel, c + r * c_stride, c_stride);
    for (; r + 2 <= rows; r += 2) tile<2>(depth, a + r * a_stride, a_stride, kernel, c + r * c_stride, c_stride);
    for (; r < rows; ++r) tile<1>(depth, a + r * a_stride, a_stride, kernel, c + r * c_stride, c_stride);
  }
}
