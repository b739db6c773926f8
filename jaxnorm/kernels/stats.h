// Means and sums of squared deviations.
#pragma once

#include <cmath>

#include "neighbours.h"
#include "numbers.h"
#include "sums.h"

// Whether float32 held the squares of so many numbers, by their sum and that of the sizes.
inline bool held(double squares, double sizes, int64_t count) {
  return (sizes == 0) | ((sizes > 1e-7 * count) & std::isfinite(squares));
}

// Cotangents ct(row, channel) beside values: for each channel the sums of ct (value - mean) and of ct are found with the others.
template <typename Cotangent>
struct Beside {
  Cotangent ct;
  double *product, *alone;
};
template <typename Cotangent>
Beside(Cotangent, double*, double*) -> Beside<Cotangent>;

// Of value(row, channel) over rows, whatever its size.
template <typename Value, typename... Cotangent>
void stats_in_double(int64_t rows, int64_t width, bool centered, double* mean, double* square, Value value,
                     const Beside<Cotangent>&... beside) {
  for (double* sum : {mean, square, beside.product..., beside.alone...}) std::fill(sum, sum + width, 0.0);
  for (int64_t r = 0; centered && r < rows; ++r)
    for (int64_t j = 0; j < width; ++j) mean[j] += value(r, j);
  for (int64_t j = 0; j < width; ++j) mean[j] /= rows;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < width; ++j) {
      const double u = value(r, j) - mean[j];
      square[j] += u * u;
      ((beside.product[j] += beside.ct(r, j) * u, beside.alone[j] += beside.ct(r, j)), ...);
    }
}

// The same: read once, looked at from the mean of the first of them, and a second time, from the mean,
// where that is so far that digits would be lost. Returns whether all squares and products were held.
template <typename Value, typename... Cotangent>
bool strip_stats(int64_t rows, int64_t width, bool centered, double* mean, double* square, Value value,
                 const Beside<Cotangent>&... beside) {
  float center[kStrip] = {};
  const int64_t head = centered ? std::min(rows, kRows) : 0;
  const float share = 1.0f / std::max<int64_t>(head, 1);
  for (int64_t r = 0; r < head; ++r)
    for (int64_t j = 0; j < width; ++j) center[j] += value(r, j) * share;
  int64_t far = 1, unheld = 0;  // how many channels: of numbers, compilers make vectors
  for (int reading = 0; far && reading < 2; ++reading) {
    double sums[3 + 2 * sizeof...(Cotangent)][kStrip];
    sum_rows(rows, width, sums, [&](int64_t r, int64_t j, int64_t place, auto& few) {
      const float v = value(r, j), u = v - center[j];
      few[0][place] += u;
      few[1][place] += u * u;
      few[2][place] += std::fabs(v);
      ((few[3][place] += beside.ct(r, j) * u, few[4][place] += beside.ct(r, j)), ...);
    });
    far = 0;
#pragma omp simd reduction(+ : far, unheld)
    for (int64_t j = 0; j < width; ++j) {
      const double rest = centered ? sums[0][j] / rows : 0, lost = rows * rest * rest;
      far += lost > 0.75 * sums[1][j];
      unheld += !held(sums[1][j], sums[2][j], rows);
      mean[j] = center[j] + rest;
      square[j] = std::max(0.0, sums[1][j] - lost);
      ((beside.product[j] = sums[3][j] - rest * sums[4][j], beside.alone[j] = sums[4][j]), ...);
      ((unheld += !std::isfinite(beside.product[j])), ...);
      center[j] = float(mean[j]);
    }
  }
  return unheld == 0;
}

// The mean of d neighbouring numbers, and that of their squared deviations, whatever their size.
template <bool centered, typename X>
void row_in_double(const X* x, int64_t d, double* mean, double* var) {
  double sum = 0, square = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < d; ++i) sum += load(x[i]);
  *mean = centered ? sum / d : 0;
#pragma omp simd reduction(+ : square)
  for (int64_t i = 0; i < d; ++i) {
    const double u = load(x[i]) - *mean;
    square += u * u;
  }
  *var = square / d;
}

// The same: read once, or twice, as by strip_stats, where float32 holds the squares.
template <bool centered, typename X>
void row_stats(const X* x, int64_t d, double* mean, double* var) {
  float center = 0;
  const int64_t head = centered ? std::min<int64_t>(d, 8) : 0;
  for (int64_t i = 0; i < head; ++i) center += load(x[i]);
  if (centered) center /= head;
  bool far = true;
  for (int reading = 0; far && reading < 2; ++reading) {
    double sums[1 + centered];
    sum_row(d, sums, [&](int64_t i, int64_t way, auto& few) {
      const float u = load(x[i]) - center;
      few[0][way] += u * u;
      if (centered) few[centered][way] += u;
    });
    const double square = sums[0] / d, rest = centered ? sums[centered] / d : 0, lost = rest * rest;
    if (!(square > 1e-30 && square < 1e36)) return row_in_double<centered>(x, d, mean, var);
    far = lost > 0.5 * square;
    *mean = center + rest;
    *var = std::max(0.0, square - lost);
    center = float(*mean);
  }
}
