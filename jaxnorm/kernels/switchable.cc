// Switchable norm of arrays (B, N, P, C). Every (n, c), an instance, is normalized by a blend of its own mean and variance, those
// of its n (layer) and those of its c (batch), which are merged from those of instances. Sums and blends are in double, in an order
// that does not depend on the number of threads.
//
// What is known of instances, three numbers each, the forward kernel gives the backward one where they are of many positions; of few,
// which these numbers would weigh beside, it is found again.

#include <cmath>
#include <memory>
#include <vector>

#include "numbers.h"
#include "pages.h"
#include "parallel.h"
#include "stats.h"

namespace {

constexpr int64_t kTasks = 16;  // for each b, about as many

struct Shape {
  int64_t b, n, p, c, scales;  // scales: 1 or n
  int64_t strips() const { return (c + kStrip - 1) / kStrip; }
  int64_t scale(int64_t b, int64_t i) const { return (b * scales + (scales == 1 ? 0 : i)) * c; }
};

// n are taken in blocks, channels in strips.
struct Blocks {
  int64_t rows, count;
  explicit Blocks(const Shape& shape) {
    const int64_t wanted = std::clamp<int64_t>(kTasks / shape.strips(), 1, shape.n);
    rows = (shape.n + wanted - 1) / wanted;
    count = (shape.n + rows - 1) / rows;
  }
};

// Calls run(b, block, first n, end of n, strip, first channel, channels), and then finish(b).
template <typename Run, typename Finish>
void over_blocks(ffi::ThreadPool& pool, const Shape& shape, Run run, Finish finish) {
  const Blocks blocks(shape);
  const int64_t strips = shape.strips(), tasks = blocks.count * strips;
  in_parallel(pool, shape.b * tasks, [&](int64_t task) {
    const int64_t b = task / tasks, block = task % tasks / strips, strip = task % strips, first = block * blocks.rows;
    run(b, block, first, std::min(shape.n, first + blocks.rows), strip, strip * kStrip, std::min(kStrip, shape.c - strip * kStrip));
  });
  for (int64_t b = 0; b < shape.b; ++b) finish(b);
}

struct Weights {
  double mean[3], var[3];  // of instance, layer, batch
  explicit Weights(const float* of) {
    std::copy(of, of + 3, mean);
    std::copy(of + 3, of + 6, var);
  }
};

// Means and variances of so many as three float32 each, (3, count): the mean is a sum of two, of the variance there is the root,
// which does not leave the range.
constexpr int64_t kTold = 3;
struct Told {
  const float* from;
  int64_t count;
  double mean(int64_t i) const { return double(from[i]) + from[count + i]; }
  double var(int64_t i) const { return double(from[2 * count + i]) * from[2 * count + i]; }
};

inline void tell(float* to, int64_t count, int64_t i, double mean, double var) {
  to[i] = float(mean);
  to[count + i] = float(mean - to[i]);
  to[2 * count + i] = float(std::sqrt(var));
}

// Adds `more` numbers of this mean and sum of squared deviations to `count` numbers.
inline void add(double count, double& mean, double& square, double more, double mean_of_more, double square_of_more) {
  const double step = mean_of_more - mean, share = more / (count + more);
  mean += step * share;
  square += square_of_more + step * step * count * share;
}

// Mean and variance of the instances of some channels of an n.
struct Instances {
  double mean[kStrip], var[kStrip];

  template <typename X>
  Instances(const Shape& shape, const X* x, int64_t n, int64_t first, int64_t width, const float* kept) {
    if (kept) {
      const Told told{kept + n * kTold * shape.c + first, shape.c};
      for (int64_t j = 0; j < width; ++j) mean[j] = told.mean(j), var[j] = told.var(j);
      return;
    }
    auto value = [x = x + n * shape.p * shape.c + first, &shape](int64_t r, int64_t j) { return load(x[r * shape.c + j]); };
    if (!strip_stats(shape.p, width, true, mean, var, value)) stats_in_double(shape.p, width, true, mean, var, value);
    for (int64_t j = 0; j < width; ++j) var[j] /= shape.p;
  }
};

// Of each n and of each c of a b.
struct Merged {
  Told layer, batch;
  Merged(const Shape& shape, const float* layers, const float* batches, int64_t b)
      : layer{layers + b * kTold * shape.n, shape.n}, batch{batches + b * kTold * shape.c, shape.c} {}
};

// How the numbers of instances are looked at, u = x factor - pivot, and what is applied of them: (u - offset) root.
struct Applied {
  float factor[kStrip], pivot[kStrip], offset[kStrip], root[kStrip];
  double rstd[kStrip];
  int power[kStrip];

