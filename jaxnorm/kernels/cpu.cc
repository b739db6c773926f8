// Normalization on the CPU, for arrays (N, P, G, D) whose sets are pooled over P and D:
//
//   layer norm (rows, 1, 1, C)       batch norm     (1, N H W, C, 1)
//   group norm (N, H W, g, C / g)    instance norm  (N, H W, C, 1)
//
// Scale and bias are (S, G, D), S dividing N: as many neighbouring n share one. A set's numbers are looked at in its
// frame, u = x / 2**power - pivot, as in frame.py. Sums are in double, in an order that does not depend on the number
// of threads, and cut into chunks that stay in the cache while they are read twice.

#include <cmath>

#include "numbers.h"
#include "parallel.h"

namespace {

constexpr int64_t kChunk = 16384;  // elements that are read twice: 64 KiB of float32
constexpr int64_t kWhole = 262144;  // up to so many elements of one n are summed and applied by one thread
constexpr int64_t kRows = 16;      // rows that are added in float32, before they are added to a sum in double
constexpr int64_t kShort = 512;    // up to it a row is added in float32, in the lanes of a vector

struct Shape {
  int64_t n, p, g, d, s;  // s: how many scales
  int64_t c() const { return g * d; }
  int64_t sets() const { return n * g; }
  const float* of(const float* params, int64_t i) const { return params + i / (n / s) * c(); }
};

struct Rule {
  double epsilon, correction;
  bool in_std, centered;
  int64_t lowest;  // least power of two, INT64_MIN for none

  double rstd(double var, double count, int power) const {
    var *= correction == 0 ? 1 : count > correction ? count / (count - correction) : 0;
    const double eps = float(power ? std::ldexp(epsilon, in_std ? -power : -2 * power) : epsilon);  // as in the derivative
    const double total = in_std ? std::sqrt(var) + eps : var + eps;
    return total == 0 ? 0 : in_std ? 1 / total : 1 / std::sqrt(total);
  }
};

// What is known about the sets of one n: arrays (G,) of the results.
struct Stats {
  float *pivot, *offset, *var, *power;

  // Of the exact mean and variance; returns 1 / standard deviation.
  double set(int64_t i, const Rule& rule, double mean, double var_, double count) const {
    int exponent = 0;
    if (rule.lowest != INT64_MIN) {
      const double size = std::sqrt(mean * mean + var_);
      if (std::isfinite(size)) std::frexp(size, &exponent);
      exponent = int(std::clamp<int64_t>(exponent, std::max<int64_t>(rule.lowest, -126), 126));
    }
    if (exponent) {
      mean = std::ldexp(mean, -exponent);
      var_ = std::ldexp(var_, -2 * exponent);
    }
    power[i] = float(exponent);
    pivot[i] = float(mean);
    offset[i] = float(mean - pivot[i]);
    var[i] = float(var_);
    return rule.rstd(var[i], count, exponent);
  }
};

// 1 / 2**power
inline float factor_of(float power) { return power == 0 ? 1 : std::ldexp(1.0f, -int(power)); }

// The values of the sets of one n, for each of their channels.
void spread(const Shape& shape, const float* values, float* to) {
  if (shape.d == 1) std::copy(values, values + shape.g, to);
  else
    for (int64_t g = 0; g < shape.g; ++g) std::fill(to + g * shape.d, to + (g + 1) * shape.d, values[g]);
}

template <typename X, typename Y>
void forward_row(const Shape& shape, const Rule& rule, const X* x, const float* scale, const float* bias, Stats stats,
                 int64_t first, Y* y) {
  const int64_t d = shape.d;
  for (int64_t g = 0; g < shape.g; ++g, x += d, y += d, scale += d, bias += d) {
    double sum = 0, square = 0;
    if (rule.centered) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < d; ++i) sum += load(x[i]);
    }
    const double mean = sum / d;
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < d; ++i) {
      const double u = load(x[i]) - mean;
      square += u * u;
    }
    const float rstd = float(stats.set(first + g, rule, mean, square / d, d));
    const float factor = factor_of(stats.power[first + g]);
    const float pivot = stats.pivot[first + g], offset = stats.offset[first + g];
#pragma omp simd
    for (int64_t i = 0; i < d; ++i) store(y + i, ((load(x[i]) * factor - pivot) - offset) * rstd * scale[i] + bias[i]);
  }
}

