// The transpose of the tangent of forward.cc: the gradients of x, scale and bias.

#include "moments.h"
#include "pages.h"

namespace {

using S8 = ffi::Buffer<ffi::S8>;

// A number for each set, or one for all.
template <typename T>
struct Each {
  const T* values;
  int64_t step;  // a number, since compilers make a loop for either case of a condition

  template <typename Buffer>
  Each(const Buffer& buffer, int64_t sets) : values(buffer.typed_data()), step(int64_t(buffer.element_count()) == sets) {}
  T operator[](int64_t set) const { return values[set * step]; }
};

// What the gradient needs of each set: what is known of it, unless that is to be found again, and the cotangents of offset and variance.
struct Given {
  Rule rule;
  Stats stats;
  double size;
  bool again;
  Each<float> pivot, offset, var, by_offset, by_var;
  Each<int8_t> power;

  Set kept(int64_t set) const { return {pivot[set], offset[set], var[set], power[set]}; }
};

// What a set needs for dx = factor (r ct scale + shift + u spread), with u from its frame.
struct Found {
  float r, shift, spread;
};

// From the sums of ct scale and of ct scale u r.
inline Found found(const Given& given, int64_t set, float var, float r, double sum, double product) {
  const double each = 1 / given.size;
  const float q = float(given.rule.steepness(var, r, given.size)), by_var = float(2 * given.by_var[set] * each);
  const double through = given.stats.centered ? r * (sum * each) : 0;
  return {r, float(given.by_offset[set] * each) - float(through), by_var - r * float(q * (product * each))};
}

// The sum of some parts, each of which has c numbers for scale and c for bias.
void add_up(const double* parts, int64_t count, int64_t c, float* dscale, float* dbias) {
  std::vector<double> sum(2 * c);
  for (int64_t k = 0; k < count; ++k, parts += 2 * c)
    for (int64_t j = 0; j < 2 * c; ++j) sum[j] += parts[j];
  std::copy(sum.begin(), sum.begin() + c, dscale);
  std::copy(sum.begin() + c, sum.end(), dbias);
}

template <typename X, typename Y>
void backward_row(const Shape& shape, const X* x, const Y* ct, const float* scale, const Given& given, int64_t first, const Set* of,
                  const float* rstd, float* dscale, float* dbias, X* dx) {
  const int64_t d = shape.d;
  for (int64_t g = 0; g < shape.g; ++g, x += d, ct += d, dx += d, scale += d, dscale += d, dbias += d) {
    const float factor = factor_of(of[g].power), pivot = of[g].pivot, offset = of[g].offset, r = rstd[g];
    double sums[2];
    sum_row(d, sums, [&](int64_t i, int64_t way, auto& few) {
      const float xh = ((load(x[i]) * factor - pivot) - offset) * r, cotangent = load(ct[i]), w = cotangent * scale[i];
      few[0][way] += w;
      few[1][way] += w * xh;
      dscale[i] += cotangent * xh;
      dbias[i] += cotangent;
    });
    const Found by = found(given, first + g, of[g].var, r, sums[0], sums[1]);
#pragma omp simd
    for (int64_t i = 0; i < d; ++i) {
      const float u = (load(x[i]) * factor - pivot) - offset;
      store(dx + i, factor * (by.r * (load(ct[i]) * scale[i]) + by.shift + u * by.spread));
    }
  }
}

template <typename X, typename Y>
void backward_rows(ffi::ThreadPool& pool, const Shape& shape, const X* x, const Y* ct, const float* scale, const Given& given, X* dx,
                   float* dscale, float* dbias) {
  const int64_t c = shape.c(), per_scale = shape.n / shape.s;
  const int64_t blocks = std::min<int64_t>(std::max<int64_t>(1, 64 / shape.s), (per_scale + kRows - 1) / kRows);
  const int64_t rows = (per_scale + blocks - 1) / blocks;
  std::vector<double> parts(shape.s * blocks * 2 * c);
  in_parallel(pool, shape.s * blocks, [&](int64_t task) {
    const int64_t s = task / blocks, block = task % blocks;
    const int64_t end = s * per_scale + std::min(per_scale, (block + 1) * rows);
    double* part = parts.data() + task * 2 * c;
    std::vector<float> few(2 * c), rstd(kRows * shape.g);
    std::vector<Set> of(kRows * shape.g);
    for (int64_t start = s * per_scale + block * rows; start < end; start += kRows) {
      const int64_t count = std::min(kRows, end - start), first = start * shape.g, sets = count * shape.g;
      if (given.again) given.stats.rows(x, shape.d, first, sets, of.data());
      for (int64_t i = 0; !given.again && i < sets; ++i) of[i] = given.kept(first + i);
      given.rule.rstds(of.data(), sets, given.size, rstd.data());
      std::fill(few.begin(), few.end(), 0.0f);
      for (int64_t row = 0; row < count; ++row) {
        const int64_t g = row * shape.g, at = (start + row) * c;
        backward_row(shape, x + at, ct + at, scale + s * c, given, first + g, &of[g], &rstd[g], few.data(), few.data() + c, dx + at);
      }
      for (int64_t i = 0; i < 2 * c; ++i) part[i] += few[i];
    }
  });
  for (int64_t s = 0; s < shape.s; ++s) add_up(parts.data() + s * blocks * 2 * c, blocks, c, dscale + s * c, dbias + s * c);
}

// The sums of ct u and of ct for each channel over the rows of a chunk; where float32 does not hold the products, in double.
template <typename X, typename Y>
void chunk_sums(const X* x, const Y* ct, int64_t rows, int64_t c, const Known& known, double* part) {
  const float *factor = known.each.data(), *pivot = factor + c, *offset = pivot + c;
  auto u = [=](int64_t r, int64_t j) { return (load(x[r * c + j]) * factor[j] - pivot[j]) - offset[j]; };
  int64_t unheld = 0;
  for (int64_t first = 0; first < c; first += kStrip) {
    const int64_t width = std::min(kStrip, c - first);
    double sum[2][kStrip];
    sum_rows(rows, width, sum, [&](int64_t r, int64_t channel, int64_t place, auto& few) {
      const int64_t j = first + channel;
      const float cotangent = load(ct[r * c + j]);
      few[0][place] += cotangent * u(r, j);
      few[1][place] += cotangent;
    });
    for (int64_t j = 0; j < width; ++j) unheld += !std::isfinite(sum[0][j]);
    for (int64_t i = 0; i < 2; ++i) std::copy(sum[i], sum[i] + width, part + i * c + first);
  }
  if (!unheld) return;
  std::fill(part, part + 2 * c, 0.0);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < c; ++j) {
      const double cotangent = load(ct[r * c + j]);
      part[j] += cotangent * u(r, j);
      part[c + j] += cotangent;
    }
}

