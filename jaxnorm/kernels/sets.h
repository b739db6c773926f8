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
#include <numeric>
#include <type_traits>
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
  const float* of_set(const float* params, int64_t i) const { return of(params, i / g) + i % g * d; }
};

inline Shape shape_of(const Any& x, const F32& scale, int64_t p, int64_t g, int64_t d) {
  return {int64_t(x.element_count()) / (p * g * d), p, g, d, int64_t(scale.element_count()) / (g * d)};
}

// For each channel of one n the value of its set, value(set).
template <typename T, typename Value>
void spread(const Shape& shape, T* to, Value value) {
  if (shape.d == 1)
    for (int64_t i = 0; i < shape.g; ++i) to[i] = value(i);
  else
    for (int64_t i = 0; i < shape.g; ++i, to += shape.d) std::fill(to, to + shape.d, value(i));
}

// For each set of one n the sum over its channels.
inline void gather(const Shape& shape, const double* channels, double* to) {
  if (shape.d == 1) std::copy(channels, channels + shape.g, to);
  else
    for (int64_t i = 0; i < shape.g; ++i, channels += shape.d) to[i] = std::accumulate(channels, channels + shape.d, 0.0);
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

// Whether a stage is of chunks.
template <typename Stage, typename Known>
constexpr bool of_chunks = std::is_invocable_v<Stage, Known&, int64_t, int64_t>;

// Runs the stages in turn, those of chunks, stage(known, n, chunk), and those of each n, stage(known, n). What they find out about
// an n they leave each other in what `make` makes: where one thread has all of an n, only while it is at work on it.
template <typename Make, typename... Stage>
void in_stages(ffi::ThreadPool& pool, const Shape& shape, const Chunks& chunks, Make make, Stage... stage) {
  using Known = decltype(make());
  const int64_t count = chunks.count;
  if (chunks.whole) {
    auto run = [&](auto& stage, Known& known, int64_t n) {
      if constexpr (!of_chunks<decltype(stage), Known>) stage(known, n);
      else
        for (int64_t k = 0; k < count; ++k) stage(known, n, k);
    };
    return in_parallel(pool, shape.n, [&](int64_t n) {
      Known known = make();
      (run(stage, known, n), ...);
    });
  }
  std::vector<Known> known;
  for (int64_t n = 0; n < shape.n; ++n) known.push_back(make());
  auto run = [&](auto& stage) {
    if constexpr (!of_chunks<decltype(stage), Known>) in_parallel(pool, shape.n, [&](int64_t n) { stage(known[n], n); });
    else in_parallel(pool, shape.n * count, [&](int64_t i) { stage(known[i / count], i / count, i % count); });
  };
  (run(stage), ...);
}
