// What is known of every set: its frame, mean and variance.
#pragma once

#include <vector>

#include "rule.h"
#include "sets.h"
#include "stats.h"

// How sets are looked at, and the results that say what was found; null where nobody asks.
struct Stats {
  float *pivot, *offset, *var, *power;
  bool centered;
  int64_t lowest;  // least power of two, INT64_MIN for none

  bool full_range() const { return lowest != INT64_MIN; }

  // Of the exact mean and variance. Sets of an ordinary size do without a power.
  Set set(int64_t i, double mean, double var_) const {
    const int exponent = full_range() ? power_of(mean * mean + var_, lowest) : 0;
    if (exponent) {
      mean = std::ldexp(mean, -exponent);
      var_ = std::ldexp(var_, -2 * exponent);
    }
    const Set of{float(mean), float(mean - float(mean)), float(var_), exponent};
    if (pivot) pivot[i] = of.pivot;
    if (offset) offset[i] = of.offset;
    if (var) var[i] = of.var;
    if (power) power[i] = float(exponent);
    return of;
  }

  // Of so many sets of d neighbouring numbers: those of one need not wait for those of another.
  template <typename X>
  void rows(const X* x, int64_t d, int64_t first, int64_t count, Set* of) const {
    auto row_of = centered ? row_stats<true, X> : row_stats<false, X>;
    for (int64_t row = 0; row < count; ++row) {
      double mean = 0, var_;
      row_of(x + (first + row) * d, d, &mean, &var_);
      of[row] = set(first + row, mean, var_);
    }
  }
};

// What is known of an n: two sums of every channel in every chunk, the sets, and numbers that each channel has.
struct Known {
  std::vector<double> parts;
  std::vector<Set> sets;
  std::vector<float> each;

  Known(const Shape& shape, const Chunks& chunks, int64_t numbers)
      : parts(chunks.count * 2 * shape.c()), sets(shape.g), each(numbers * shape.c()) {}
};

// The first three numbers of each channel: factor, pivot and offset of its set.
inline void spread_frames(const Shape& shape, Known& known) {
  float *factor = known.each.data(), *pivot = factor + shape.c(), *offset = pivot + shape.c();
  spread(shape, factor, [&](int64_t i) { return factor_of(known.sets[i].power); });
  spread(shape, pivot, [&](int64_t i) { return known.sets[i].pivot; });
  spread(shape, offset, [&](int64_t i) { return known.sets[i].offset; });
}

// Means and sums of squared deviations of each channel over the rows of a chunk.
template <typename X>
void chunk_stats(const X* x, int64_t rows, int64_t c, const Stats& stats, double* mean, double* square) {
  bool held = true;
  for (int64_t first = 0; first < c; first += kStrip)
    held &= strip_stats(rows, std::min(kStrip, c - first), stats.centered, mean + first, square + first,
                        [&](int64_t r, int64_t j) { return load(x[r * c + first + j]); });
  auto value = [&](int64_t r, int64_t j) { return load(x[r * c + j]); };
  if (stats.full_range() && !held) stats_in_double(rows, c, stats.centered, mean, square, value);
}

// Of the means and squares of chunks the sets.
inline void merge_stats(const Shape& shape, const Chunks& chunks, const Stats& stats, int64_t n, Known& known) {
  const int64_t c = shape.c(), g = shape.g;
  const double total = double(shape.p) * shape.d;
  std::vector<double> channels(c), mean(g), square(g);
  for (int64_t k = 0; k < chunks.count; ++k)
    for (int64_t j = 0; j < c; ++j) channels[j] += chunks.size(shape, k) * known.parts[k * 2 * c + j];
  gather(shape, channels.data(), mean.data());
  for (double& sum : mean) sum /= total;
  std::fill(channels.begin(), channels.end(), 0.0);
  for (int64_t k = 0; k < chunks.count; ++k) {
    const double *means = known.parts.data() + k * 2 * c, *squares = means + c;
    for (int64_t i = 0, j = 0; i < g; ++i)
      for (const int64_t end = j + shape.d; j < end; ++j) {
        const double u = stats.centered ? means[j] - mean[i] : 0;
        channels[j] += squares[j] + chunks.size(shape, k) * u * u;
      }
  }
  gather(shape, channels.data(), square.data());
  for (int64_t i = 0; i < g; ++i) known.sets[i] = stats.set(n * g + i, mean[i], square[i] / total);
}

// The stage, as in sets.h, whose parts merge_stats makes sets of.
template <typename X>
auto reduce_to_stats(const Shape& shape, const Chunks& chunks, const X* x, const Stats& stats) {
  return [=](Known& known, int64_t n, int64_t k) {
    const int64_t c = shape.c();
    double* part = known.parts.data() + k * 2 * c;
    chunk_stats(x + (n * shape.p + k * chunks.rows) * c, chunks.size(shape, k), c, stats, part, part + c);
  };
}
