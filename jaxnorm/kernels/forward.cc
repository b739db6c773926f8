// The frame, mean and variance of every set, and the output where x is likely to be in the cache still.

#include <numeric>

#include "pages.h"
#include "rule.h"
#include "sets.h"
#include "stats.h"

namespace {

// Whether float32 holds squares of numbers of this size, and of deviations as small as their last bit.
inline bool ordinary(double size) { return size == 0 || (size > 1e-7 && size < 1e17); }

// What is to be known about sets: arrays of the results.
struct Stats {
  float *pivot, *offset, *var, *power;
  bool centered;
  int64_t lowest;  // least power of two, INT64_MIN for none

  bool full_range() const { return lowest != INT64_MIN; }

  // Of the exact mean and variance; returns the power, which sets of an ordinary size do without.
  int set(int64_t i, double mean, double var_) const {
    int exponent = 0;
    const double square = mean * mean + var_;
    if (full_range() && !ordinary(std::sqrt(square))) {
      if (std::isfinite(square)) std::frexp(std::sqrt(square), &exponent);
      exponent = int(std::clamp<int64_t>(exponent, std::max<int64_t>(lowest, -126), 126));
    }
    if (exponent) {
      mean = std::ldexp(mean, -exponent);
      var_ = std::ldexp(var_, -2 * exponent);
    }
    power[i] = float(exponent);
    pivot[i] = float(mean);
    offset[i] = float(mean - pivot[i]);
    var[i] = float(var_);
    return exponent;
  }
};

template <typename X, typename Y>
void forward_row(const Shape& shape, const Rule& rule, const X* x, const float* scale, const float* bias,
                 const Stats& stats, int64_t first, Y* y) {
  const int64_t d = shape.d;
  for (int64_t g = 0; g < shape.g; ++g, x += d, y += d, scale += d, bias += d) {
    double sum = 0, square = 0;
    if (stats.centered) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < d; ++i) sum += load(x[i]);
    }
    const double mean = sum / d;
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < d; ++i) {
      const double u = load(x[i]) - mean;
      square += u * u;
    }
    const int power = stats.set(first + g, mean, square / d);
    const float rstd = float(rule.rstd(stats.var[first + g], d, power)), factor = factor_of(power);
    const float pivot = stats.pivot[first + g], offset = stats.offset[first + g];
#pragma omp simd
    for (int64_t i = 0; i < d; ++i) store(y + i, ((load(x[i]) * factor - pivot) - offset) * rstd * scale[i] + bias[i]);
  }
}

// Means and sums of squared deviations of each channel over the rows of a chunk.
template <typename X>
void chunk_stats(const X* x, int64_t rows, int64_t c, const Stats& stats, double* mean, double* square) {
  bool held = true;
  for (int64_t first = 0; first < c; first += kStrip)
    held &= strip_stats(rows, std::min(kStrip, c - first), stats.centered, mean + first, square + first,
                        [&](int64_t r, int64_t j) { return load(x[r * c + first + j]); });
  if (stats.full_range() && !held) stats_in_double(x, rows, c, stats.centered, mean, square);
}

// Runs `apply` on each chunk of an n when its sets are known.
template <typename X, typename Apply>
void statistics(ffi::ThreadPool& pool, const Shape& shape, const Chunks& chunks, const X* x, const Stats& stats, Apply apply) {
  const int64_t c = shape.c(), g = shape.g, d = shape.d;
  std::vector<double> parts(shape.n * chunks.count * 2 * c);
  auto reduce = [&](int64_t n, int64_t k) {
    double* part = parts.data() + (n * chunks.count + k) * 2 * c;
    chunk_stats(x + (n * shape.p + k * chunks.rows) * c, chunks.size(shape, k), c, stats, part, part + c);
  };
  auto combine = [&](int64_t n) {
    const double *part = parts.data() + n * chunks.count * 2 * c, total = double(shape.p) * d;
    std::vector<double> mean(c), square(c);
    for (int64_t k = 0; k < chunks.count; ++k)
      for (int64_t j = 0; j < c; ++j) mean[j] += chunks.size(shape, k) * part[k * 2 * c + j];
    for (int64_t i = 0; i < g; ++i) {
      const double sum = std::accumulate(&mean[i * d], &mean[i * d] + d, 0.0);
      std::fill(&mean[i * d], &mean[i * d] + d, sum / total);
    }
    for (int64_t k = 0; k < chunks.count; ++k)
      for (int64_t j = 0; j < c; ++j) {
        const double u = stats.centered ? part[k * 2 * c + j] - mean[j] : 0;
        square[j] += part[(k * 2 + 1) * c + j] + chunks.size(shape, k) * u * u;
      }
    for (int64_t i = 0; i < g; ++i)
      stats.set(n * g + i, mean[i * d], std::accumulate(&square[i * d], &square[i * d] + d, 0.0) / total);
  };
  by_chunks(pool, shape, chunks, reduce, combine, apply);
}

