// Gradients where groups have several positions: x is (N, P, G, D).
#pragma once

#include "backward.h"

namespace {

// For each channel the sums of dy (u - low_mean) and of dy over the rows of a chunk that count; in double where float32
// does not hold them.
template <typename X, typename DY>
void sum_gradients(const Rows& rows, int64_t channels, Channels& of, const ChannelSums& to, const X* x, const DY* dy) {
  const float *factor = of.factor(), *shift = of.shift(), *low_mean = of.low_mean();
  auto u = [=](int64_t r, int64_t j) { return (load(x[r * channels + j]) * factor[j] - shift[j]) - low_mean[j]; };
  int64_t overflown = 0;
  for (int64_t first = 0; first < channels; first += kStrip) {
    const int64_t width = std::min(kStrip, channels - first);
    double sums[2][kStrip];
    column_sums(rows, width, sums, [&](int64_t r, int64_t column, int64_t place, auto& partial) {
      const int64_t j = first + column;
      const float cotangent = load(dy[r * channels + j]);
      partial[0][place] += cotangent * u(r, j);
      partial[1][place] += cotangent;
    });
    for (int64_t j = 0; j < width; ++j) overflown += !std::isfinite(sums[0][j]);
    std::copy(sums[0], sums[0] + width, to.dy_u + first);
    std::copy(sums[1], sums[1] + width, to.dy + first);
  }
  if (!overflown) return;
  std::fill(to.dy_u, to.dy_u + channels, 0.0);
  std::fill(to.dy, to.dy + channels, 0.0);
  for (const Run& run : rows)
    for (int64_t r = run.first; r < run.end; ++r)
      for (int64_t j = 0; j < channels; ++j) {
        const double cotangent = load(dy[r * channels + j]);
        to.dy_u[j] += cotangent * u(r, j);
        to.dy[j] += cotangent;
      }
}

// From the sums of dy (x - mean), found with the mean of a chunk and channel, those of dy (u - low_mean).
inline void recenter_gradients(const Chunks& chunks, int64_t channels, Example& example) {
  const float *factor = example.channels.factor(), *shift = example.channels.shift(),
              *low_mean = example.channels.low_mean();
  for (int64_t k = 0; k < chunks.count; ++k) {
    const ChannelSums sums = example.sums(k);
    for (int64_t j = 0; j < channels; ++j)
      sums.dy_u[j] = sums.dy_u[j] * factor[j] + sums.dy[j] * ((sums.mean[j] * factor[j] - shift[j]) - low_mean[j]);
  }
}

// From the sums of an example's chunks its part of dscale and dbias, and what dx takes of each channel.
inline void merge_gradients(const Backward& call, const Chunks& chunks, int64_t n, Example& example, double* dscale,
                            double* dbias) {
  const Shape& shape = call.shape;
  const int64_t channels = shape.channels(), groups = shape.g;
  const float* scale = shape.of_example(call.scale, n);
  float* slope = example.channels.slope();  // rstd so far
  for (int64_t k = 0; k < chunks.count; ++k) {
    const ChannelSums sums = example.sums(k);
    for (int64_t j = 0; j < channels; ++j) dscale[j] += sums.dy_u[j];
    for (int64_t j = 0; j < channels; ++j) dbias[j] += sums.dy[j];
  }
  for (int64_t j = 0; j < channels; ++j) dscale[j] *= slope[j];
  std::vector<double> scaled(channels), dy_sum(groups), dy_xhat(groups);
  for (int64_t j = 0; j < channels; ++j) scaled[j] = scale[j] * dscale[j];
  shape.gather(scaled.data(), dy_xhat.data());
  for (int64_t j = 0; j < channels; ++j) scaled[j] = scale[j] * dbias[j];
  shape.gather(scaled.data(), dy_sum.data());
  std::vector<GroupGradient> by(groups);
  const double size = chunks.group_size(shape, n);
  for (int64_t i = 0; i < groups; ++i)
    by[i] = group_gradient(call, n * groups + i, size, example.groups[i], slope[i * shape.d], dy_sum[i], dy_xhat[i]);
  shape.spread(example.channels.intercept(), [&](int64_t i) { return by[i].intercept; });
  shape.spread(example.channels.spread(), [&](int64_t i) { return by[i].spread; });
  for (int64_t j = 0; j < channels; ++j) slope[j] *= scale[j];
}

template <typename X, typename DY>
void apply_gradients(int64_t all, const Rows& rows, int64_t channels, Channels& of, const X* x, const DY* dy, X* dx) {
  const float *factor = of.factor(), *shift = of.shift(), *low_mean = of.low_mean(), *slope = of.slope(),
              *intercept = of.intercept(), *spread = of.spread();
  auto apply = [=](int64_t r) {
    const X* of_x = x + r * channels;
    const DY* of_dy = dy + r * channels;
    X* to = dx + r * channels;
#pragma omp simd
    for (int64_t j = 0; j < channels; ++j) {
      const float u = (load(of_x[j]) * factor[j] - shift[j]) - low_mean[j];
      store(to + j, factor[j] * (slope[j] * load(of_dy[j]) + intercept[j] + u * spread[j]));
    }
  };
  rows.split(all, apply, [=](int64_t r) { std::fill_n(dx + r * channels, channels, X{}); });
}

template <typename X, typename DY>
void backward_channels(ffi::ThreadPool& pool, const Backward& call, const X* x, const DY* dy, X* dx) {
  const Shape& shape = call.shape;
  const int64_t channels = shape.channels();
  const Chunks chunks(shape, call.mask, pool.num_threads());
  ParameterSums parameters(shape.n, channels);
  auto make = [&] {
    return Example(shape, chunks, call.recompute ? Example::kBoth : Example::kGradients, Example::kBackward);
  };
  auto recompute = [&](Example& example, int64_t n) {
    merge_chunks(shape, chunks, call.options, n, example);
    spread_stats(shape, call.rule, chunks.group_size(shape, n), example);
    recenter_gradients(chunks, channels, example);
  };
  auto take = [&](Example& example, int64_t n) {
    for (int64_t i = 0; i < shape.g; ++i) example.groups[i] = call.residuals(n * shape.g + i);
    spread_stats(shape, call.rule, chunks.group_size(shape, n), example);
  };
  auto sum = [&](Example& example, int64_t n, int64_t k) {
    const int64_t start = chunks.start(shape, n, k);
    sum_gradients(chunks.unmasked(n, k), channels, example.channels, example.sums(k), x + start, dy + start);
  };
  auto merge = [&](Example& example, int64_t n) {
    merge_gradients(call, chunks, n, example, parameters.dscale(n), parameters.dbias(n));
  };
  auto apply = [&](Example& example, int64_t n, int64_t k) {
    const int64_t start = chunks.start(shape, n, k);
    apply_gradients(chunks.size(shape, k), chunks.unmasked(n, k), channels, example.channels, x + start, dy + start,
                    dx + start);
  };
  if (call.recompute)
    run_stages(pool, shape, chunks, make, sum_chunks(shape, chunks, call.options, x, dy), recompute, merge, apply);
  else run_stages(pool, shape, chunks, make, take, sum, merge, apply);
  parameters.add_up(shape.s, call.dscale, call.dbias);
}

}  // namespace