// Means and sums of squared deviations of each channel over the rows of a chunk. Squares of numbers near the ends of the
// range are made in double.
template <typename X>
void chunk_stats(const X* x, int64_t rows, int64_t c, bool centered, bool full_range, double* mean, double* square) {
  std::fill(mean, mean + c, 0.0);
  std::fill(square, square + c, 0.0);
  if (centered) {
    for (int64_t r = 0; r < rows; ++r) {
      const X* row = x + r * c;
#pragma omp simd
      for (int64_t i = 0; i < c; ++i) mean[i] += load(row[i]);
    }
    for (int64_t i = 0; i < c; ++i) mean[i] /= rows;
  }
  if (full_range) {
    for (int64_t r = 0; r < rows; ++r) {
      const X* row = x + r * c;
#pragma omp simd
      for (int64_t i = 0; i < c; ++i) {
        const double u = load(row[i]) - mean[i];
        square[i] += u * u;
      }
    }
    return;
  }
  std::vector<float> each(2 * c);
  float *few = each.data(), *center = few + c;
  std::copy(mean, mean + c, center);
  for (int64_t start = 0; start < rows; start += kRows) {
    std::fill(few, few + c, 0.0f);
    for (int64_t r = start; r < std::min(rows, start + kRows); ++r) {
      const X* row = x + r * c;
#pragma omp simd
      for (int64_t i = 0; i < c; ++i) {
        const float u = load(row[i]) - center[i];
        few[i] += u * u;
      }
    }
    for (int64_t i = 0; i < c; ++i) square[i] += few[i];
  }
  for (int64_t i = 0; i < c; ++i) square[i] = std::max(0.0, square[i] - rows * (mean[i] - center[i]) * (mean[i] - center[i]));
}

struct Chunks {
  int64_t rows, count;  // of each but the last; how many
  bool whole;           // whether one thread takes all chunks of an n
  explicit Chunks(const Shape& shape, int64_t threads) {
    rows = std::max<int64_t>(64, kChunk / shape.c());
    count = (shape.p + rows - 1) / rows;
    whole = shape.n >= 2 * threads && shape.p * shape.c() <= kWhole;
  }
  int64_t size(const Shape& shape, int64_t chunk) const { return std::min(rows, shape.p - chunk * rows); }
};

// Runs chunk by chunk `reduce`, then for each n `combine`, then chunk by chunk `apply`.
template <typename Reduce, typename Combine, typename Apply>
void by_chunks(ffi::ThreadPool& pool, const Shape& shape, const Chunks& chunks, Reduce reduce, Combine combine, Apply apply) {
  const int64_t count = chunks.count;
  if (chunks.whole) {
    in_parallel(pool, shape.n, [&](int64_t n) {
      for (int64_t k = 0; k < count; ++k) reduce(n, k);
      combine(n);
      for (int64_t k = 0; k < count; ++k) apply(n, k);
    });
    return;
  }
  in_parallel(pool, shape.n * count, [&](int64_t i) { reduce(i / count, i % count); });
  in_parallel(pool, shape.n, [&](int64_t n) { combine(n); });
  in_parallel(pool, shape.n * count, [&](int64_t i) { apply(i / count, i % count); });
}

