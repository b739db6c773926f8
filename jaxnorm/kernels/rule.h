// Epsilon and correction: what becomes of a variance.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

struct Rule {
  double epsilon, correction;
  bool in_std;

  double unbias(double count) const { return correction == 0 ? 1 : count > correction ? count / (count - correction) : 0; }

  // Next to variances in a frame of this power: a normal number, as in application.py, unless it is 0.
  double scaled_epsilon(int power) const {
    if (epsilon == 0 || (power == 0 && epsilon >= FLT_MIN)) return float(epsilon);
    int exponent;
    const double fraction = std::frexp(epsilon, &exponent);
    return float(std::ldexp(fraction, std::max(exponent - (in_std ? 1 : 2) * power, FLT_MIN_EXP)));
  }

  // Of an unbiased variance.
  double root(double var, double eps) const {
    const double total = in_std ? std::sqrt(var) + eps : var + eps;
    return total == 0 ? 0 : in_std ? 1 / total : 1 / std::sqrt(total);
  }

  double rstd(double var, double count, int power) const { return root(var * unbias(count), scaled_epsilon(power)); }

  // That of neighbouring sets, with var(i) and power(i), as a rule by a loop of vectors.
  template <typename Var, typename Power>
  void rstds(int64_t sets, double count, float* r, Var var, Power power) const {
    bool scaled = false;
    for (int64_t i = 0; i < sets; ++i) scaled |= power(i) != 0;
    const double factor = unbias(count), eps = scaled_epsilon(0);
    if (scaled)
      for (int64_t i = 0; i < sets; ++i) r[i] = float(rstd(var(i), count, power(i)));
    else
      for (int64_t i = 0; i < sets; ++i) r[i] = float(root(var(i) * factor, eps));
  }

  // q in d r = -q r r d var / 2, where r is rstd; 0 for sqrt(var) where there is no spread.
  double steepness(double var, double r, double count) const {
    const double factor = unbias(count), whole = var * factor;
    return factor * (!in_std ? r : whole > 0 ? 1 / std::sqrt(whole) : 0);
  }
};
