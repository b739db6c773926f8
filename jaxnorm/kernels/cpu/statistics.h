// The statistics of every normalization group: of groups that are rows at once, of others from those of channels in
// chunks.
#pragma once

#include <vector>

#include "group_stats.h"
#include "moments.h"
#include "schedule.h"

namespace {

// Of neighbouring groups that are rows of d elements.
template <typename X>
void stats_of_rows(const StatsOptions& options, const X* x, int64_t d, int64_t rows, GroupStats* to) {
  auto moments = options.centered ? row_moments<true, X> : row_moments<false, X>;
  double mean[kFloatRows], var[kFloatRows];
  for (int64_t start = 0; start < rows; start += kFloatRows) {
    const int64_t count = std::min(kFloatRows, rows - start);
    moments(x + start * d, d, count, mean, var);
    options.stats(count, mean, var, to + start);
  }
}

// For each channel, over the rows of a chunk: mean and sum of squared deviations of x, sums of dy u and of dy.
struct ChannelSums {
  double *mean, *square, *dy_u, *dy;
};

// For each channel what is applied to it, u = x factor - shift:
//   y = (u - low_mean) slope + bias
//   dx = factor (slope dy + intercept + (u - low_mean) spread)
class Channels {
 public:
  Channels(int64_t count, int64_t arrays) : count_(count), values_(arrays * count) {}
  float* factor() { return values_.data(); }
  float* shift() { return factor() + count_; }
  float* low_mean() { return shift() + count_; }
  float* slope() { return low_mean() + count_; }
  float* intercept() { return slope() + count_; }
  float* spread() { return intercept() + count_; }

 private:
  int64_t count_;
  std::vector<float> values_;
};

// What stages compute of an example: sums of its chunks, statistics of its groups, and what is applied to its channels.
class Example {
 public:
  enum Sums { kMoments, kGradients, kBoth };
  enum Applied { kNothing = 0, kForward = 4, kBackward = 6 };  // arrays of Channels

  Example(const Shape& shape, const Chunks& chunks, Sums sums, Applied applied)
      : groups(shape.g),
        channels(shape.channels(), applied),
        count_(shape.channels()),
        kind_(sums),
        sums_(chunks.count * arrays() * count_) {}

  ChannelSums sums(int64_t chunk) {
    double* first = sums_.data() + chunk * arrays() * count_;
    double* second = first + count_;
    if (kind_ == kMoments) return {first, second, nullptr, nullptr};
    if (kind_ == kGradients) return {nullptr, nullptr, first, second};
    return {first, second, second + count_, second + 2 * count_};
  }

  std::vector<GroupStats> groups;
  Channels channels;

 private:
  int64_t arrays() const { return kind_ == kBoth ? 4 : 2; }

  int64_t count_;
  Sums kind_;
  std::vector<double> sums_;
};

// Fills in factor, shift, low_mean and, as slope, rstd.
inline void spread_stats(const Shape& shape, const Rule& rule, double group_size, Example& example) {
  const GroupStats* stats = example.groups.data();
  std::vector<float> rstd(shape.g);
  rule.rstds(stats, shape.g, group_size, rstd.data());
  shape.spread(example.channels.factor(), [&](int64_t i) { return factor_of(stats[i].exponent); });
  shape.spread(example.channels.shift(), [&](int64_t i) { return stats[i].shift; });
  shape.spread(example.channels.low_mean(), [&](int64_t i) { return stats[i].low_mean; });
  shape.spread(example.channels.slope(), [&](int64_t i) { return rstd[i]; });
}

// The sums of what counts in one chunk; of dy too where it is passed.
template <typename X, typename... DY>
void sum_chunk(const Rows& rows, int64_t channels, const StatsOptions& options, const ChannelSums& to, const X* x,
               const DY*... dy) {
  if (!rows.count) return;  // sums are 0 before
  bool held = true;
  auto from = [&](auto* values, int64_t first) {
    return [=](int64_t r, int64_t j) { return load(values[r * channels + first + j]); };
  };
  for (int64_t first = 0; first < channels; first += kStrip)
    held &=
        column_moments(rows, std::min(kStrip, channels - first), options.centered, to.mean + first, to.square + first,
                       from(x, first), GradientSums{from(dy, first), to.dy_u + first, to.dy + first}...);
  if (options.full_range() && !held)
    column_moments_in_double(rows, channels, options.centered, to.mean, to.square, from(x, 0),
                             GradientSums{from(dy, 0), to.dy_u, to.dy}...);
}

// The stage of chunks that computes their sums.
template <typename X, typename... DY>
auto sum_chunks(const Shape& shape, const Chunks& chunks, const StatsOptions& options, const X* x, const DY*... dy) {
  return [=, &chunks](Example& example, int64_t n, int64_t k) {
    const int64_t start = chunks.start(shape, n, k);
    sum_chunk(chunks.unmasked(n, k), shape.channels(), options, example.sums(k), x + start, (dy + start)...);
  };
}

// Merges the moments of chunks and channels to those of groups: mean(x) = sum(n_i mean_i) / n,
// var(x) = sum(square_i + n_i (mean_i - mean)**2) / n.
inline void merge_chunks(const Shape& shape, const Chunks& chunks, const StatsOptions& options, int64_t n,
                         Example& example) {
  const int64_t channels = shape.channels(), groups = shape.g;
  // a divisor: times 1 / size, the mean of a constant would not be that constant
  const double size = std::max(1.0, chunks.group_size(shape, n));
  std::vector<double> sum(channels), center(channels), mean(groups), var(groups);
  for (int64_t k = 0; k < chunks.count; ++k) {
    const double rows = chunks.unmasked(n, k).count, *means = example.sums(k).mean;
    for (int64_t j = 0; j < channels; ++j) sum[j] += rows * means[j];
  }
  shape.gather(sum.data(), mean.data());
  for (double& value : mean) value /= size;
  shape.spread(center.data(), [&](int64_t i) { return mean[i]; });
  std::fill(sum.begin(), sum.end(), 0.0);
  for (int64_t k = 0; k < chunks.count; ++k) {
    const ChannelSums of_chunk = example.sums(k);
    const double rows = chunks.unmasked(n, k).count, *means = of_chunk.mean, *squares = of_chunk.square;
    for (int64_t j = 0; j < channels; ++j)
      sum[j] += squares[j] + rows * (means[j] - center[j]) * (means[j] - center[j]);
  }
  shape.gather(sum.data(), var.data());
  for (double& value : var) value /= size;
  options.stats(groups, mean.data(), var.data(), example.groups.data());
}

}  // namespace