template <typename X, typename Y>
void forward(ffi::ThreadPool& pool, const Shape& shape, const Rule& rule, const X* x, const float* scale, const float* bias,
             Stats stats, Y* y) {
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
  std::vector<double> parts(shape.n * chunks.count * 2 * c);
  std::vector<float> rstd(shape.sets());
  auto reduce = [&](int64_t n, int64_t k) {
    double* part = parts.data() + (n * chunks.count + k) * 2 * c;
    chunk_stats(x + (n * shape.p + k * chunks.rows) * c, chunks.size(shape, k), c, rule.centered,
                rule.lowest != INT64_MIN, part, part + c);
  };
  auto combine = [&](int64_t n) {
    const double* part = parts.data() + n * chunks.count * 2 * c;
    const double total = double(shape.p) * d;
    for (int64_t i = 0; i < g; ++i) {
      double mean = 0, square = 0;
      for (int64_t k = 0; k < chunks.count; ++k)
        for (int64_t j = i * d; j < (i + 1) * d; ++j) mean += chunks.size(shape, k) * part[k * 2 * c + j];
      mean /= total;
      for (int64_t k = 0; k < chunks.count; ++k)
        for (int64_t j = i * d; j < (i + 1) * d; ++j) {
          const double u = rule.centered ? part[k * 2 * c + j] - mean : 0;
          square += part[(k * 2 + 1) * c + j] + chunks.size(shape, k) * u * u;
        }
      rstd[n * g + i] = float(stats.set(n * g + i, rule, mean, square / total, total));
    }
  };
  auto apply = [&](int64_t n, int64_t k) {
    std::vector<float> each(4 * c + g);
    float *factor = each.data(), *pivot = factor + c, *offset = pivot + c, *slope = offset + c, *factors = slope + c;
    const float *scales = shape.of(scale, n), *shift = shape.of(bias, n);
    for (int64_t i = 0; i < g; ++i) factors[i] = factor_of(stats.power[n * g + i]);
    spread(shape, factors, factor);
    spread(shape, stats.pivot + n * g, pivot);
    spread(shape, stats.offset + n * g, offset);
    spread(shape, rstd.data() + n * g, slope);
    for (int64_t j = 0; j < c; ++j) slope[j] *= scales[j];
    const int64_t start = (n * shape.p + k * chunks.rows) * c;
    for (int64_t r = 0; r < chunks.size(shape, k); ++r) {
      const X* from = x + start + r * c;
      Y* to = y + start + r * c;
#pragma omp simd
      for (int64_t j = 0; j < c; ++j) store(to + j, ((load(from[j]) * factor[j] - pivot[j]) - offset[j]) * slope[j] + shift[j]);
    }
  };
  by_chunks(pool, shape, chunks, reduce, combine, apply);
}

// What the gradient needs of each set: its frame, r = d y / d u, q with d r = -q r r d var / 2, and the cotangents of
// offset and variance, per element. The offset of small rows is not given, but computed again.
struct Given {
  const float *factor, *pivot, *offset, *r, *q, *by_offset, *by_var;
  bool recompute;
};

template <typename Sum, typename X, typename Y>
void backward_row(const Shape& shape, bool centered, const X* x, const Y* ct, const float* scale, const Given& given, int64_t first,
                  float* dscale, float* dbias, X* dx) {
  const int64_t d = shape.d;
  for (int64_t g = 0; g < shape.g; ++g, x += d, ct += d, dx += d, scale += d, dscale += d, dbias += d) {
    const int64_t set = first + g;
    const float factor = given.factor[set], pivot = given.pivot[set], r = given.r[set];
    Sum sum = 0, product = 0, rest = 0;
    if (given.recompute) {
#pragma omp simd reduction(+ : rest)
      for (int64_t i = 0; i < d; ++i) rest += load(x[i]) * factor - pivot;
    }
    const float offset = given.recompute ? float(rest / d) : given.offset[set];
#pragma omp simd reduction(+ : sum, product)
    for (int64_t i = 0; i < d; ++i) {
      const float xh = ((load(x[i]) * factor - pivot) - offset) * r, cotangent = load(ct[i]), w = cotangent * scale[i];
      sum += w;
      product += Sum(w) * xh;
      dscale[i] += cotangent * xh;
      dbias[i] += cotangent;
    }
    const float c1 = float(given.q[set] * (product / d)), c2 = centered ? float(r * (sum / d)) : 0;
    const float a = given.by_offset[set] - c2, b = given.by_var[set];
#pragma omp simd
    for (int64_t i = 0; i < d; ++i) {
      const float u = (load(x[i]) * factor - pivot) - offset;
      store(dx + i, factor * (r * (load(ct[i]) * scale[i]) + a - (u * r) * c1 + u * b));
    }
  }
}

