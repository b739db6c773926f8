// Sums over rows, for some neighbouring channels at a time whose sums stay in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

constexpr int64_t kStrip = 512;  // channels at a time, at most, that a thread takes through all rows: many, to read neighbours
constexpr int64_t kTile = 64;    // channels at a time, at most, through some
constexpr int64_t kRows = 16;    // rows that are added in float32, before they are added to a sum in double

// Calls run(first channel, channels) for all of c channels; but of the last the compiler knows how many they are.
template <typename Run>
void over_tiles(int64_t c, Run run) {
  int64_t first = 0;
  for (; first + kTile <= c; first += kTile) run(first, std::integral_constant<int64_t, kTile>{});
  for (; first + 16 <= c; first += 16) run(first, std::integral_constant<int64_t, 16>{});
  if (first < c) run(first, c - first);
}

// The sums over rows of `count` numbers for each channel: add(row, channel, place, few) adds those of a row to few[k][place].
template <int count, typename Add>
void sum_rows(int64_t rows, int64_t width, double (&sums)[count][kStrip], Add add) {
  for (auto& of : sums) std::fill(of, of + width, 0.0);
  for (int64_t start = 0; start < rows; start += kRows) {
    const int64_t end = std::min(rows, start + kRows);
    over_tiles(width, [&](int64_t first, auto channels) {
      float few[count][kTile] = {};
      for (int64_t row = start; row < end; ++row)
#pragma omp simd
        for (int64_t j = 0; j < channels; ++j) add(row, first + j, j, few);
      for (int k = 0; k < count; ++k)
        for (int64_t j = 0; j < channels; ++j) sums[k][first + j] += few[k][j];
    });
  }
}
