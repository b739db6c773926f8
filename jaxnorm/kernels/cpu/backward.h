// The inputs and results of the gradients of a norm. With xhat = (u - low_mean) rstd and means over the group:
//
//   dx        = factor (rstd dy scale + intercept + (u - low_mean) spread)
//   intercept = dlow_mean / n - rstd mean(dy scale)
//   spread    = 2 dvar / n - rstd slope mean(dy scale xhat),    slope as in Rule
//   dscale    = sum(dy xhat),  dbias = sum(dy)
#pragma once

#include "statistics.h"

namespace {

// A value for each group, or one for all.
template <typename T>
struct PerGroup {
  const T* values;
  int64_t stride;  // 0 or 1: compilers make a loop for either case of a condition

  PerGroup(const Array<const T>& array, int64_t groups) : values(array.data), stride(array.size == groups) {}
  T operator[](int64_t group) const { return values[group * stride]; }
};

struct Backward {
  Shape shape;
  Mask mask;
  Rule rule;
  StatsOptions options;
  bool recompute;  // the statistics, instead of taking the residuals
  const float* scale;
  PerGroup<float> shift, low_mean, var, dlow_mean, dvar;
  PerGroup<int8_t> exponent;
  float *dscale, *dbias;

  GroupStats residuals(int64_t group) const { return {shift[group], low_mean[group], var[group], exponent[group]}; }
};

// What dx takes of a group.
struct GroupGradient {
  float rstd, intercept, spread;
};

// From the sums of dy scale and of dy scale xhat over the elements of the group that count.
inline GroupGradient group_gradient(const Backward& call, int64_t group, double size, const GroupStats& stats,
                                    float rstd, double dy_sum, double dy_xhat) {
  const double share = 1 / std::max(1.0, size);
  const float slope = float(call.rule.slope(stats, rstd, size)), by_var = float(2 * call.dvar[group] * share);
  const double by_mean = call.options.centered ? rstd * (dy_sum * share) : 0;
  return {rstd, float(call.dlow_mean[group] * share) - float(by_mean),
          by_var - rstd * float(slope * (dy_xhat * share))};
}

// Sums over rows of the gradients of scale and bias, for each channel.
struct ParameterSums {
  std::vector<double> values;  // (rows, 2, channels)
  int64_t channels;

  ParameterSums(int64_t rows, int64_t channels) : values(rows * 2 * channels), channels(channels) {}
  double* dscale(int64_t row) { return values.data() + row * 2 * channels; }
  double* dbias(int64_t row) { return dscale(row) + channels; }

  // Adds up the rows of each scale, in order.
  void add_up(int64_t scales, float* to_dscale, float* to_dbias) {
    const int64_t rows = int64_t(values.size()) / (2 * channels) / scales;
    for (int64_t s = 0; s < scales; ++s, to_dscale += channels, to_dbias += channels) {
      std::vector<double> scale_sum(channels), bias_sum(channels);
      for (int64_t row = s * rows; row < (s + 1) * rows; ++row) {
        const double *of_scale = dscale(row), *of_bias = dbias(row);
        for (int64_t j = 0; j < channels; ++j) scale_sum[j] += of_scale[j];
        for (int64_t j = 0; j < channels; ++j) bias_sum[j] += of_bias[j];
      }
      std::copy(scale_sum.begin(), scale_sum.end(), to_dscale);
      std::copy(bias_sum.begin(), bias_sum.end(), to_dbias);
    }
  }
};

}  // namespace
