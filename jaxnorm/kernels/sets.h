// Normalization on the CPU, for arrays (N, P, G, D) whose sets are pooled over P and D:
//
//   layer norm (rows, 1, 1, C)       batch norm     (1, N H W, C, 1)
//   group norm (N, H W, g, C / g)    instance norm  (N, H W, C, 1)
//
// Scale and bias are (S, G, D), S dividing N: as many neighbouring n share one. A set's numbers are looked at in its
// frame, u = x / 2**power - pivot, as in frame.py. Sums are in double, in an order that does not depend on the number
// of threads, and cut into chunks that stay in the cache while they are read twice.

#pragma once

#include <cmath>
#include <vector>

#include "numbers.h"
#include "parallel.h"

constexpr int64_t kChunk = 16384;  // elements that are read twice: 64 KiB of float32
constexpr int64_t kWhole = 262144;  // up to so many elements of one n are summed and applied by one thread

struct Shape {
  int64_t n, p, g, d, s;  // s: how many scales
  int64_t c() const { return g * d; }
  int64_t sets() const { return n * g; }
  const float* of(const float* params, int64_t i) const { return params + i / (n / s) * c(); }
};

inline Shape shape_of(const Any& x, const F32& scale, int64_t p, int64_t g, int64_t d) {
  return {int64_t(x.element_count()) / (p * g * d), p, g, d, int64_t(scale.element_count()) / (g * d)};
}

// 1 / 2**power
inline float factor_of(int power) { return power == 0 ? 1 : std::ldexp(1.0f, -power); }

// The values of the sets of one n, for each of their channels.
inline void spread(const Shape& shape, const float* values, float* to) {
  if (shape.d == 1) std::copy(values, values + shape.g, to);
  else
    for (int64_t g = 0; g < shape.g; ++g) std::fill(to + g * shape.d, to + (g + 1) * shape.d, values[g]);
}

struct Chunks {
  int64_t rows, count;  // of each but the last; how many
  bool whole;           // whether one thread takes all chunks of an n
  explicit Chunks(const Shape& shape, int64_t threads) {
    rows = std::max<int64_t>(64, kChunk / shape.c());
    count = (shape.p + rows - 1) / rows;
    whole = shape.n >= 2 * threads && shape.p * shape.c() <= kWhole;
  }
  int64_t size(const Shape& shape, int64_t chunk) const { return std::min(rows, shape.p - chunk * rows); }
};

// Runs chunk by chunk `reduce`, then for each n `combine`, then chunk by chunk `apply`, unless that is null.
template <typename Reduce, typename Combine, typename Apply>
void by_chunks(ffi::ThreadPool& pool, const Shape& shape, const Chunks& chunks, Reduce reduce, Combine combine, Apply apply) {
  constexpr bool applies = !std::is_null_pointer_v<Apply>;
  const int64_t count = chunks.count;
  if (chunks.whole) {
    in_parallel(pool, shape.n, [&](int64_t n) {
      for (int64_t k = 0; k < count; ++k) reduce(n, k);
      combine(n);
      if constexpr (applies)
        for (int64_t k = 0; k < count; ++k) apply(n, k);
    });
    return;
  }
  in_parallel(pool, shape.n * count, [&](int64_t i) { reduce(i / count, i % count); });
  in_parallel(pool, shape.n, [&](int64_t n) { combine(n); });
  if constexpr (applies) in_parallel(pool, shape.n * count, [&](int64_t i) { apply(i / count, i % count); });
}
