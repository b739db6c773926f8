// Numbers of float32 and bfloat16, read and written as float.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

inline float load(float v) { return v; }
inline float load(uint16_t v) {
  const uint32_t bits = uint32_t(v) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
inline void store(float* to, float v) { *to = v; }
inline void store(uint16_t* to, float v) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *to = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

// Whether float32 holds squares of numbers of this mean square and of deviations as small as their last bit, and what gradients take:
// cotangents from 1e-24 to 1e24 over such squares.
inline bool ordinary(double square) { return (square == 0) | ((square > 1e-14) & (square < 1e14)); }

// Of the two by which numbers of this mean square are divided: 0 if they are of an ordinary size.
inline int power_of(double square, int64_t lowest) {
  if (ordinary(square)) return 0;
  int exponent = 0;
  if (std::isfinite(square)) std::frexp(std::sqrt(square), &exponent);
  return int(std::clamp<int64_t>(exponent, std::max<int64_t>(lowest, -126), 126));
}

// 1 / 2**power
inline float factor_of(int power) { return power == 0 ? 1 : std::ldexp(1.0f, -power); }
