// 1 / sqrt(var + epsilon), which every kernel calls; engine/groups.py has the same for plain JAX.
#pragma once

#include <cmath>

// 0 where that would divide by zero: a group of equal elements without an epsilon has no deviation.
template <typename T>
inline T inverse_root(T var, T epsilon) {
  const T total = var + epsilon;
  return total == 0 ? 0 : 1 / std::sqrt(total);
}
