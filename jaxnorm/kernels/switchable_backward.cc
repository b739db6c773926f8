// The transpose of the tangent of switchable norm: the gradients of x, the weights, statistics that were given, scale and bias.

#include <memory>
#include <vector>

#include "instances.h"
#include "pages.h"

namespace {

// The sums of ct and of ct times the output, and of these the cotangents of what is applied of instances, of their means and variances.
struct Pulled {
  double alone[kStrip], product[kStrip], mean[kStrip], var[kStrip];

  // Of sums that were found, (2, C).
  void take(const Shape& shape, const float* found, int64_t width) {
    std::copy(found, found + width, alone);
    std::copy(found + shape.c, found + shape.c + width, product);
  }

  template <typename X, typename Y>
  void sum(const Shape& shape, const X* x, const Y* ct, const Applied& a, int64_t width) {
    double sums[2][kStrip];
    sum_rows(shape.p, width, sums, [&](int64_t r, int64_t j, int64_t place, auto& few) {
      const float cotangent = load(ct[r * shape.c + j]), v = load(x[r * shape.c + j]);
      few[0][place] += cotangent;
      few[1][place] += cotangent * (((v * a.factor[j] - a.pivot[j]) - a.offset[j]) * a.root[j]);
    });
    std::copy(sums[0], sums[0] + width, alone);
    std::copy(sums[1], sums[1] + width, product);
  }

  // Of products that are of deviations from the mean of the instance.
  void center(const Instances& of, const Applied& a, int64_t width) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const double scale = a.factor[j], step = (of.mean[j] * scale - a.pivot[j]) - a.offset[j];
      product[j] = (product[j] * scale + alone[j] * step) * a.root[j];
    }
  }

  void pull(const float* gain, const Applied& a, int64_t width) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      mean[j] = -a.rstd[j] * gain[j] * alone[j];
      var[j] = -0.5 * a.rstd[j] * a.rstd[j] * gain[j] * product[j];
    }
  }
};

// What the gradient is told, beside x and the cotangent.
struct Given {
  const float *weights, *scale, *instances, *layer, *batch;
  const float* by_batch;  // cotangents of mean and variance of each c, null for 0
  bool running;           // whether those were given
  double epsilon;

  Merged merged(const Shape& shape, int64_t b) const { return Merged(shape, layer, batch, b); }
};

struct Gradients {
  float *scale, *bias, *weights, *mean, *var;  // the last two of given statistics of c
};

// What is found out on the way: sums of the cotangents of means and variances, and what is made of them.
struct Work {
  const Shape& shape;
  const Given& given;
  Blocks blocks;
  std::vector<double> layer, batch;  // for every n and strip 2; for every block and c 4, with those for scale and bias
  std::vector<double> of_weights;    // for every task 2: of those of means times means, of variances times variances
  std::unique_ptr<float[]> found, again;  // the sums of each instance, (B, N, 2, C), and what is known of it unless that is given

  Work(const Shape& shape, const Given& given)
      : shape(shape), given(given), blocks(shape), layer(shape.b * shape.n * shape.strips() * 2),
        batch(shape.b * blocks.count * 4 * shape.c), of_weights(shape.b * blocks.count * shape.strips() * 2),
        found(new float[shape.b * shape.n * 2 * shape.c]),
        again(given.instances ? nullptr : new float[shape.b * shape.n * kTold * shape.c]) {}

  float* sums(int64_t b, int64_t i, int64_t first) const { return found.get() + (b * shape.n + i) * 2 * shape.c + first; }
  int64_t position(int64_t b, int64_t i, int64_t first) const { return (b * shape.n + i) * shape.p * shape.c + first; }

  Applied applied(const Instances& of, int64_t b, int64_t i, int64_t first, int64_t width) const {
    return Applied(of, given.merged(shape, b), Weights(given.weights + b * 6), given.epsilon, i, first, width);
  }

  // The instances of some channels, and what is pulled back of them: of those that were not kept, x is read for both at once.
  template <typename X, typename Y>
  Instances look(const X* x, const Y* ct, int64_t b, int64_t i, int64_t first, int64_t width, Pulled& by) const {
    const int64_t c = shape.c, at = b * shape.n + i;
    const bool kept = given.instances;
    auto cotangent = [=](int64_t r, int64_t j) { return load(ct[r * c + j]); };
    const Instances of = kept ? Instances(shape, given.instances, at, first, width)
                              : Instances(shape, x, width, Beside{cotangent, by.product, by.alone});
    for (int64_t j = 0; !kept && j < width; ++j) tell(again.get() + at * kTold * c + first, c, j, of.mean[j], of.var[j]);
    const Applied a = applied(of, b, i, first, width);
    kept ? by.sum(shape, x, ct, a, width) : by.center(of, a, width);
    by.pull(given.scale + shape.scale(b, i) + first, a, width);
    return of;
  }
};

