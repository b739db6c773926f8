// Switchable norm of arrays (B, N, P, C). Every (n, c), an instance, is normalized by a blend of its own mean and variance, those
// of its n (layer) and those of its c (batch), which are merged from those of instances. Sums and blends are in double, in an order
// that does not depend on the number of threads.
//
// What is known of instances, three numbers each, the forward kernel gives the backward one where they are of many positions; of few,
// which these numbers would weigh beside, it is found again.

#pragma once

#include <cmath>

#include "numbers.h"
#include "parallel.h"
#include "stats.h"

namespace {  // Shape is another one elsewhere

constexpr int64_t kTasks = 16;  // for each b, about as many

struct Shape {
  int64_t b, n, p, c, scales;  // scales: 1 or n
  int64_t strip() const { return n < kTasks ? kStrip / 4 : kStrip; }  // channels of a task
  int64_t strips() const { return (c + strip() - 1) / strip(); }
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
    const int64_t channel = strip * shape.strip(), width = std::min(shape.strip(), shape.c - channel);
    run(b, block, first, std::min(shape.n, first + blocks.rows), strip, channel, width);
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

  // Those that were kept.
  Instances(const Shape& shape, const float* kept, int64_t n, int64_t first, int64_t width) {
    const Told told{kept + n * kTold * shape.c + first, shape.c};
    for (int64_t j = 0; j < width; ++j) mean[j] = told.mean(j), var[j] = told.var(j);
  }

  // Those of x, which starts at the first number of the first of them.
  template <typename X, typename... Cotangent>
  Instances(const Shape& shape, const X* x, int64_t width, const Beside<Cotangent>&... beside) {
    auto value = [x, &shape](int64_t r, int64_t j) { return load(x[r * shape.c + j]); };
    if (!strip_stats(shape.p, width, true, mean, var, value, beside...))
      stats_in_double(shape.p, width, true, mean, var, value, beside...);
    for (int64_t j = 0; j < width; ++j) var[j] /= shape.p;
  }
};

// Of each n and of each c of a b.
struct Merged {
  Told layer, batch;
  Merged(const Shape& shape, const float* layers, const float* batches, int64_t b)
      : layer{layers + b * kTold * shape.n, shape.n}, batch{batches + b * kTold * shape.c, shape.c} {}
};

constexpr double kSteepest = 1e19;  // 1 / sqrt(FLT_MIN), of numbers in their frame: of constants of any size nothing becomes infinite

// How the numbers of instances are looked at, u = x factor - pivot, and what is applied of them: (u - offset) root.
struct Applied {
  float factor[kStrip], pivot[kStrip], offset[kStrip], root[kStrip];
  double rstd[kStrip], size[kStrip];  // size = 1 / factor
  int power[kStrip];

  Applied(const Instances& of, const Merged& merged, const Weights& w, double epsilon, int64_t n, int64_t first, int64_t width) {
    const double there = merged.layer.mean(n), var = w.var[1] * merged.layer.var(n);
    double mean[kStrip], square[kStrip];
    int64_t unusual = 0;  // of numbers, unlike conditions, compilers make vectors
#pragma omp simd reduction(+ : unusual)
    for (int64_t j = 0; j < width; ++j) {
      const double own = of.mean[j];  // a step from it: weights that add up to 1 + 1e-7 then do no harm
      mean[j] = own + w.mean[1] * (there - own) + w.mean[2] * (merged.batch.mean(first + j) - own);
      const double total = w.var[0] * of.var[j] + var + w.var[2] * merged.batch.var(first + j), root = 1 / std::sqrt(total + epsilon);
      rstd[j] = total + epsilon == 0 ? 0 : root;
      square[j] = mean[j] * mean[j] + total;
      unusual += !ordinary(square[j]);
    }
    const bool usual = unusual == 0;
    for (int64_t j = 0; j < width; ++j) power[j] = usual ? 0 : power_of(square[j], -126);
    for (int64_t j = 0; j < width; ++j) factor[j] = usual ? 1 : factor_of(power[j]);
    for (int64_t j = 0; j < width; ++j) size[j] = usual ? 1 : 1.0 / factor[j];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      const double scale = factor[j];
      pivot[j] = float(of.mean[j] * scale);
      offset[j] = float(mean[j] * scale - pivot[j]);
      rstd[j] = std::min(rstd[j], kSteepest * scale);
      root[j] = float(rstd[j] * size[j]);
    }
  }
};

Shape shape_of(const Any& x, int64_t n, int64_t p, int64_t c, int64_t scales) {
  return {int64_t(x.element_count()) / (n * p * c), n, p, c, scales};
}

// So many numbers, or nothing.
inline const float* some(const F32& buffer, int64_t count) {
  return int64_t(buffer.element_count()) == count ? buffer.typed_data() : nullptr;
}

template <typename B>
auto with_sizes(B binding) {
  return std::move(binding)
      .template Attr<int64_t>("n")
      .template Attr<int64_t>("p")
      .template Attr<int64_t>("c");
}

}  // namespace
