// Elements of float32 and bfloat16, loaded and stored as float.
#pragma once

#include <cstdint>
#include <cstring>

using BFloat16 = uint16_t;  // its bits

inline float load(float v) { return v; }
inline float load(BFloat16 v) {
  const uint32_t bits = uint32_t(v) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline void store(float* to, float v) { *to = v; }
inline void store(BFloat16* to, float v) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *to = BFloat16((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}
