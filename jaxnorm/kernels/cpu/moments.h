// Means and variances, or sums of squared deviations, of rows and of columns.
//
// Values are read once, shifted by a first guess at the mean: mean = guess + mean(u), sum of squares = sum(u**2) - n
// mean(u)**2. Where the guess was so far off that digits would be lost, they are read a second time, shifted by that
// mean.
#pragma once

#include <cmath>

#include "dtypes.h"
#include "sums.h"

namespace {  // of one source alone, so that compilers inline more: up to 15 % of the time of gradients

// Beside x a cotangent dy(row, column): in the same pass the sums of dy (x - mean) and of dy are found.
template <typename Cotangent>
struct GradientSums {
  Cotangent dy;
  double *dy_u, *dy_sum;
};
template <typename Cotangent>
GradientSums(Cotangent, double*, double*) -> GradientSums<Cotangent>;

// Mean and sum of squared deviations of x(row, column) for each column, in double: of values of any size.
template <typename Value, typename... Cotangent>
void column_moments_in_double(const Rows& rows, int64_t columns, bool centered, double* mean, double* square, Value x,
                              const GradientSums<Cotangent>&... gradient) {
  for (double* sum : {mean, square, gradient.dy_u..., gradient.dy_sum...}) std::fill(sum, sum + columns, 0.0);
  for (const Run& run : rows)
    for (int64_t r = run.first; centered && r < run.end; ++r)
      for (int64_t j = 0; j < columns; ++j) mean[j] += x(r, j);
  for (int64_t j = 0; j < columns; ++j) mean[j] /= rows.count;
  for (const Run& run : rows)
    for (int64_t r = run.first; r < run.end; ++r)
      for (int64_t j = 0; j < columns; ++j) {
        const double u = x(r, j) - mean[j];
        square[j] += u * u;
        ((gradient.dy_u[j] += gradient.dy(r, j) * u, gradient.dy_sum[j] += gradient.dy(r, j)), ...);
      }
}

// Whether float32 held the squares of `count` values, by their sum and that of the absolute values.
inline bool squares_held(double squares, double absolutes, int64_t count) {
  return (absolutes == 0) | ((absolutes > 1e-7 * count) & std::isfinite(squares));
}

// The same in float32, of up to kStrip columns. Returns whether all squares and products were within its range.
template <typename Value, typename... Cotangent>
bool column_moments(const Rows& rows, int64_t columns, bool centered, double* mean, double* square, Value x,
                    const GradientSums<Cotangent>&... gradient) {
  float guess[kStrip] = {};
  const int64_t first = rows.begin()->first,
                head = centered ? std::min<int64_t>(rows.begin()->end - first, kFloatRows) : 0;
  const float share = 1.0f / std::max<int64_t>(head, 1);
  for (int64_t r = first; r < first + head; ++r)
    for (int64_t j = 0; j < columns; ++j) guess[j] += x(r, j) * share;
  const double count = double(rows.count);
  int64_t far = 1, overflown = 0;  // how many columns: compilers vectorize no early exit
  for (int reading = 0; far && reading < 2; ++reading) {
    double sums[3 + 2 * sizeof...(Cotangent)][kStrip];
    column_sums(rows, columns, sums, [&](int64_t r, int64_t j, int64_t place, auto& partial) {
      const float value = x(r, j), u = value - guess[j];
      partial[0][place] += u;
      partial[1][place] += u * u;
      partial[2][place] += std::fabs(value);
      ((partial[3][place] += gradient.dy(r, j) * u, partial[4][place] += gradient.dy(r, j)), ...);
    });
    far = 0;
#pragma omp simd reduction(+ : far, overflown)
    for (int64_t j = 0; j < columns; ++j) {
      const double rest = centered ? sums[0][j] / count : 0, lost = count * rest * rest;
      far += lost > 0.75 * sums[1][j];
      overflown += !squares_held(sums[1][j], sums[2][j], rows.count);
      mean[j] = guess[j] + rest;
      square[j] = std::max(0.0, sums[1][j] - lost);
      ((gradient.dy_u[j] = sums[3][j] - rest * sums[4][j], gradient.dy_sum[j] = sums[4][j]), ...);
      ((overflown += !std::isfinite(gradient.dy_u[j])), ...);
      guess[j] = float(mean[j]);
    }
  }
  return overflown == 0;
}

// Mean and variance of a row of d elements, in double: of elements of any size.
template <bool centered, typename X>
void row_moments_in_double(const X* x, int64_t d, double* mean, double* var) {
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

// The mean of the first elements of a row: a guess at the mean of all.
template <typename X>
float mean_of_first(const X* x, int64_t d) {
  constexpr int64_t kHead = 8;
  float head[kHead] = {};
  if (d < kHead) {
    for (int64_t i = 0; i < d; ++i) head[0] += load(x[i]);
    return head[0] / d;
  }
#pragma omp simd
  for (int64_t i = 0; i < kHead; ++i) head[i] = load(x[i]);
  return pairwise_sum<kHead>(head) / kHead;
}

// Means and variances of up to kFloatRows neighbouring rows, in float32 where that holds the squares. Each step is for
// all of them, so that the sums of one need not wait for those of another.
template <bool centered, typename X>
void row_moments(const X* x, int64_t d, int64_t rows, double* mean, double* var) {
  float guess[kFloatRows] = {};
  double square[kFloatRows], rest[kFloatRows] = {};
  auto read = [&](int64_t row) {
    const X* from = x + row * d;
    const float shift = guess[row];
    double sums[1 + centered];
    row_sums(d, sums, [=](int64_t i, int64_t way, auto& partial) {
      const float u = load(from[i]) - shift;
      partial[0][way] += u * u;
      if (centered) partial[centered][way] += u;
    });
    square[row] = sums[0] / d;
    if (centered) rest[row] = sums[centered] / d;
  };
  auto is_held = [&](int64_t row) { return (square[row] > 1e-30) & (square[row] < 1e36); };
  auto is_far = [&](int64_t row) { return rest[row] * rest[row] > 0.5 * square[row]; };
  auto moments = [&](int64_t row) {
    mean[row] = guess[row] + rest[row];
    var[row] = std::max(0.0, square[row] - rest[row] * rest[row]);
  };
  for (int64_t row = 0; row < rows; ++row) {
    if (centered) guess[row] = mean_of_first(x + row * d, d);
    read(row);
  }
  int64_t repeated = 0;  // how many rows: compilers vectorize no early exit
#pragma omp simd reduction(+ : repeated)
  for (int64_t row = 0; row < rows; ++row) {
    moments(row);
    repeated += !is_held(row) | is_far(row);
  }
  for (int64_t row = 0; repeated && row < rows; ++row) {
    if (is_held(row) && !is_far(row)) continue;
    guess[row] = float(mean[row]);
    read(row);
    if (is_held(row)) moments(row);
    else row_moments_in_double<centered>(x + row * d, d, mean + row, var + row);
  }
}

}  // namespace
