// The statistics of every normalization group, and the output y = (u - low_mean) rstd scale + bias, with u as in
// group_stats.h.

#include "pages.h"
#include "statistics.h"

namespace {

constexpr int64_t kBlockBytes = 8192;  // of rows that are worked on together: each step finds them in the nearest cache
constexpr int64_t kMostRows = 16;      // of such a block

// Results for each group; null where nobody asks.
struct StatsResults {
  float *shift, *low_mean, *var, *exponent;

  static StatsResults read(Buffers& buffers, int64_t groups) {
    auto next = [&] {
      const Array<float> result = buffers.result();
      if (result.size == groups) return result.data;
      if (result.data) *result.data = 0;  // one element stands for a result that is not asked for
      return static_cast<float*>(nullptr);
    };
    return {next(), next(), next(), next()};
  }

  void write(int64_t first, int64_t count, const GroupStats* stats) const {
    auto store = [=](float* to, auto field) {
      for (int64_t i = 0; to && i < count; ++i) to[first + i] = float(stats[i].*field);
    };
    store(shift, &GroupStats::shift);
    store(low_mean, &GroupStats::low_mean);
    store(var, &GroupStats::var);
    store(exponent, &GroupStats::exponent);
  }
};

struct Forward {
  Shape shape;
  Mask mask;
  Rule rule;
  StatsOptions options;
  StatsResults results;
  const float *scale, *bias;
};

// Some groups that are rows: each step for all of them, so that the sums of one need not wait for those of another.
template <typename X, typename Y>
void normalize_rows(const Forward& call, int64_t first, int64_t count, const X* x, Y* y) {
  const int64_t d = call.shape.d;
  float rstd[kMostRows];
  GroupStats stats[kMostRows];
  stats_of_rows(call.options, x + first * d, d, count, stats);
  for (int64_t row = 0; row < count; ++row)
    if (call.mask.hides((first + row) / call.shape.g)) stats[row] = {};
  call.results.write(first, count, stats);
  call.rule.rstds(stats, count, d, rstd);
  for (int64_t row = 0; row < count; ++row) {
    const float *scale = call.shape.of_group(call.scale, first + row),
                *bias = call.shape.of_group(call.bias, first + row);
    const float factor = factor_of(stats[row].exponent), shift = stats[row].shift, low_mean = stats[row].low_mean,
                r = rstd[row];
    const X* from = x + (first + row) * d;
    Y* to = y + (first + row) * d;
    if (call.mask.hides((first + row) / call.shape.g)) {
      std::fill(to, to + d, Y{});
      continue;
    }
#pragma omp simd
    for (int64_t i = 0; i < d; ++i)
      store(to + i, ((load(from[i]) * factor - shift) - low_mean) * r * scale[i] + bias[i]);
  }
}

template <typename X, typename Y>
void forward_rows(ffi::ThreadPool& pool, const Forward& call, const X* x, Y* y) {
  const int64_t d = call.shape.d, groups = call.shape.groups(), of_task = std::max<int64_t>(1, kChunk / d);
  const int64_t of_block = std::clamp<int64_t>(kBlockBytes / (d * int64_t(sizeof(X))), 1, kMostRows);
  run_in_parallel(pool, (groups + of_task - 1) / of_task, [&](int64_t task) {
    const int64_t end = std::min(groups, (task + 1) * of_task);
    for (int64_t i = task * of_task; i < end; i += of_block) normalize_rows(call, i, std::min(of_block, end - i), x, y);
  });
}

template <typename X, typename Y>
void normalize_chunk(int64_t all, const Rows& rows, int64_t channels, Channels& of, const float* bias, const X* x,
                     Y* y) {
  const float *factor = of.factor(), *shift = of.shift(), *low_mean = of.low_mean(), *slope = of.slope();
  auto normalize = [=](int64_t r) {
    const X* from = x + r * channels;
    Y* to = y + r * channels;
#pragma omp simd
    for (int64_t j = 0; j < channels; ++j)
      store(to + j, ((load(from[j]) * factor[j] - shift[j]) - low_mean[j]) * slope[j] + bias[j]);
  };
  rows.split(all, normalize, [=](int64_t r) { std::fill_n(y + r * channels, channels, Y{}); });
}

template <typename X, typename Y>
void forward_channels(ffi::ThreadPool& pool, const Forward& call, const X* x, Y* y) {
  const Shape& shape = call.shape;
  const int64_t channels = shape.channels();
  const Chunks chunks(shape, call.mask, pool.num_threads());
  auto make = [&] { return Example(shape, chunks, Example::kMoments, Example::kForward); };
  auto merge = [&](Example& example, int64_t n) {
    merge_chunks(shape, chunks, call.options, n, example);
    call.results.write(n * shape.g, shape.g, example.groups.data());
    spread_stats(shape, call.rule, chunks.group_size(shape, n), example);
    float* slope = example.channels.slope();
    const float* scale = shape.of_example(call.scale, n);
    for (int64_t j = 0; j < channels; ++j) slope[j] *= scale[j];
  };
  auto apply = [&](Example& example, int64_t n, int64_t k) {
    const int64_t start = chunks.start(shape, n, k);
    normalize_chunk(chunks.size(shape, k), chunks.unmasked(n, k), channels, example.channels,
                    shape.of_example(call.bias, n), x + start, y + start);
  };
  run_stages(pool, shape, chunks, make, sum_chunks(shape, chunks, call.options, x), merge, apply);
}

ffi::Error forward(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results, Shape sizes,
                   Rule rule, StatsOptions options) {
  Buffers buffers(arguments, results);
  const AnyArray x = buffers.any_argument(), y = buffers.any_result();
  const Array<const float> scale = buffers.argument(), bias = buffers.argument();
  const Shape shape = sizes.of_arrays(x.size, scale.size);
  const Mask mask(buffers.argument<ffi::PRED>(), shape);
  const Forward call{shape, mask, rule, options, StatsResults::read(buffers, shape.groups()), scale.data, bias.data};
  if (buffers.error().failure()) return buffers.error();
  return with_elements(x, y, [&](auto* x, auto* y_elements) {
    prefer_large_pages(y_elements, y.size);
    shape.p == 1 ? forward_rows(pool, call, x, y_elements) : forward_channels(pool, call, x, y_elements);
  });
}

// The statistics alone.
ffi::Error statistics(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results, Shape sizes,
                      StatsOptions options) {
  Buffers buffers(arguments, results);
  const AnyArray x = buffers.any_argument();
  const Shape shape = sizes.of_arrays(x.size, sizes.g * sizes.d);
  const Mask mask(buffers.argument<ffi::PRED>(), shape);
  const StatsResults to = StatsResults::read(buffers, shape.groups());
  if (buffers.error().failure()) return buffers.error();
  return with_elements(x, [&](auto* elements) {
    const Chunks chunks(shape, mask, pool.num_threads());
    auto make = [&] { return Example(shape, chunks, Example::kMoments, Example::kNothing); };
    auto merge = [&](Example& example, int64_t n) {
      merge_chunks(shape, chunks, options, n, example);
      to.write(n * shape.g, shape.g, example.groups.data());
    };
    run_stages(pool, shape, chunks, make, sum_chunks(shape, chunks, options, elements), merge);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormForward, forward,
                              bind_buffers().Attr<Shape>("shape").Attr<Rule>("rule").Attr<StatsOptions>("stats"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormStatistics, statistics,
                              bind_buffers().Attr<Shape>("shape").Attr<StatsOptions>("stats"));