  Applied(const Instances& of, const Merged& merged, const Weights& w, double epsilon, int64_t n, int64_t first, int64_t width) {
    const double there = merged.layer.mean(n), var = w.var[1] * merged.layer.var(n);
    double mean[kStrip], square[kStrip], scale[kStrip];
    bool usual = true;
#pragma omp simd reduction(& : usual)
    for (int64_t j = 0; j < width; ++j) {
      const double own = of.mean[j];  // a step from it: weights that add up to 1 + 1e-7 then do no harm
      mean[j] = own + w.mean[1] * (there - own) + w.mean[2] * (merged.batch.mean(first + j) - own);
      const double total = w.var[0] * of.var[j] + var + w.var[2] * merged.batch.var(first + j), root = 1 / std::sqrt(total + epsilon);
      rstd[j] = total + epsilon == 0 ? 0 : root;
      square[j] = mean[j] * mean[j] + total;
      usual &= (square[j] > 1e-14) & (square[j] < 1e34);
    }
    for (int64_t j = 0; j < width; ++j) power[j] = usual ? 0 : power_of(square[j], -126);
    for (int64_t j = 0; j < width; ++j) scale[j] = usual ? 1 : factor_of(power[j]);
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      factor[j] = float(scale[j]);
      pivot[j] = float(of.mean[j] * scale[j]);
      offset[j] = float(mean[j] * scale[j] - pivot[j]);
      root[j] = float(rstd[j] / scale[j]);
    }
  }
};