// Of sums beside statistics those of ct u and of ct, with u from the frames of sets.
inline void center(const Shape& shape, const Chunks& chunks, Known& known) {
  const int64_t c = shape.c();
  const float *factor = known.each.data(), *pivot = factor + c, *offset = pivot + c;
  for (int64_t k = 0; k < chunks.count; ++k) {
    double *mean = known.part(k), *square = mean + c, *product = square + c, *alone = product + c;
    for (int64_t j = 0; j < c; ++j) {
      mean[j] = product[j] * factor[j] + alone[j] * ((mean[j] * factor[j] - pivot[j]) - offset[j]);
      square[j] = alone[j];
    }
  }
}

// From the sums of chunks those of ct u r and of ct for each channel of n, and what dx takes: slope, which was r, shift, spread.
void merge_sums(const Shape& shape, const Chunks& chunks, const float* scales, const Given& given, int64_t n, Known& known,
                double* product, double* alone) {
  const int64_t c = shape.c(), g = shape.g, first = n * g;
  float *slope = known.each.data() + 3 * c, *shift = slope + c, *by_u = shift + c;
  std::vector<double> each(c), sums(g), products(g);
  for (int64_t k = 0; k < chunks.count; ++k) {
    const double* part = known.part(k);
    for (int64_t j = 0; j < c; ++j) product[j] += part[j];
    for (int64_t j = 0; j < c; ++j) alone[j] += part[c + j];
  }
  for (int64_t j = 0; j < c; ++j) product[j] *= slope[j];
  for (int64_t j = 0; j < c; ++j) each[j] = scales[j] * product[j];
  gather(shape, each.data(), products.data());
  for (int64_t j = 0; j < c; ++j) each[j] = scales[j] * alone[j];
  gather(shape, each.data(), sums.data());
  std::vector<Found> of(g);
  for (int64_t i = 0; i < g; ++i) of[i] = found(given, first + i, known.sets[i].var, slope[i * shape.d], sums[i], products[i]);
  spread(shape, shift, [&](int64_t i) { return of[i].shift; });
  spread(shape, by_u, [&](int64_t i) { return of[i].spread; });
  for (int64_t j = 0; j < c; ++j) slope[j] *= scales[j];
}

