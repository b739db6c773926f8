// Switchable norm: the statistics, and the output.

#include <memory>
#include <vector>

#include "instances.h"
#include "pages.h"

namespace {

// The statistics of each instance, (B, N, 3, C), each n, (B, 3, N), and each c, (B, 3, C), of which `var` are the variances alone.
// What is given of c stands in for what would be merged.
template <typename X>
void statistics(ffi::ThreadPool& pool, const Shape& shape, const X* x, const float* given, float* instances, float* layer, float* batch,
                float* var) {
  const int64_t n = shape.n, c = shape.c, strips = shape.strips();
  const Blocks blocks(shape);
  std::vector<double> of_layers(shape.b * n * strips * 2), of_batch(shape.b * blocks.count * 2 * c);
  auto find = [&](int64_t b, int64_t block, int64_t start, int64_t end, int64_t strip, int64_t first, int64_t width) {
    double *mean = of_batch.data() + (b * blocks.count + block) * 2 * c + first, *square = mean + c;
    for (int64_t i = start; i < end; ++i) {
      const Instances of(shape, x + (b * n + i) * shape.p * c + first, width);
      double *part = of_layers.data() + ((b * n + i) * strips + strip) * 2, sum = 0, around = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < width; ++j) sum += of.mean[j];
      part[0] = sum / width;
#pragma omp simd reduction(+ : around)
      for (int64_t j = 0; j < width; ++j) around += of.var[j] + (of.mean[j] - sum / width) * (of.mean[j] - sum / width);
      part[1] = around;
      for (int64_t j = 0; j < width; ++j) add(i - start, mean[j], square[j], 1, of.mean[j], of.var[j]);
      float* kept = instances + (b * n + i) * kTold * c + first;
      for (int64_t j = 0; j < width; ++j) tell(kept, c, j, of.mean[j], of.var[j]);
    }
  };
  auto merge = [&](int64_t b) {
    const double* part = of_layers.data() + b * n * strips * 2;
    for (int64_t i = 0; i < n; ++i) {
      double mean = 0, square = 0;
      for (int64_t strip = 0; strip < strips; ++strip, part += 2)
        add(strip * shape.strip(), mean, square, std::min(shape.strip(), c - strip * shape.strip()), part[0], part[1]);
      tell(layer + b * kTold * n, n, i, mean, square / c);
    }
    double *mean = of_batch.data() + b * blocks.count * 2 * c, *square = mean + c, *more = square + c;
    for (int64_t block = 1; block < blocks.count; ++block, more += 2 * c) {
      const int64_t before = block * blocks.rows, rows = std::min(blocks.rows, n - before);
      for (int64_t j = 0; j < c; ++j) add(before, mean[j], square[j], rows, more[j], more[c + j]);
    }
    for (int64_t j = 0; j < c; ++j) tell(batch + b * kTold * c, c, j, mean[j], square[j] / n);
    for (int64_t j = 0; j < c; ++j) var[b * c + j] = float(square[j] / n);
    if (given) std::copy(given + b * kTold * c, given + (b + 1) * kTold * c, batch + b * kTold * c);
  };
  over_blocks(pool, shape, find, merge);
}

template <typename X, typename Y>
void forward(ffi::ThreadPool& pool, const Shape& shape, const X* x, const float* weights, const float* given, const float* scale,
             const float* bias, double epsilon, float* layer, float* batch, float* var, Y* y) {
  const int64_t c = shape.c, each = shape.n * shape.p * c;
  const std::unique_ptr<float[]> instances(new float[shape.b * shape.n * kTold * c]);
  statistics(pool, shape, x, given, instances.get(), layer, batch, var);
  auto run = [&](int64_t b, int64_t, int64_t start, int64_t end, int64_t, int64_t first, int64_t width) {
    for (int64_t i = start; i < end; ++i) {
      const Instances of(shape, instances.get(), b * shape.n + i, first, width);
      Applied a(of, Merged(shape, layer, batch, b), Weights(weights + b * 6), epsilon, i, first, width);
      const float *gain = scale + shape.scale(b, i) + first, *shift = bias + shape.scale(b, i) + first;
      for (int64_t j = 0; j < width; ++j) a.root[j] *= gain[j];
      const int64_t from = b * each + i * shape.p * c + first;
      for (int64_t row = from; row < from + shape.p * c; row += c)
#pragma omp simd
        for (int64_t j = 0; j < width; ++j)
          store(y + row + j, ((load(x[row + j]) * a.factor[j] - a.pivot[j]) - a.offset[j]) * a.root[j] + shift[j]);
    }
  };
  over_blocks(pool, shape, run, [](int64_t) {});
}