// The statistics of each n and each c, (B, 3, N) and (B, 3, C), and, unless it is null, of each instance, (B, N, 3, C). `var` are the variances of
// c alone. What is given of c stands in for what would be merged.
template <typename X>
void statistics(ffi::ThreadPool& pool, const Shape& shape, const X* x, const float* given, float* instances, float* layer, float* batch,
                float* var) {
  const int64_t n = shape.n, c = shape.c, strips = shape.strips();
  const Blocks blocks(shape);
  std::vector<double> of_layers(shape.b * n * strips * 2), of_batch(shape.b * blocks.count * 2 * c);
  auto find = [&](int64_t b, int64_t block, int64_t start, int64_t end, int64_t strip, int64_t first, int64_t width) {
    double *mean = of_batch.data() + (b * blocks.count + block) * 2 * c + first, *square = mean + c;
    for (int64_t i = start; i < end; ++i) {
      const Instances of(shape, x + b * n * shape.p * c, i, first, width, nullptr);
      double *part = of_layers.data() + ((b * n + i) * strips + strip) * 2, sum = 0, around = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < width; ++j) sum += of.mean[j];
      part[0] = sum / width;
#pragma omp simd reduction(+ : around)
      for (int64_t j = 0; j < width; ++j) around += of.var[j] + (of.mean[j] - sum / width) * (of.mean[j] - sum / width);
      part[1] = around;
      for (int64_t j = 0; j < width; ++j) add(i - start, mean[j], square[j], 1, of.mean[j], of.var[j]);
      float* kept = instances + (b * n + i) * kTold * c + first;
      for (int64_t j = 0; instances && j < width; ++j) tell(kept, c, j, of.mean[j], of.var[j]);
    }
  };
  auto merge = [&](int64_t b) {
    const double* part = of_layers.data() + b * n * strips * 2;
    for (int64_t i = 0; i < n; ++i) {
      double mean = 0, square = 0;
      for (int64_t strip = 0; strip < strips; ++strip, part += 2)
        add(strip * kStrip, mean, square, std::min(kStrip, c - strip * kStrip), part[0], part[1]);
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
      const Instances of(shape, x, b * shape.n + i, first, width, instances.get());
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
      const Instances of(shape, (const float*)nullptr, b * n + i, first, width, instances);
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

// The cotangents of what is applied of instances, of their means and variances, from the sums of ct and of ct times the output.
struct Pulled {
  double alone[kStrip], product[kStrip], mean[kStrip], var[kStrip];

  // Of sums that were found, (2, C).
  Pulled(const Shape& shape, const float* found, const float* gain, const Applied& a, int64_t width) {
    std::copy(found, found + width, alone);
    std::copy(found + shape.c, found + shape.c + width, product);
    pull(gain, a, width);
  }

  template <typename X, typename Y>
  Pulled(const Shape& shape, const X* x, const Y* ct, const float* gain, const Applied& a, int64_t width) {
    double sums[2][kStrip];
    sum_rows(shape.p, width, sums, [&](int64_t r, int64_t j, int64_t place, auto& few) {
      const float cotangent = load(ct[r * shape.c + j]), v = load(x[r * shape.c + j]);
      few[0][place] += cotangent;
      few[1][place] += cotangent * (((v * a.factor[j] - a.pivot[j]) - a.offset[j]) * a.root[j]);
    });
    std::copy(sums[0], sums[0] + width, alone);
    std::copy(sums[1], sums[1] + width, product);
    pull(gain, a, width);
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
  const float* by_batch;          // cotangents of mean and variance of each c, null for 0
  bool running;                   // whether those were given
  double epsilon;

  Merged merged(const Shape& shape, int64_t b) const { return Merged(shape, layer, batch, b); }
};

struct Gradients {
  float *scale, *bias, *weights, *mean, *var;  // the last two of given statistics of c
};

// Sums of cotangents of means and variances that a thread finds, and what is made of them.
struct Sums {
  std::vector<double> layer, batch;  // for every n and strip 2; for every block and c 4, with those for scale and bias
  std::vector<double> of_weights;    // for every task 2: of those of means times means, of variances times variances
  Sums(const Shape& shape, const Blocks& blocks)
      : layer(shape.b * shape.n * shape.strips() * 2), batch(shape.b * blocks.count * 4 * shape.c),
        of_weights(shape.b * blocks.count * shape.strips() * 2) {}
};

// Of one b: the gradients of all but x, and, in place of the sums, what an instance gets by its n, (N, 2), and by its c, (2, C).
inline void combine(const Shape& shape, const Blocks& blocks, const Given& given, const Gradients& to, int64_t b, Sums& sums) {
  const int64_t n = shape.n, c = shape.c, strips = shape.strips(), tasks = blocks.count * strips;
  const Weights w(given.weights + b * 6);
  const Merged merged = given.merged(shape, b);
  const double center = merged.layer.mean(0);
  double by[6] = {}, along = 0;
  for (int64_t task = b * tasks; task < (b + 1) * tasks; ++task) along += sums.of_weights[task * 2], by[3] += sums.of_weights[task * 2 + 1];
  double *parts = sums.layer.data() + b * n * strips * 2, *of_layer = parts;
  for (int64_t i = 0; i < n; ++i, parts += strips * 2) {
    double mean = 0, var = 0;
    for (int64_t strip = 0; strip < strips; ++strip) mean += parts[strip * 2], var += parts[strip * 2 + 1];
    by[1] += mean * (merged.layer.mean(i) - center);
    by[4] += var * merged.layer.var(i);
    of_layer[i * 2] = w.mean[1] * mean / c;
    of_layer[i * 2 + 1] = w.var[1] * var / c;
  }
  double* of_batch = sums.batch.data() + b * blocks.count * 4 * c;
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

template <typename X, typename Y>
void backward(ffi::ThreadPool& pool, const Shape& shape, const X* x, const Y* ct, const Given& given, const Gradients& to, X* dx) {
  const int64_t n = shape.n, p = shape.p, c = shape.c, strips = shape.strips();
  const Blocks blocks(shape);
  Sums sums(shape, blocks);
  const std::unique_ptr<float[]> found(new float[shape.b * n * 2 * c]), again(given.instances ? nullptr : new float[shape.b * n * kTold * c]);
  const float* instances = given.instances ? given.instances : again.get();
  auto applied = [&](const Instances& of, int64_t b, int64_t i, int64_t first, int64_t width) {
    return Applied(of, given.merged(shape, b), Weights(given.weights + b * 6), given.epsilon, i, first, width);
  };
  auto find = [&](int64_t b, int64_t block, int64_t start, int64_t end, int64_t strip, int64_t first, int64_t width) {
    double *parts = sums.batch.data() + (b * blocks.count + block) * 4 * c + first,
           *of_weights = sums.of_weights.data() + ((b * blocks.count + block) * strips + strip) * 2;
    const double center = given.merged(shape, b).layer.mean(0);
    for (int64_t i = start; i < end; ++i) {
      const Instances of(shape, x, b * n + i, first, width, given.instances);
      for (int64_t j = 0; !given.instances && j < width; ++j)
        tell(again.get() + (b * n + i) * kTold * c + first, c, j, of.mean[j], of.var[j]);
      const float* gain = given.scale + shape.scale(b, i) + first;
      const int64_t from = (b * n + i) * p * c + first;
      const Pulled by(shape, x + from, ct + from, gain, applied(of, b, i, first, width), width);
      float* kept = found.get() + (b * n + i) * 2 * c + first;
      std::copy(by.alone, by.alone + width, kept);
      std::copy(by.product, by.product + width, kept + c);
      double mean = 0, var = 0, means = 0, vars = 0;
#pragma omp simd reduction(+ : mean, var, means, vars)
      for (int64_t j = 0; j < width; ++j) {
        mean += by.mean[j];
        var += by.var[j];
        means += by.mean[j] * (of.mean[j] - center);
        vars += by.var[j] * of.var[j];
      }
      double* part = sums.layer.data() + ((b * n + i) * strips + strip) * 2;
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
  };
  over_blocks(pool, shape, find, [&](int64_t b) { combine(shape, blocks, given, to, b, sums); });
  auto apply = [&](int64_t b, int64_t, int64_t start, int64_t end, int64_t, int64_t first, int64_t width) {
    const Weights w(given.weights + b * 6);
    const Merged merged = given.merged(shape, b);
    const double* of_batch = sums.batch.data() + b * blocks.count * 4 * c + first;
    for (int64_t i = start; i < end; ++i) {
      const Instances of(shape, x, b * n + i, first, width, instances);
      const Applied a = applied(of, b, i, first, width);
      const float* gain = given.scale + shape.scale(b, i) + first;
      const Pulled by(shape, found.get() + (b * n + i) * 2 * c + first, gain, a, width);
      const double *of_layer = sums.layer.data() + b * n * strips * 2 + i * 2, there = merged.layer.mean(i);
      float rest[kStrip], slope[kStrip], shift[kStrip], spread[kStrip];
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) {
        const double mean = of.mean[j], scale = a.factor[j];
        const double by_var = w.var[0] * by.var[j] + of_layer[1] + of_batch[c + j];
        const double by_mean = by.mean[j] * (1 - w.mean[1] - w.mean[2]) + of_layer[0] + of_batch[j] +
                               2 * ((mean - there) * of_layer[1] + (mean - merged.batch.mean(first + j)) * of_batch[c + j]);
        rest[j] = float(mean * scale - a.pivot[j]);
        slope[j] = a.root[j] * gain[j];
        shift[j] = float(by_mean / p / scale);
        spread[j] = float(2 * by_var / p / (scale * scale));
      }
      const int64_t from = (b * n + i) * p * c + first;
      for (int64_t row = from; row < from + p * c; row += c)
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) {
          const float u = (load(x[row + j]) * a.factor[j] - a.pivot[j]) - rest[j];
          store(dx + row + j, a.factor[j] * (load(ct[row + j]) * slope[j] + u * spread[j] + shift[j]));
        }
    }
  };
  over_blocks(pool, shape, apply, [](int64_t) {});
}

Shape shape_of(const Any& x, int64_t n, int64_t p, int64_t c, int64_t scales) {
  return {int64_t(x.element_count()) / (n * p * c), n, p, c, scales};
}

// So many numbers, or nothing.
inline const float* some(const F32& buffer, int64_t count) { return int64_t(buffer.element_count()) == count ? buffer.typed_data() : nullptr; }

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
    statistics(pool, shape, (decltype(of_x))x.untyped_data(), some(given, shape.b * kTold * c), instances->typed_data(), layer->typed_data(),
               batch->typed_data(), var->typed_data());
    blend(pool, shape, instances->typed_data(), weights.typed_data(), epsilon, layer->typed_data(), batch->typed_data(),
          pivot->typed_data(), offset->typed_data(), root->typed_data(), power->typed_data());
  });
}