template <typename X, typename Y>
void apply_to(const X* x, const Y* ct, int64_t rows, int64_t c, const Known& known, X* dx) {
  const float *factor = known.each.data(), *pivot = factor + c, *offset = pivot + c, *slope = offset + c, *shift = slope + c,
              *by_u = shift + c;
  for (int64_t r = 0; r < rows; ++r, x += c, ct += c, dx += c) {
#pragma omp simd
    for (int64_t j = 0; j < c; ++j) {
      const float u = (load(x[j]) * factor[j] - pivot[j]) - offset[j];
      store(dx + j, factor[j] * (slope[j] * load(ct[j]) + shift[j] + u * by_u[j]));
    }
  }
}

template <typename X, typename Y>
void backward(ffi::ThreadPool& pool, const Shape& shape, const X* x, const Y* ct, const float* scale, const Given& given, X* dx,
              float* dscale, float* dbias) {
  if (shape.p == 1) return backward_rows(pool, shape, x, ct, scale, given, dx, dscale, dbias);
  const int64_t c = shape.c();
  const Chunks chunks(shape, pool.num_threads());
  std::vector<double> sums(shape.n * 2 * c);
  auto start = [&](int64_t n, int64_t k) { return (n * shape.p + k * chunks.rows) * c; };
  auto make = [&] { return Known(shape, chunks, given.again ? 4 : 2, 6); };
  auto merge = [&](Known& known, int64_t n) {
    merge_stats(shape, chunks, given.stats, n, known);
    spread_frames(shape, given.rule, known);
    center(shape, chunks, known);
  };
  auto take = [&](Known& known, int64_t n) {
    for (int64_t i = 0; i < shape.g; ++i) known.sets[i] = given.kept(n * shape.g + i);
    spread_frames(shape, given.rule, known);
  };
  auto reduce = [&](Known& known, int64_t n, int64_t k) {
    const int64_t i = start(n, k);
    chunk_sums(x + i, ct + i, chunks.size(shape, k), c, known, known.part(k));
  };
  auto combine = [&](Known& known, int64_t n) {
    double* product = sums.data() + n * 2 * c;
    merge_sums(shape, chunks, shape.of(scale, n), given, n, known, product, product + c);
  };
  auto apply = [&](const Known& known, int64_t n, int64_t k) {
    const int64_t i = start(n, k);
    apply_to(x + i, ct + i, chunks.size(shape, k), c, known, dx + i);
  };
  if (given.again) in_stages(pool, shape, chunks, make, reduce_to_stats(shape, chunks, given.stats, x, ct), merge, combine, apply);
  else in_stages(pool, shape, chunks, make, take, reduce, combine, apply);
  const int64_t per_scale = shape.n / shape.s;
  for (int64_t s = 0; s < shape.s; ++s) add_up(sums.data() + s * per_scale * 2 * c, per_scale, c, dscale + s * c, dbias + s * c);
}

ffi::Error backward_call(ffi::ThreadPool pool, Any x, Any ct, F32 scale, F32 pivot, F32 offset, F32 var, F32 by_offset, F32 by_var,
                         S8 power, ffi::Result<Any> dx, ffi::Result<F32> dscale, ffi::Result<F32> dbias, int64_t p, int64_t g, int64_t d,
                         double epsilon, double correction, bool in_std, bool centered, int64_t lowest, bool again) {
  const Shape shape = shape_of(x, scale, p, g, d);
  const int64_t sets = shape.sets();
  const Given given{{epsilon, correction, in_std}, {nullptr, nullptr, nullptr, nullptr, centered, lowest}, double(p) * d,  again,
                    {pivot, sets}, {offset, sets}, {var, sets}, {by_offset, sets}, {by_var, sets}, {power, sets}};
  return typed(x.element_type(), ct.element_type(), [&](auto* of_x, auto* of_ct) {
    backward(pool, shape, (decltype(of_x))x.untyped_data(), (decltype(of_ct))ct.untyped_data(), scale.typed_data(), given,
             (decltype(of_x))in_large_pages(dx), dscale->typed_data(), dbias->typed_data());
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormBackward, backward_call,
                              giving<2>(taking<6>(on_threads().Arg<Any>().Arg<Any>()).Arg<S8>().Ret<Any>())
                                  .Attr<int64_t>("p")
                                  .Attr<int64_t>("g")
                                  .Attr<int64_t>("d")
                                  .Attr<double>("epsilon")
                                  .Attr<double>("correction")
                                  .Attr<bool>("in_std")
                                  .Attr<bool>("centered")
                                  .Attr<int64_t>("lowest")
                                  .Attr<bool>("again"));