// Of one b: the gradients of all but x, and, in place of the sums, what an instance gets by its n, (N, 2), and by its c, (2, C).
inline void combine(Work& work, const Gradients& to, int64_t b) {
  const Shape& shape = work.shape;
  const Given& given = work.given;
  const Blocks& blocks = work.blocks;
  const int64_t n = shape.n, c = shape.c, strips = shape.strips(), tasks = blocks.count * strips;
  const Weights w(given.weights + b * 6);
  const Merged merged = given.merged(shape, b);
  const double center = merged.layer.mean(0);
  double by[6] = {}, along = 0;
  for (int64_t task = b * tasks; task < (b + 1) * tasks; ++task) {
    along += work.of_weights[task * 2];
    by[3] += work.of_weights[task * 2 + 1];
  }
  double *parts = work.layer.data() + b * n * strips * 2, *of_layer = parts;
  for (int64_t i = 0; i < n; ++i, parts += strips * 2) {
    double mean = 0, var = 0;
    for (int64_t strip = 0; strip < strips; ++strip) mean += parts[strip * 2], var += parts[strip * 2 + 1];
    by[1] += mean * (merged.layer.mean(i) - center);
    by[4] += var * merged.layer.var(i);
    of_layer[i * 2] = w.mean[1] * mean / c;
    of_layer[i * 2 + 1] = w.var[1] * var / c;
  }
  double* of_batch = work.batch.data() + b * blocks.count * 4 * c;
  for (int64_t block = 1; block < blocks.count; ++block)
    for (int64_t j = 0; j < 4 * c; ++j) of_batch[j] += of_batch[block * 4 * c + j];
  for (int64_t j = 0; j < c; ++j) {
    double &mean = of_batch[j], &var = of_batch[c + j];
    by[2] += mean * (merged.batch.mean(j) - center);
    by[5] += var * merged.batch.var(j);
    const int64_t at = b * c + j;
    to.mean[at] = float(w.mean[2] * mean);
    to.var[at] = float(w.var[2] * var);
    mean = given.running ? 0 : (w.mean[2] * mean + (given.by_batch ? given.by_batch[2 * at] : 0)) / n;
    var = given.running ? 0 : (w.var[2] * var + (given.by_batch ? given.by_batch[2 * at + 1] : 0)) / n;
    if (shape.scales == 1) to.scale[at] = float(of_batch[2 * c + j]), to.bias[at] = float(of_batch[3 * c + j]);
  }
  by[1] -= along;
  by[2] -= along;
  std::copy(by, by + 6, to.weights + b * 6);
}

// The sums of some n and channels.
template <typename X, typename Y>
void find(Work& work, const X* x, const Y* ct, const Gradients& to, int64_t b, int64_t block, int64_t start, int64_t end, int64_t strip,
          int64_t first, int64_t width) {
  const Shape& shape = work.shape;
  const Given& given = work.given;
  const int64_t n = shape.n, c = shape.c, strips = shape.strips();
  double *parts = work.batch.data() + (b * work.blocks.count + block) * 4 * c + first,
         *of_weights = work.of_weights.data() + ((b * work.blocks.count + block) * strips + strip) * 2;
  const double center = given.merged(shape, b).layer.mean(0);
  for (int64_t i = start; i < end; ++i) {
    const int64_t from = work.position(b, i, first);
    Pulled by;
    const Instances of = work.look(x + from, ct + from, b, i, first, width, by);
    std::copy(by.alone, by.alone + width, work.sums(b, i, first));
    std::copy(by.product, by.product + width, work.sums(b, i, first) + c);
    double mean = 0, var = 0, means = 0, vars = 0;
#pragma omp simd reduction(+ : mean, var, means, vars)
    for (int64_t j = 0; j < width; ++j) {
      mean += by.mean[j];
      var += by.var[j];
      means += by.mean[j] * (of.mean[j] - center);
      vars += by.var[j] * of.var[j];
    }
    double* part = work.layer.data() + ((b * n + i) * strips + strip) * 2;
    part[0] = mean;
    part[1] = var;
    of_weights[0] += means;
    of_weights[1] += vars;
    for (int64_t j = 0; j < width; ++j) {
      parts[j] += by.mean[j];
      parts[c + j] += by.var[j];
      parts[2 * c + j] += by.product[j];
      parts[3 * c + j] += by.alone[j];
    }
    if (shape.scales > 1) {
      std::copy(by.product, by.product + width, to.scale + shape.scale(b, i) + first);
      std::copy(by.alone, by.alone + width, to.bias + shape.scale(b, i) + first);
    }
  }
}

