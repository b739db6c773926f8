// Sums of neighbouring numbers.
#pragma once

#include <algorithm>
#include <cstdint>

constexpr int64_t kWays = 32;    // sums that numbers go to in turn
constexpr int64_t kShort = 512;  // numbers that are added in float32, before they are added to a sum in double

// In pairs, for a compiler adds up a vector number by number, each time waiting for the last.
template <int64_t count>
[[gnu::always_inline]] inline float pairwise(float* numbers) {
  if constexpr (count == 1) return *numbers;
  constexpr int64_t half = count / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) numbers[i] += numbers[i + half];
  return pairwise<count == 1 ? 1 : half>(numbers);
}

// The sums of d neighbouring numbers: add(i, way, few) adds what number i gives to few[k][way].
template <int count, typename Add>
[[gnu::always_inline]] inline void sum_row(int64_t d, double (&sums)[count], Add add) {
  std::fill(sums, sums + count, 0.0);
  for (int64_t start = 0; start < d; start += kShort) {
    const int64_t end = std::min(d, start + kShort);
    float few[count][kWays] = {};
    int64_t i = start;
    for (; i + kWays <= end; i += kWays)
#pragma omp simd
      for (int64_t way = 0; way < kWays; ++way) add(i + way, way, few);
#pragma omp simd
    for (int64_t way = 0; way < end - i; ++way) add(i + way, way, few);
    for (int k = 0; k < count; ++k) sums[k] += pairwise<kWays>(few[k]);
  }
}
