// The passes over arrays (N, P, C) that norms are made of which blend the statistics of several sets: each (n, c) is
// looked at in its frame, u = x * factor - pivot, and has numbers of its own. A thread takes some channels of one n
// through all positions, so that sums have one order. Per (n, c) arrays are (N, C).

#include "numbers.h"
#include "pages.h"
#include "parallel.h"
#include "stats.h"

namespace {

struct Shape {
  int64_t n, p, c;
};

// Calls run(first element of x, of the arrays of channels, channels) for strips of channels.
template <typename Run>
void over_strips(ffi::ThreadPool& pool, const Shape& shape, Run run) {
  const int64_t strips = (shape.c + kStrip - 1) / kStrip;
  in_parallel(pool, shape.n * strips, [&](int64_t task) {
    const int64_t n = task / strips, first = task % strips * kStrip;
    run(n * shape.p * shape.c + first, n * shape.c + first, std::min(kStrip, shape.c - first));
  });
}

template <typename X>
void moments(ffi::ThreadPool& pool, const Shape& shape, const X* x, const float* factor, float* pivot, float* offset, float* var) {
  over_strips(pool, shape, [&](int64_t from, int64_t at, int64_t width) {
    double mean[kStrip], square[kStrip];
    strip_stats(shape.p, width, true, mean, square, [&](int64_t r, int64_t j) { return load(x[from + r * shape.c + j]) * factor[at + j]; });
    for (int64_t j = 0; j < width; ++j) {
      pivot[at + j] = float(mean[j]);
      offset[at + j] = float(mean[j] - pivot[at + j]);
      var[at + j] = float(square[j] / shape.p);
    }
  });
}

// Sums of ct and of ct (u - mean).
template <typename X, typename Y>
void products(ffi::ThreadPool& pool, const Shape& shape, const X* x, const Y* ct, const float* factor, const float* pivot,
              const float* mean, float* alone, float* product) {
  over_strips(pool, shape, [&](int64_t from, int64_t at, int64_t width) {
    double sums[2][kStrip];
    sum_rows(shape.p, width, sums, [&](int64_t r, int64_t j, int64_t place, auto& few) {
      const float cotangent = load(ct[from + r * shape.c + j]), v = load(x[from + r * shape.c + j]);
      few[0][place] += cotangent;
      few[1][place] += cotangent * ((v * factor[at + j] - pivot[at + j]) - mean[at + j]);
    });
    for (int64_t j = 0; j < width; ++j) {
      alone[at + j] = float(sums[0][j]);
      product[at + j] = float(sums[1][j]);
    }
  });
}

// dx = factor (ct slope + (u - offset) spread + shift)
template <typename X, typename Y>
void back(ffi::ThreadPool& pool, const Shape& shape, const X* x, const Y* ct, const float* factor, const float* pivot,
          const float* offset, const float* slope, const float* spread, const float* shift, X* dx) {
  over_strips(pool, shape, [&](int64_t from, int64_t at, int64_t width) {
    for (int64_t row = from; row < from + shape.p * shape.c; row += shape.c)
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) {
        const float u = (load(x[row + j]) * factor[at + j] - pivot[at + j]) - offset[at + j];
        store(dx + row + j, factor[at + j] * (load(ct[row + j]) * slope[at + j] + u * spread[at + j] + shift[at + j]));
      }
  });
}

Shape shape_of(const Any& x, const F32& each, int64_t c) {
  const int64_t sets = int64_t(each.element_count());
  return {sets / c, int64_t(x.element_count()) / sets, c};
}

ffi::Error moments_call(ffi::ThreadPool pool, Any x, F32 factor, ffi::Result<F32> pivot, ffi::Result<F32> offset, ffi::Result<F32> var,
                        int64_t c) {
  return typed(x.element_type(), x.element_type(), [&](auto* of_x, auto*) {
    moments(pool, shape_of(x, factor, c), (decltype(of_x))x.untyped_data(), factor.typed_data(), pivot->typed_data(), offset->typed_data(),
            var->typed_data());
  });
}

ffi::Error products_call(ffi::ThreadPool pool, Any x, Any ct, F32 factor, F32 pivot, F32 mean, ffi::Result<F32> alone,
                         ffi::Result<F32> product, int64_t c) {
  return typed(x.element_type(), ct.element_type(), [&](auto* of_x, auto* of_ct) {
    products(pool, shape_of(x, factor, c), (decltype(of_x))x.untyped_data(), (decltype(of_ct))ct.untyped_data(), factor.typed_data(),
             pivot.typed_data(), mean.typed_data(), alone->typed_data(), product->typed_data());
  });
}

ffi::Error back_call(ffi::ThreadPool pool, Any x, Any ct, F32 factor, F32 pivot, F32 offset, F32 slope, F32 spread, F32 shift,
                     ffi::Result<Any> dx, int64_t c) {
  return typed(x.element_type(), ct.element_type(), [&](auto* of_x, auto* of_ct) {
    back(pool, shape_of(x, factor, c), (decltype(of_x))x.untyped_data(), (decltype(of_ct))ct.untyped_data(), factor.typed_data(),
         pivot.typed_data(), offset.typed_data(), slope.typed_data(), spread.typed_data(), shift.typed_data(),
         (decltype(of_x))in_large_pages(dx));
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormMoments, moments_call, giving<3>(taking<1>(on_threads().Arg<Any>())).Attr<int64_t>("c"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormProducts, products_call,
                              giving<2>(taking<3>(on_threads().Arg<Any>().Arg<Any>())).Attr<int64_t>("c"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormBack, back_call,
                              taking<6>(on_threads().Arg<Any>().Arg<Any>()).Ret<Any>().Attr<int64_t>("c"));