// The gradients of x of some n and channels, when the sums of all are known.
template <typename X, typename Y>
void apply(const Work& work, const X* x, const Y* ct, X* dx, int64_t b, int64_t start, int64_t end, int64_t first, int64_t width) {
  const Shape& shape = work.shape;
  const Given& given = work.given;
  const int64_t n = shape.n, p = shape.p, c = shape.c;
  const Weights w(given.weights + b * 6);
  const Merged merged = given.merged(shape, b);
  const double *of_batch = work.batch.data() + b * work.blocks.count * 4 * c + first, each = 1.0 / p;
  for (int64_t i = start; i < end; ++i) {
    const Instances of(shape, given.instances ? given.instances : work.again.get(), b * n + i, first, width);
    const Applied a = work.applied(of, b, i, first, width);
    const float* gain = given.scale + shape.scale(b, i) + first;
    Pulled by;
    by.take(shape, work.sums(b, i, first), width);
    by.pull(gain, a, width);
    const double *of_layer = work.layer.data() + b * n * shape.strips() * 2 + i * 2, there = merged.layer.mean(i);
    float rest[kStrip], slope[kStrip], shift[kStrip], spread[kStrip];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const double mean = of.mean[j], scale = a.factor[j];
      const double by_var = w.var[0] * by.var[j] + of_layer[1] + of_batch[c + j];
      const double by_mean = by.mean[j] * (1 - w.mean[1] - w.mean[2]) + of_layer[0] + of_batch[j] +
                             2 * ((mean - there) * of_layer[1] + (mean - merged.batch.mean(first + j)) * of_batch[c + j]);
      rest[j] = float(mean * scale - a.pivot[j]);
      slope[j] = a.root[j] * gain[j];
      shift[j] = float(by_mean * each * a.size[j]);
      spread[j] = float(2 * by_var * each * a.size[j] * a.size[j]);
    }
    const int64_t from = work.position(b, i, first);
    for (int64_t row = from; row < from + p * c; row += c)
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) {
        const float u = (load(x[row + j]) * a.factor[j] - a.pivot[j]) - rest[j];
        store(dx + row + j, a.factor[j] * (load(ct[row + j]) * slope[j] + u * spread[j] + shift[j]));
      }
  }
}

template <typename X, typename Y>
void backward(ffi::ThreadPool& pool, const Shape& shape, const X* x, const Y* ct, const Given& given, const Gradients& to, X* dx) {
  Work work(shape, given);
  auto sums = [&](int64_t b, int64_t block, int64_t start, int64_t end, int64_t strip, int64_t first, int64_t width) {
    find(work, x, ct, to, b, block, start, end, strip, first, width);
  };
  auto gradients = [&](int64_t b, int64_t, int64_t start, int64_t end, int64_t, int64_t first, int64_t width) {
    apply(work, x, ct, dx, b, start, end, first, width);
  };
  over_blocks(pool, shape, sums, [&](int64_t b) { combine(work, to, b); });
  over_blocks(pool, shape, gradients, [](int64_t) {});
}

ffi::Error backward_call(ffi::ThreadPool pool, Any x, Any ct, F32 weights, F32 scale, F32 instances, F32 layer, F32 batch,
                         F32 by_batch, ffi::Result<Any> dx, ffi::Result<F32> dscale, ffi::Result<F32> dbias,
                         ffi::Result<F32> dweights, ffi::Result<F32> dmean, ffi::Result<F32> dvar, int64_t n, int64_t p, int64_t c,
                         int64_t scales, bool running, double epsilon) {
  const Shape shape = shape_of(x, n, p, c, scales);
  const float *kept = some(instances, shape.b * n * kTold * c), *told = some(by_batch, shape.b * c * 2);
  const Given given{weights.typed_data(), scale.typed_data(), kept, layer.typed_data(), batch.typed_data(), told, running, epsilon};
  const Gradients to{dscale->typed_data(), dbias->typed_data(), dweights->typed_data(), dmean->typed_data(), dvar->typed_data()};
  return typed(x.element_type(), ct.element_type(), [&](auto* of_x, auto* of_ct) {
    backward(pool, shape, (decltype(of_x))x.untyped_data(), (decltype(of_ct))ct.untyped_data(), given, to,
             (decltype(of_x))in_large_pages(dx));
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormSwitchableBackward, backward_call,
                              with_sizes(giving<5>(taking<6>(on_threads().Arg<Any>().Arg<Any>()).Ret<Any>()))
                                  .Attr<int64_t>("scales")
                                  .Attr<bool>("running")
                                  .Attr<double>("epsilon"));
