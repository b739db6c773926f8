// The statistics of a normalization group, and the factor that follows from its variance.
//
// x is scaled by a power of two that keeps its squares within the range of float32, and shifted by a rounded mean:
//
//   u = x / 2**exponent - shift    low_mean = mean(u), what the rounding of the shift left
//                                   var = mean((u - low_mean)**2)
//   y = (u - low_mean) rstd scale + bias,    rstd = 1 / sqrt(n / (n - correction) var + epsilon)
// Rule has the other forms of rstd.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "ffi.h"
#include "inverse_root.h"

struct GroupStats {
  float shift, low_mean, var;
  int exponent;

  static GroupStats of(double mean, double var, int exponent = 0) {
    return {float(mean), float(mean - float(mean)), float(var), exponent};
  }
};

// Whether float32 holds the squares of elements with this mean square, those of deviations as small as their last bit,
// and what gradients need: dy from 1e-24 to 1e24 over such squares.
inline bool is_ordinary(double square) { return (square == 0) | ((square > 1e-14) & (square < 1e14)); }

// The scale exponent by which elements with this mean square are divided: 0 if they are ordinary.
inline int exponent_of(double square, int64_t lowest) {
  if (is_ordinary(square)) return 0;
  int found = 0;
  if (std::isfinite(square)) std::frexp(std::sqrt(square), &found);
  return int(std::clamp<int64_t>(found, std::max<int64_t>(lowest, -126), 126));
}

// 1 / 2**exponent
inline float factor_of(int exponent) { return exponent == 0 ? 1 : std::ldexp(1.0f, -exponent); }

// How statistics are computed.
struct StatsOptions {
  bool centered;            // whether the mean is subtracted
  int64_t lowest_exponent;  // INT64_MIN where x is never scaled

  bool full_range() const { return lowest_exponent != INT64_MIN; }

  // From the exact mean and variance of x.
  GroupStats stats(double mean, double var) const {
    const int exponent = full_range() ? exponent_of(mean * mean + var, lowest_exponent) : 0;
    return exponent ? GroupStats::of(std::ldexp(mean, -exponent), std::ldexp(var, -2 * exponent), exponent)
                    : GroupStats::of(mean, var);
  }

  // Those of several groups, as a rule by a vectorized loop.
  void stats(int64_t count, const double* mean, const double* var, GroupStats* to) const {
    int64_t unusual = 0;  // a sum, since compilers vectorize no early exit
#pragma omp simd reduction(+ : unusual)
    for (int64_t i = 0; i < count; ++i) unusual += !is_ordinary(mean[i] * mean[i] + var[i]);
    if (!unusual)
      for (int64_t i = 0; i < count; ++i) to[i] = GroupStats::of(mean[i], var[i]);
    else
      for (int64_t i = 0; i < count; ++i) to[i] = stats(mean[i], var[i]);
  }
};
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(StatsOptions, ffi::StructMember<bool>("centered"),
                                      ffi::StructMember<int64_t>("lowest_exponent"));

// Where epsilon stands: 1 / sqrt(var + epsilon), 1 / (sqrt(var) + epsilon), 1 / max(sqrt(var), epsilon).
enum EpsilonIn : int64_t { kVar, kStd, kMax };

// What becomes of a variance.
struct Rule {
  double epsilon, correction;
  int64_t epsilon_in;

  double bessel_factor(double count) const {
    return correction == 0 ? 1 : count > correction ? count / (count - correction) : 0;
  }

  // Epsilon in the units of a variance that is scaled by this exponent. It is a normal number, as in engine/groups.py,
  // unless it is 0.
  double scaled_epsilon(int exponent) const {
    if (epsilon == 0 || (exponent == 0 && epsilon >= FLT_MIN)) return float(epsilon);
    int of_epsilon;
    const double fraction = std::frexp(epsilon, &of_epsilon);
    return float(std::ldexp(fraction, std::max(of_epsilon - (epsilon_in == kVar ? 2 : 1) * exponent, FLT_MIN_EXP)));
  }

  // From an unbiased variance.
  double rstd(double var, double scaled_epsilon) const {
    if (epsilon_in == kVar) return inverse_root(var, scaled_epsilon);
    // std::max returns its first argument where that is NaN
    const double root = std::sqrt(var),
                 total = epsilon_in == kStd ? root + scaled_epsilon : std::max(root, scaled_epsilon);
    return total == 0 ? 0 : 1 / total;
  }

  // Those of several groups, as a rule by a vectorized loop.
  void rstds(const GroupStats* stats, int64_t groups, double count, float* to) const {
    bool scaled = false;
    for (int64_t i = 0; i < groups; ++i) scaled |= stats[i].exponent != 0;
    const double factor = bessel_factor(count), unscaled = scaled_epsilon(0);
    if (scaled)
      for (int64_t i = 0; i < groups; ++i)
        to[i] = float(rstd(stats[i].var * factor, scaled_epsilon(stats[i].exponent)));
    else
      for (int64_t i = 0; i < groups; ++i) to[i] = float(rstd(stats[i].var * factor, unscaled));
  }

  // s in drstd = -s rstd**2 dvar / 2, as engine/groups.py derives it. For sqrt(var) it is 0 where there is no spread,
  // and for the maximum where epsilon is larger.
  double slope(const GroupStats& stats, double rstd, double count) const {
    const double factor = bessel_factor(count), unbiased = stats.var * factor;
    if (epsilon_in == kStd) return factor * (unbiased > 0 ? 1 / std::sqrt(unbiased) : 0);
    if (epsilon_in == kMax && std::sqrt(unbiased) < scaled_epsilon(stats.exponent)) return 0;
    return factor * rstd;
  }
};
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Rule, ffi::StructMember<double>("epsilon"),
                                      ffi::StructMember<double>("correction"),
                                      ffi::StructMember<int64_t>("epsilon_in"));