template <typename X, typename Y>
void backward_rows(ffi::ThreadPool& pool, const Shape& shape, bool centered, const X* x, const Y* ct, const float* scale,
                   const Given& given, X* dx, float* dscale, float* dbias) {
  const int64_t c = shape.c(), per_scale = shape.n / shape.s;
  const int64_t blocks = std::min<int64_t>(std::max<int64_t>(1, 64 / shape.s), (per_scale + kRows - 1) / kRows);
  const int64_t rows = (per_scale + blocks - 1) / blocks;
  std::vector<double> parts(shape.s * blocks * 2 * c);
  in_parallel(pool, shape.s * blocks, [&](int64_t task) {
    const int64_t s = task / blocks, block = task % blocks;
    const int64_t end = s * per_scale + std::min(per_scale, (block + 1) * rows);
    double* part = parts.data() + task * 2 * c;
    std::vector<float> few(2 * c);
    for (int64_t start = s * per_scale + block * rows; start < end; start += kRows) {
      std::fill(few.begin(), few.end(), 0.0f);
      for (int64_t n = start; n < std::min(end, start + kRows); ++n) {
        auto row = shape.d <= kShort ? backward_row<float, X, Y> : backward_row<double, X, Y>;
        row(shape, centered, x + n * c, ct + n * c, scale + s * c, given, n * shape.g, few.data(), few.data() + c, dx + n * c);
      }
      for (int64_t i = 0; i < 2 * c; ++i) part[i] += few[i];
    }
  });
  for (int64_t s = 0; s < shape.s; ++s)
    for (int64_t i = 0; i < c; ++i) {
      double by_scale = 0, by_bias = 0;
      for (int64_t block = 0; block < blocks; ++block) {
        by_scale += parts[(s * blocks + block) * 2 * c + i];
        by_bias += parts[((s * blocks + block) * 2 + 1) * c + i];
      }
      dscale[s * c + i] = float(by_scale);
      dbias[s * c + i] = float(by_bias);
    }
}

template <typename X, typename Y>
void backward(ffi::ThreadPool& pool, const Shape& shape, bool centered, const X* x, const Y* ct, const float* scale, const Given& given,
              X* dx, float* dscale, float* dbias) {
  if (shape.p == 1) return backward_rows(pool, shape, centered, x, ct, scale, given, dx, dscale, dbias);
  const int64_t c = shape.c(), g = shape.g, d = shape.d;
  const Chunks chunks(shape, pool.num_threads());
  std::vector<double> parts(shape.n * chunks.count * 2 * c), sums(shape.n * 2 * c);
  std::vector<float> c1(shape.sets()), a(shape.sets());
  auto spread_all = [&](int64_t n, std::initializer_list<const float*> from, std::vector<float>& to) {
    float* start = to.data();
    for (const float* values : from) {
      spread(shape, values + n * g, start);
      start += c;
    }
  };
  auto reduce = [&](int64_t n, int64_t k) {
    double* part = parts.data() + (n * chunks.count + k) * 2 * c;
    std::vector<float> each(4 * c), few(2 * c);
    spread_all(n, {given.factor, given.pivot, given.offset, given.r}, each);
    const float *factor = each.data(), *pivot = factor + c, *offset = pivot + c, *slope = offset + c;
    float *products = few.data(), *alone = products + c;
    const int64_t start = (n * shape.p + k * chunks.rows) * c, rows = chunks.size(shape, k);
    for (int64_t first = 0; first < rows; first += kRows) {
      std::fill(few.begin(), few.end(), 0.0f);
      for (int64_t r = first; r < std::min(rows, first + kRows); ++r) {
        const X* from = x + start + r * c;
        const Y* cotangents = ct + start + r * c;
#pragma omp simd
        for (int64_t j = 0; j < c; ++j) {
          const float xh = ((load(from[j]) * factor[j] - pivot[j]) - offset[j]) * slope[j], cotangent = load(cotangents[j]);
          products[j] += cotangent * xh;
          alone[j] += cotangent;
        }
      }
      for (int64_t i = 0; i < 2 * c; ++i) part[i] += few[i];
    }
  };
  auto combine = [&](int64_t n) {
    double* sum = sums.data() + n * 2 * c;
    for (int64_t k = 0; k < chunks.count; ++k)
      for (int64_t j = 0; j < 2 * c; ++j) sum[j] += parts[(n * chunks.count + k) * 2 * c + j];
    const float* scales = shape.of(scale, n);
    for (int64_t i = 0; i < g; ++i) {
      double by_product = 0, by_sum = 0;
      for (int64_t j = i * d; j < (i + 1) * d; ++j) {
        by_product += scales[j] * sum[j];
        by_sum += scales[j] * sum[c + j];
      }
      const int64_t set = n * g + i;
      const double total = double(shape.p) * d;
      c1[set] = float(given.q[set] * (by_product / total));
      a[set] = given.by_offset[set] - (centered ? float(given.r[set] * (by_sum / total)) : 0);
    }
  };
  auto apply = [&](int64_t n, int64_t k) {
    std::vector<float> each(7 * c);
    spread_all(n, {given.factor, given.pivot, given.offset, given.r, c1.data(), a.data(), given.by_var}, each);
    const float *factor = each.data(), *pivot = factor + c, *offset = pivot + c, *slope = offset + c;
    const float *product = slope + c, *shift = product + c, *by_var = shift + c, *scales = shape.of(scale, n);
    const int64_t start = (n * shape.p + k * chunks.rows) * c;
    for (int64_t r = 0; r < chunks.size(shape, k); ++r) {
      const X* from = x + start + r * c;
      const Y* cotangents = ct + start + r * c;
      X* to = dx + start + r * c;
#pragma omp simd
      for (int64_t j = 0; j < c; ++j) {
        const float u = (load(from[j]) * factor[j] - pivot[j]) - offset[j];
        store(to + j, factor[j] * (slope[j] * (load(cotangents[j]) * scales[j]) + shift[j] - (u * slope[j]) * product[j] + u * by_var[j]));
      }
    }
  };
  by_chunks(pool, shape, chunks, reduce, combine, apply);
  for (int64_t s = 0; s < shape.s; ++s)
    for (int64_t j = 0; j < c; ++j) {
      double by_scale = 0, by_bias = 0;
      for (int64_t n = s * (shape.n / shape.s); n < (s + 1) * (shape.n / shape.s); ++n) {
        by_scale += sums[n * 2 * c + j];
        by_bias += sums[(n * 2 + 1) * c + j];
      }
      dscale[s * c + j] = float(by_scale);
      dbias[s * c + j] = float(by_bias);
    }
}