template <typename X, typename Y>
void forward(ffi::ThreadPool& pool, const Shape& shape, const Rule& rule, const X* x, const float* scale, const float* bias,
             const Stats& stats, Y* y) {
  const int64_t c = shape.c(), g = shape.g, d = shape.d;
  if (shape.p == 1) {
    const int64_t rows = std::max<int64_t>(1, kChunk / c);
    in_parallel(pool, (shape.n + rows - 1) / rows, [&](int64_t task) {
      for (int64_t n = task * rows; n < std::min(shape.n, (task + 1) * rows); ++n)
        forward_row(shape, rule, x + n * c, shape.of(scale, n), shape.of(bias, n), stats, n * g, y + n * c);
    });
    return;
  }
  const Chunks chunks(shape, pool.num_threads());
  statistics(pool, shape, chunks, x, stats, [&](int64_t n, int64_t k) {
    std::vector<float> each(4 * c + 2 * g);
    float *factor = each.data(), *pivot = factor + c, *offset = pivot + c, *slope = offset + c, *factors = slope + c, *rstd = factors + g;
    const float *scales = shape.of(scale, n), *shift = shape.of(bias, n);
    for (int64_t i = 0; i < g; ++i) {
      const int power = int(stats.power[n * g + i]);
      factors[i] = factor_of(power);
      rstd[i] = float(rule.rstd(stats.var[n * g + i], double(shape.p) * d, power));
    }
    spread(shape, factors, factor);
    spread(shape, stats.pivot + n * g, pivot);
    spread(shape, stats.offset + n * g, offset);
    spread(shape, rstd, slope);
    for (int64_t j = 0; j < c; ++j) slope[j] *= scales[j];
    const int64_t start = (n * shape.p + k * chunks.rows) * c;
    for (int64_t r = 0; r < chunks.size(shape, k); ++r) {
      const X* from = x + start + r * c;
      Y* to = y + start + r * c;
#pragma omp simd
      for (int64_t j = 0; j < c; ++j) store(to + j, ((load(from[j]) * factor[j] - pivot[j]) - offset[j]) * slope[j] + shift[j]);
    }
  });
}

ffi::Error forward_call(ffi::ThreadPool pool, Any x, F32 scale, F32 bias, ffi::Result<Any> y,
                        ffi::Result<F32> pivot, ffi::Result<F32> offset, ffi::Result<F32> var,
                        ffi::Result<F32> power, int64_t p, int64_t g, int64_t d, double epsilon, double correction,
                        bool in_std, bool centered, int64_t lowest) {
  const Shape shape = shape_of(x, scale, p, g, d);
  const Rule rule{epsilon, correction, in_std};
  const Stats stats{pivot->typed_data(), offset->typed_data(), var->typed_data(), power->typed_data(), centered, lowest};
  return typed(x.element_type(), y->element_type(), [&](auto* of_x, auto* of_y) {
    forward(pool, shape, rule, (decltype(of_x))x.untyped_data(), scale.typed_data(), bias.typed_data(), stats,
            (decltype(of_y))in_large_pages(y));
  });
}

ffi::Error statistics_call(ffi::ThreadPool pool, Any x, ffi::Result<F32> pivot, ffi::Result<F32> offset, ffi::Result<F32> var,
                           ffi::Result<F32> power, int64_t p, int64_t g, int64_t d, bool centered, int64_t lowest) {
  const Shape shape{int64_t(x.element_count()) / (p * g * d), p, g, d, 1};
  const Stats stats{pivot->typed_data(), offset->typed_data(), var->typed_data(), power->typed_data(), centered, lowest};
  return typed(x.element_type(), x.element_type(), [&](auto* of_x, auto*) {
    const Chunks chunks(shape, pool.num_threads());
    statistics(pool, shape, chunks, (decltype(of_x))x.untyped_data(), stats, nullptr);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormForward, forward_call,
                              giving<4>(taking<2>(on_threads().Arg<Any>()).Ret<Any>())
                                  .Attr<int64_t>("p")
                                  .Attr<int64_t>("g")
                                  .Attr<int64_t>("d")
                                  .Attr<double>("epsilon")
                                  .Attr<double>("correction")
                                  .Attr<bool>("in_std")
                                  .Attr<bool>("centered")
                                  .Attr<int64_t>("lowest"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormStatistics, statistics_call,
                              giving<4>(on_threads().Arg<Any>())
                                  .Attr<int64_t>("p")
                                  .Attr<int64_t>("g")
                                  .Attr<int64_t>("d")
                                  .Attr<bool>("centered")
                                  .Attr<int64_t>("lowest"));
