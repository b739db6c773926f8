// The statistics of a normalization group, and the factor that follows from its variance.
//
// x is scaled by a power of two that keeps its squares within the range of float32, and shifted by a rounded mean:
//
//   u = x / 2**power - pivot        offset = mean(u), what the rounding of the pivot left
//                                   var = mean((u - offset)**2)
//   y = (u - offset) rstd scale + bias,    rstd = 1 / sqrt(n / (n - correction) var + epsilon)
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "ffi.h"
#include "inverse_root.h"

struct GroupStats {
  float pivot, offset, var;
  int power;

  static GroupStats of(double mean, double var, int power = 0) {
    return {float(mean), float(mean - float(mean)), float(var), power};
  }
};

// Whether float32 holds the squares of elements with this mean square, those of deviations as small as their last bit,
// and what gradients need: dy from 1e-24 to 1e24 over such squares.
inline bool is_ordinary(double square) { return (square == 0) | ((square > 1e-14) & (square < 1e14)); }

// The power of two by which elements with this mean square are divided: 0 if they are ordinary.
inline int power_of(double square, int64_t lowest) {
  if (is_ordinary(square)) return 0;
  int exponent = 0;
  if (std::isfinite(square)) std::frexp(std::sqrt(square), &exponent);
  return int(std::clamp<int64_t>(exponent, std::max<int64_t>(lowest, -126), 126));
}

// 1 / 2**power
inline float factor_of(int power) { return power == 0 ? 1 : std::ldexp(1.0f, -power); }

// How statistics are computed.
struct StatsOptions {
  bool centered;         // whether the mean is subtracted
  int64_t lowest_power;  // INT64_MIN where x is never scaled

  bool full_range() const { return lowest_power != INT64_MIN; }

  // From the exact mean and variance of x.
  GroupStats stats(double mean, double var) const {
    const int power = full_range() ? power_of(mean * mean + var, lowest_power) : 0;
    return power ? GroupStats::of(std::ldexp(mean, -power), std::ldexp(var, -2 * power), power)
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
                                      ffi::StructMember<int64_t>("lowest_power"));

// What becomes of a variance.
struct Rule {
  double epsilon, correction;
  bool epsilon_in_std;  // 1 / (sqrt(var) + epsilon)

  double bessel_factor(double count) const {
    return correction == 0 ? 1 : count > correction ? count / (count - correction) : 0;
  }

  // Epsilon in the units of a variance that is scaled by this power: a normal number, as in engine/groups.py, unless it
  // is 0.
  double scaled_epsilon(int power) const {
    if (epsilon == 0 || (power == 0 && epsilon >= FLT_MIN)) return float(epsilon);
    int exponent;
    const double fraction = std::frexp(epsilon, &exponent);
    return float(std::ldexp(fraction, std::max(exponent - (epsilon_in_std ? 1 : 2) * power, FLT_MIN_EXP)));
  }

  // From an unbiased variance.
  double rstd(double var, double scaled_epsilon) const {
    if (!epsilon_in_std) return inverse_root(var, scaled_epsilon);
    const double total = std::sqrt(var) + scaled_epsilon;
    return total == 0 ? 0 : 1 / total;
  }

  // Those of several groups, as a rule by a vectorized loop.
  void rstds(const GroupStats* stats, int64_t groups, double count, float* to) const {
    bool scaled = false;
    for (int64_t i = 0; i < groups; ++i) scaled |= stats[i].power != 0;
    const double factor = bessel_factor(count), unscaled = scaled_epsilon(0);
    if (scaled)
      for (int64_t i = 0; i < groups; ++i) to[i] = float(rstd(stats[i].var * factor, scaled_epsilon(stats[i].power)));
    else
      for (int64_t i = 0; i < groups; ++i) to[i] = float(rstd(stats[i].var * factor, unscaled));
  }

  // s in drstd = -s rstd**2 dvar / 2; for sqrt(var) it is 0 where there is no spread.
  double slope(double var, double rstd, double count) const {
    const double factor = bessel_factor(count), unbiased = var * factor;
    return factor * (!epsilon_in_std ? rstd : unbiased > 0 ? 1 / std::sqrt(unbiased) : 0);
  }
};
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Rule, ffi::StructMember<double>("epsilon"),
                                      ffi::StructMember<double>("correction"),
                                      ffi::StructMember<bool>("epsilon_in_std"));