ffi::Error backward_call(ffi::ThreadPool pool, Any x, Any ct, F32 weights, F32 scale, F32 instances, F32 layer, F32 batch, F32 by_batch,
                         ffi::Result<Any> dx, ffi::Result<F32> dscale, ffi::Result<F32> dbias, ffi::Result<F32> dweights,
                         ffi::Result<F32> dmean, ffi::Result<F32> dvar, int64_t n, int64_t p, int64_t c, int64_t scales, bool running,
                         double epsilon) {
  const Shape shape = shape_of(x, n, p, c, scales);
  const float *kept = some(instances, shape.b * n * kTold * c), *told = some(by_batch, shape.b * c * 2);
  const Given given{weights.typed_data(), scale.typed_data(), kept, layer.typed_data(), batch.typed_data(), told, running, epsilon};
  const Gradients to{dscale->typed_data(), dbias->typed_data(), dweights->typed_data(), dmean->typed_data(), dvar->typed_data()};
  return typed(x.element_type(), ct.element_type(), [&](auto* of_x, auto* of_ct) {
    backward(pool, shape, (decltype(of_x))x.untyped_data(), (decltype(of_ct))ct.untyped_data(), given, to,
             (decltype(of_x))in_large_pages(dx));
  });
}

template <typename B>
auto with_sizes(B binding) {
  return std::move(binding)
      .template Attr<int64_t>("n")
      .template Attr<int64_t>("p")
      .template Attr<int64_t>("c");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormSwitchableForward, forward_call,
                              with_sizes(giving<3>(taking<4>(on_threads().Arg<Any>()).Ret<Any>()))
                                  .Attr<int64_t>("scales")
                                  .Attr<double>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormSwitchableStatistics, statistics_call,
                              with_sizes(giving<8>(taking<2>(on_threads().Arg<Any>()))).Attr<double>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormSwitchableBackward, backward_call,
                              with_sizes(giving<5>(taking<6>(on_threads().Arg<Any>().Arg<Any>()).Ret<Any>()))
                                  .Attr<int64_t>("scales")
                                  .Attr<bool>("running")
                                  .Attr<double>("epsilon"));
