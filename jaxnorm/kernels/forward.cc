// The frame, mean and variance of every set, and the output where x is likely to be in the cache still.

#include "moments.h"
#include "pages.h"

namespace {

constexpr int64_t kFew = 4096;     // bytes of the rows that are worked on together: each step finds them in the nearest cache
constexpr int64_t kMostRows = 16;  // and how many rows at most

// Sets of d neighbouring numbers: a few at a time, step by step, so that the sums of one need not wait for those of another.
template <typename X, typename Y>
void forward_rows(const Shape& shape, const Rule& rule, const X* x, const float* scale, const float* bias, const Stats& stats,
                  int64_t first, int64_t count, Y* y) {
  const int64_t d = shape.d;
  float rstd[kMostRows];
  Set of[kMostRows];
  stats.rows(x, d, first, count, of);
  rule.rstds(of, count, d, rstd);
  for (int64_t row = 0; row < count; ++row) {
    const float *scales = shape.of_set(scale, first + row), *shift = shape.of_set(bias, first + row);
    const float factor = factor_of(of[row].power), pivot = of[row].pivot, offset = of[row].offset, r = rstd[row];
    const X* from = x + (first + row) * d;
    Y* to = y + (first + row) * d;
#pragma omp simd
    for (int64_t i = 0; i < d; ++i) store(to + i, ((load(from[i]) * factor - pivot) - offset) * r * scales[i] + shift[i]);
  }
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
  auto merge = [&](Known& known, int64_t n) {
    merge_stats(shape, chunks, stats, n, known);
    spread_frames(shape, rule, known);
    float* slope = known.each.data() + 3 * c;
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
  in_stages(pool, shape, chunks, [&] { return Known(shape, chunks, 2, 4); }, reduce_to_stats(shape, chunks, stats, x), merge, apply);
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
    auto merge = [&](Known& known, int64_t n) { merge_stats(shape, chunks, stats, n, known); };
    auto reduce = reduce_to_stats(shape, chunks, stats, (decltype(of_x))x.untyped_data());
    in_stages(pool, shape, chunks, [&] { return Known(shape, chunks, 2, 0); }, reduce, merge);
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