// What is applied of each instance, four arrays (B, N, C), for XLA to do so.
void blend(ffi::ThreadPool& pool, const Shape& shape, const float* instances, const float* weights, double epsilon, const float* layer,
           const float* batch, float* pivot, float* offset, float* root, float* power) {
  const int64_t n = shape.n, c = shape.c;
  auto run = [&](int64_t b, int64_t, int64_t start, int64_t end, int64_t, int64_t first, int64_t width) {
    for (int64_t i = start; i < end; ++i) {
      const Instances of(shape, instances, b * n + i, first, width);
      const Applied a(of, Merged(shape, layer, batch, b), Weights(weights + b * 6), epsilon, i, first, width);
      const int64_t at = (b * n + i) * c + first;
      std::copy(a.pivot, a.pivot + width, pivot + at);
      std::copy(a.offset, a.offset + width, offset + at);
      std::copy(a.root, a.root + width, root + at);
      std::copy(a.power, a.power + width, power + at);
    }
  };
  over_blocks(pool, shape, run, [](int64_t) {});
}

ffi::Error forward_call(ffi::ThreadPool pool, Any x, F32 weights, F32 given, F32 scale, F32 bias, ffi::Result<Any> y,
                        ffi::Result<F32> layer, ffi::Result<F32> batch, ffi::Result<F32> var, int64_t n, int64_t p, int64_t c,
                        int64_t scales, double epsilon) {
  const Shape shape = shape_of(x, n, p, c, scales);
  return typed(x.element_type(), y->element_type(), [&](auto* of_x, auto* of_y) {
    forward(pool, shape, (decltype(of_x))x.untyped_data(), weights.typed_data(), some(given, shape.b * kTold * c), scale.typed_data(),
            bias.typed_data(), epsilon, layer->typed_data(), batch->typed_data(), var->typed_data(), (decltype(of_y))in_large_pages(y));
  });
}

ffi::Error statistics_call(ffi::ThreadPool pool, Any x, F32 weights, F32 given, ffi::Result<F32> pivot, ffi::Result<F32> offset,
                           ffi::Result<F32> root, ffi::Result<F32> power, ffi::Result<F32> instances, ffi::Result<F32> layer,
                           ffi::Result<F32> batch, ffi::Result<F32> var, int64_t n, int64_t p, int64_t c, double epsilon) {
  const Shape shape = shape_of(x, n, p, c, 1);
  return typed(x.element_type(), x.element_type(), [&](auto* of_x, auto*) {
    statistics(pool, shape, (decltype(of_x))x.untyped_data(), some(given, shape.b * kTold * c), instances->typed_data(),
               layer->typed_data(), batch->typed_data(), var->typed_data());
    blend(pool, shape, instances->typed_data(), weights.typed_data(), epsilon, layer->typed_data(), batch->typed_data(),
          pivot->typed_data(), offset->typed_data(), root->typed_data(), power->typed_data());
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormSwitchableForward, forward_call,
                              with_sizes(giving<3>(taking<4>(on_threads().Arg<Any>()).Ret<Any>()))
                                  .Attr<int64_t>("scales")
                                  .Attr<double>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormSwitchableStatistics, statistics_call,
                              with_sizes(giving<8>(taking<2>(on_threads().Arg<Any>()))).Attr<double>("epsilon"));
