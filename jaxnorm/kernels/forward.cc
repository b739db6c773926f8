// The frame, mean and variance of every set, and the output where x is likely to be in the cache still.

#include "pages.h"
#include "rule.h"
#include "sets.h"
#include "stats.h"

namespace {

constexpr int64_t kFew = 4096;     // bytes of the rows that are worked on together: each step finds them in the nearest cache
constexpr int64_t kMostRows = 16;  // and how many rows at most

// What is known of a set.
struct Set {
  float pivot, offset, var;
  int power;
};

// What is to be known of sets, and the results that say it; null where nobody asks.
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
};

// Sets of d neighbouring numbers: a few at a time, step by step, so that the sums of one need not wait for those of another.
template <typename X, typename Y>
void forward_rows(const Shape& shape, const Rule& rule, const X* x, const float* scale, const float* bias, const Stats& stats,
                  int64_t first, int64_t count, Y* y) {
  const int64_t d = shape.d;
  double mean[kMostRows] = {}, var[kMostRows];
  float rstd[kMostRows];
  Set of[kMostRows];
  x += first * d;
  y += first * d;
  auto row_of = stats.centered ? row_stats<true, X> : row_stats<false, X>;
  for (int64_t row = 0; row < count; ++row) row_of(x + row * d, d, mean + row, var + row);
  for (int64_t row = 0; row < count; ++row) of[row] = stats.set(first + row, mean[row], var[row]);
  rule.rstds(count, d, rstd, [&](int64_t row) { return of[row].var; }, [&](int64_t row) { return of[row].power; });
  for (int64_t row = 0; row < count; ++row) {
    const float *scales = shape.of_set(scale, first + row), *shift = shape.of_set(bias, first + row);
    const float factor = factor_of(of[row].power), pivot = of[row].pivot, offset = of[row].offset, r = rstd[row];
    const X* from = x + row * d;
    Y* to = y + row * d;
#pragma omp simd
    for (int64_t i = 0; i < d; ++i) store(to + i, ((load(from[i]) * factor - pivot) - offset) * r * scales[i] + shift[i]);
  }
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

// What is known of an n: means and squares of every chunk, then the sets, then for each channel factor, pivot, offset, slope.
struct Known {
  std::vector<double> parts;
  std::vector<Set> sets;
  std::vector<float> each;
};

// Of the means and squares of chunks the sets.
void merge(const Shape& shape, const Chunks& chunks, const Stats& stats, int64_t n, Known& known) {
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

// Runs then(known, n) and, unless it is null, apply(known, n, k) on each chunk when the sets of an n are known.
template <typename X, typename Then, typename Apply>
void statistics(ffi::ThreadPool& pool, const Shape& shape, const Chunks& chunks, const X* x, const Stats& stats, Then then,
                Apply apply) {
  const int64_t c = shape.c();
  auto make = [&](int64_t) { return Known{std::vector<double>(chunks.count * 2 * c), std::vector<Set>(shape.g), {}}; };
  auto reduce = [&](Known& known, int64_t n, int64_t k) {
    double* part = known.parts.data() + k * 2 * c;
    chunk_stats(x + (n * shape.p + k * chunks.rows) * c, chunks.size(shape, k), c, stats, part, part + c);
  };
  auto combine = [&](Known& known, int64_t n) {
    merge(shape, chunks, stats, n, known);
    then(known, n);
  };
  by_chunks(pool, shape, chunks, make, reduce, combine, apply);
}

template <typename X, typename Y>
void forward(ffi::ThreadPool& pool, const Shape& shape, const Rule& rule, const X* x, const float* scale, const float* bias,
             const Stats& stats, Y* y) {
  const int64_t c = shape.c();
  if (shape.p == 1) {
    const int64_t sets = shape.sets(), rows = std::max<int64_t>(1, kChunk / shape.d);
    const int64_t few = std::clamp<int64_t>(kFew / (shape.d * int64_t(sizeof(X))), 1, kMostRows);
    in_parallel(pool, (sets + rows - 1) / rows, [&](int64_t task) {
      const int64_t end = std::min(sets, (task + 1) * rows);
      for (int64_t i = task * rows; i < end; i += few)
        forward_rows(shape, rule, x, scale, bias, stats, i, std::min(few, end - i), y);
    });
    return;
  }
  const Chunks chunks(shape, pool.num_threads());
  auto prepare = [&](Known& known, int64_t n) {
    const std::vector<Set>& sets = known.sets;
    known.each.resize(4 * c);
    float *factor = known.each.data(), *pivot = factor + c, *offset = pivot + c, *slope = offset + c;
    std::vector<float> rstd(shape.g);
    auto var = [&](int64_t i) { return sets[i].var; };
    rule.rstds(shape.g, double(shape.p) * shape.d, rstd.data(), var, [&](int64_t i) { return sets[i].power; });
    spread(shape, factor, [&](int64_t i) { return factor_of(sets[i].power); });
    spread(shape, pivot, [&](int64_t i) { return sets[i].pivot; });
    spread(shape, offset, [&](int64_t i) { return sets[i].offset; });
    spread(shape, slope, [&](int64_t i) { return rstd[i]; });
    const float* scales = shape.of(scale, n);
    for (int64_t j = 0; j < c; ++j) slope[j] *= scales[j];
  };
  auto apply = [&](const Known& known, int64_t n, int64_t k) {
    const float *factor = known.each.data(), *pivot = factor + c, *offset = pivot + c, *slope = offset + c, *shift = shape.of(bias, n);
    const int64_t start = (n * shape.p + k * chunks.rows) * c;
    for (int64_t i = start; i < start + chunks.size(shape, k) * c; i += c) {
#pragma omp simd
      for (int64_t j = 0; j < c; ++j) store(y + i + j, ((load(x[i + j]) * factor[j] - pivot[j]) - offset[j]) * slope[j] + shift[j]);
    }
  };
  statistics(pool, shape, chunks, x, stats, prepare, apply);
}

// Where a result says something of each set; one of a single element is not asked for.
float* wanted(ffi::Result<F32>& result, int64_t sets) {
  float* data = result->typed_data();
  if (int64_t(result->element_count()) == sets) return data;
  *data = 0;
  return nullptr;
}

ffi::Error forward_call(ffi::ThreadPool pool, Any x, F32 scale, F32 bias, ffi::Result<Any> y,
                        ffi::Result<F32> pivot, ffi::Result<F32> offset, ffi::Result<F32> var,
                        ffi::Result<F32> power, int64_t p, int64_t g, int64_t d, double epsilon, double correction,
                        bool in_std, bool centered, int64_t lowest) {
  const Shape shape = shape_of(x, scale, p, g, d);
  const Rule rule{epsilon, correction, in_std};
  auto of = [&](ffi::Result<F32>& result) { return wanted(result, shape.sets()); };
  const Stats stats{of(pivot), of(offset), of(var), of(power), centered, lowest};
  return typed(x.element_type(), y->element_type(), [&](auto* of_x, auto* of_y) {
    forward(pool, shape, rule, (decltype(of_x))x.untyped_data(), scale.typed_data(), bias.typed_data(), stats,
            (decltype(of_y))in_large_pages(y));
  });
}

ffi::Error statistics_call(ffi::ThreadPool pool, Any x, ffi::Result<F32> pivot, ffi::Result<F32> offset, ffi::Result<F32> var,
                           ffi::Result<F32> power, int64_t p, int64_t g, int64_t d, bool centered, int64_t lowest) {
  const Shape shape{int64_t(x.element_count()) / (p * g * d), p, g, d, 1};
  auto of = [&](ffi::Result<F32>& result) { return wanted(result, shape.sets()); };
  const Stats stats{of(pivot), of(offset), of(var), of(power), centered, lowest};
  return typed(x.element_type(), x.element_type(), [&](auto* of_x, auto*) {
    const Chunks chunks(shape, pool.num_threads());
    statistics(pool, shape, chunks, (decltype(of_x))x.untyped_data(), stats, [](Known&, int64_t) {}, nullptr);
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