using F32 = ffi::Buffer<ffi::F32>;

Shape shape_of(const ffi::AnyBuffer& x, const F32& scale, int64_t p, int64_t g, int64_t d) {
  return {int64_t(x.element_count()) / (p * g * d), p, g, d, int64_t(scale.element_count()) / (g * d)};
}

ffi::Error forward_call(ffi::ThreadPool pool, ffi::AnyBuffer x, F32 scale, F32 bias, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<F32> pivot, ffi::Result<F32> offset, ffi::Result<F32> var,
                        ffi::Result<F32> power, int64_t p, int64_t g, int64_t d, double epsilon, double correction,
                        bool in_std, bool centered, int64_t lowest) {
  const Shape shape = shape_of(x, scale, p, g, d);
  const Rule rule{epsilon, correction, in_std, centered, lowest};
  const Stats stats{pivot->typed_data(), offset->typed_data(), var->typed_data(), power->typed_data()};
  return typed(x.element_type(), y->element_type(), [&](auto* of_x, auto* of_y) {
    forward(pool, shape, rule, (decltype(of_x))x.untyped_data(), scale.typed_data(), bias.typed_data(), stats,
            (decltype(of_y))y->untyped_data());
  });
}

ffi::Error backward_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer ct, F32 scale, F32 factor, F32 pivot, F32 offset, F32 r,
                         F32 q, F32 by_offset, F32 by_var, ffi::Result<ffi::AnyBuffer> dx, ffi::Result<F32> dscale,
                         ffi::Result<F32> dbias, int64_t p, int64_t g, int64_t d, bool centered, bool recompute) {
  const Shape shape = shape_of(x, scale, p, g, d);
  const Given given{factor.typed_data(), pivot.typed_data(),     offset.typed_data(), r.typed_data(),
                    q.typed_data(),      by_offset.typed_data(), by_var.typed_data(), recompute};
  return typed(x.element_type(), ct.element_type(), [&](auto* of_x, auto* of_ct) {
    backward(pool, shape, centered, (decltype(of_x))x.untyped_data(), (decltype(of_ct))ct.untyped_data(), scale.typed_data(), given,
             (decltype(of_x))dx->untyped_data(), dscale->typed_data(), dbias->typed_data());
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormForward, forward_call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<int64_t>("p")
                                  .Attr<int64_t>("g")
                                  .Attr<int64_t>("d")
                                  .Attr<double>("epsilon")
                                  .Attr<double>("correction")
                                  .Attr<bool>("in_std")
                                  .Attr<bool>("centered")
                                  .Attr<int64_t>("lowest"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormBackward, backward_call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<int64_t>("p")
                                  .Attr<int64_t>("g")
                                  .Attr<int64_t>("d")
                                  .Attr<bool>("centered")
                                  .Attr<bool>("recompute"));
