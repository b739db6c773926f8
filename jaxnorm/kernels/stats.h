// Means and sums of squared deviations.
#pragma once

#include <cmath>

#include "numbers.h"
#include "sums.h"

// Whether float32 held the squares of so many numbers, by their sum and that of the sizes.
inline bool held(double squares, double sizes, int64_t count) {
  return sizes == 0 || (sizes > 1e-7 * count && std::isfinite(squares));
}

// Of each channel over rows of x, c numbers long, whatever their size.
template <typename X>
void stats_in_double(const X* x, int64_t rows, int64_t c, bool centered, double* mean, double* square) {
  std::fill(mean, mean + c, 0.0);
  std::fill(square, square + c, 0.0);
  for (int64_t r = 0; centered && r < rows; ++r)
    for (int64_t j = 0; j < c; ++j) mean[j] += load(x[r * c + j]);
  for (int64_t j = 0; j < c; ++j) mean[j] /= rows;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < c; ++j) {
      const double u = load(x[r * c + j]) - mean[j];
      square[j] += u * u;
    }
}

// Of value(row, channel) over rows: read once, looked at from the mean of the first of them, and a second time, from the mean,
// where that is so far that digits would be lost. Returns whether all squares were held.
template <typename Value>
bool strip_stats(int64_t rows, int64_t width, bool centered, double* mean, double* square, Value value) {
  float center[kStrip] = {};
  const int64_t head = centered ? std::min(rows, kRows) : 0;
  for (int64_t r = 0; r < head; ++r)
    for (int64_t j = 0; j < width; ++j) center[j] += value(r, j) / head;
  bool far = true, all = true;
  for (int reading = 0; far && reading < 2; ++reading) {
    double sums[3][kStrip];
    sum_rows(rows, width, sums, [&](int64_t r, int64_t j, int64_t place, auto& few) {
      const float v = value(r, j), u = v - center[j];
      few[0][place] += u;
      few[1][place] += u * u;
      few[2][place] += std::fabs(v);
    });
    far = false;
    for (int64_t j = 0; j < width; ++j) {
      const double rest = centered ? sums[0][j] / rows : 0, lost = rows * rest * rest;
      far |= lost > 0.75 * sums[1][j];
      all &= held(sums[1][j], sums[2][j], rows);
      mean[j] = center[j] + rest;
      square[j] = std::max(0.0, sums[1][j] - lost);
      center[j] = float(mean[j]);
    }
  }
  return all;
}
