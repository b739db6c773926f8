// Epsilon and correction: what becomes of a variance.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

// What is known of a set, in its frame, u = x / 2**power - pivot.
struct Set {
  float pivot, offset, var;
  int power;
};

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

  float rstd(const Set& of, double count) const { return float(root(of.var * unbias(count), scaled_epsilon(of.power))); }

  // That of neighbouring sets, as a rule by a loop of vectors.
  void rstds(const Set* of, int64_t sets, double count, float* r) const {
    bool scaled = false;
    for (int64_t i = 0; i < sets; ++i) scaled |= of[i].power != 0;
    const double factor = unbias(count), eps = scaled_epsilon(0);
    if (scaled)
      for (int64_t i = 0; i < sets; ++i) r[i] = rstd(of[i], count);
    else
      for (int64_t i = 0; i < sets; ++i) r[i] = float(root(of[i].var * factor, eps));
  }

  // q in d r = -q r r d var / 2, where r is rstd; 0 for sqrt(var) where there is no spread.
  double steepness(double var, double r, double count) const {
    const double factor = unbias(count), whole = var * factor;
    return factor * (!in_std ? r : whole > 0 ? 1 / std::sqrt(whole) : 0);
  }
};
