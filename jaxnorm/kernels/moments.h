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

  static Set plain(double mean, double var, int power = 0) { return {float(mean), float(mean - float(mean)), float(var), power}; }

  // Of the exact mean and variance. Sets of an ordinary size do without a power.
  Set scaled(double mean, double var) const {
    const int power = full_range() ? power_of(mean * mean + var, lowest) : 0;
    return power ? plain(std::ldexp(mean, -power), std::ldexp(var, -2 * power), power) : plain(mean, var);
  }

  void tell(int64_t i, const Set& of) const {
    if (pivot) pivot[i] = of.pivot;
    if (offset) offset[i] = of.offset;
    if (var) var[i] = of.var;
    if (power) power[i] = float(of.power);
  }

  // Of neighbouring sets, as a rule by a loop of vectors.
  void sets(int64_t first, int64_t count, const double* mean, const double* var, Set* of) const {
    int64_t unusual = 0;  // of numbers, unlike conditions, compilers make vectors
#pragma omp simd reduction(+ : unusual)
    for (int64_t i = 0; i < count; ++i) unusual += !ordinary(mean[i] * mean[i] + var[i]);
    if (!unusual)
      for (int64_t i = 0; i < count; ++i) of[i] = plain(mean[i], var[i]);
    else
      for (int64_t i = 0; i < count; ++i) of[i] = scaled(mean[i], var[i]);
    for (int64_t i = 0; i < count; ++i) tell(first + i, of[i]);
  }

  // Of so many sets of d neighbouring numbers: those of one need not wait for those of another.
  template <typename X>
  void rows(const X* x, int64_t d, int64_t first, int64_t count, Set* of) const {
    auto row_of = centered ? row_stats<true, X> : row_stats<false, X>;
    for (int64_t row = 0; row < count; ++row) {
      double mean = 0, var_;
      row_of(x + (first + row) * d, d, &mean, &var_);
      of[row] = scaled(mean, var_);
      tell(first + row, of[row]);
    }
  }
};

// What is known of an n: two or four sums of every channel in every chunk, the sets, and numbers that each channel has.
struct Known {
  int64_t sums;
  std::vector<double> parts;
  std::vector<Set> sets;
  std::vector<float> each;

  Known(const Shape& shape, const Chunks& chunks, int64_t sums, int64_t numbers)
      : sums(sums * shape.c()), parts(chunks.count * this->sums), sets(shape.g), each(numbers * shape.c()) {}
  double* part(int64_t chunk) { return parts.data() + chunk * sums; }
};

// The first four numbers of each channel: factor, pivot, offset and rstd of its set.
inline void spread_frames(const Shape& shape, const Rule& rule, Known& known) {
  float *factor = known.each.data(), *pivot = factor + shape.c(), *offset = pivot + shape.c(), *slope = offset + shape.c();
  std::vector<float> rstd(shape.g);
  rule.rstds(known.sets.data(), shape.g, double(shape.p) * shape.d, rstd.data());
  spread(shape, factor, [&](int64_t i) { return factor_of(known.sets[i].power); });
  spread(shape, pivot, [&](int64_t i) { return known.sets[i].pivot; });
  spread(shape, offset, [&](int64_t i) { return known.sets[i].offset; });
  spread(shape, slope, [&](int64_t i) { return rstd[i]; });
}

// Means and sums of squared deviations of each channel over the rows of a chunk and, of cotangents, the sums beside.
template <typename X, typename... Y>
void chunk_stats(int64_t rows, int64_t c, const Stats& stats, double* part, const X* x, const Y*... ct) {
  bool held = true;
  auto from = [&](auto* numbers, int64_t first) { return [=](int64_t r, int64_t j) { return load(numbers[r * c + first + j]); }; };
  for (int64_t first = 0; first < c; first += kStrip) {
    double* to = part + first;
    held &= strip_stats(rows, std::min(kStrip, c - first), stats.centered, to, to + c, from(x, first),
                        Beside{from(ct, first), to + 2 * c, to + 3 * c}...);
  }
  if (stats.full_range() && !held)
    stats_in_double(rows, c, stats.centered, part, part + c, from(x, 0), Beside{from(ct, 0), part + 2 * c, part + 3 * c}...);
}

// Of the means and squares of chunks the sets.
inline void merge_stats(const Shape& shape, const Chunks& chunks, const Stats& stats, int64_t n, Known& known) {
  const int64_t c = shape.c(), g = shape.g;
  const double size = double(shape.p) * shape.d;  // divided by, never multiplied with 1 / size: of a constant the mean is that constant
  std::vector<double> channels(c), center(c), mean(g), var(g);
  for (int64_t k = 0; k < chunks.count; ++k) {
    const double rows = chunks.size(shape, k), *means = known.part(k);
    for (int64_t j = 0; j < c; ++j) channels[j] += rows * means[j];
  }
  gather(shape, channels.data(), mean.data());
  for (double& sum : mean) sum /= size;
  spread(shape, center.data(), [&](int64_t i) { return mean[i]; });
  std::fill(channels.begin(), channels.end(), 0.0);
  for (int64_t k = 0; k < chunks.count; ++k) {
    const double rows = chunks.size(shape, k), *means = known.part(k), *squares = means + c;
    for (int64_t j = 0; j < c; ++j) channels[j] += squares[j] + rows * (means[j] - center[j]) * (means[j] - center[j]);
  }
  gather(shape, channels.data(), var.data());
  for (double& sum : var) sum /= size;
  stats.sets(n * g, g, mean.data(), var.data(), known.sets.data());
}

// The stage, as in sets.h, whose parts merge_stats makes sets of.
template <typename X, typename... Y>
auto reduce_to_stats(const Shape& shape, const Chunks& chunks, const Stats& stats, const X* x, const Y*... ct) {
  return [=](Known& known, int64_t n, int64_t k) {
    const int64_t c = shape.c(), start = (n * shape.p + k * chunks.rows) * c;
    chunk_stats(chunks.size(shape, k), c, stats, known.part(k), x + start, (ct + start)...);
  };
}
