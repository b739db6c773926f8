// The transpose of the tangent of forward.cc: the gradients of x, scale and bias.

#include "pages.h"
#include "sets.h"
#include "sums.h"

namespace {

constexpr int64_t kShort = 512;  // up to it a row is added in float32, in the lanes of a vector

// What the gradient needs of each set: its frame, r = d y / d u, q with d r = -q r r d var / 2, and the cotangents of
// offset and variance, per element. The offset of small rows is not given, but computed again.
struct Given {
  const float *factor, *pivot, *offset, *r, *q, *by_offset, *by_var;
  bool recompute;
};

// The sum of some parts, each of which has c numbers for scale and c for bias.
void add_up(const double* parts, int64_t count, int64_t c, float* dscale, float* dbias) {
  std::vector<double> sum(2 * c);
  for (int64_t k = 0; k < count; ++k, parts += 2 * c)
    for (int64_t j = 0; j < 2 * c; ++j) sum[j] += parts[j];
  std::copy(sum.begin(), sum.begin() + c, dscale);
  std::copy(sum.begin() + c, sum.end(), dbias);
}

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
  for (int64_t s = 0; s < shape.s; ++s) add_up(parts.data() + s * blocks * 2 * c, blocks, c, dscale + s * c, dbias + s * c);
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
    std::vector<float> each(4 * c);
    spread_all(n, {given.factor, given.pivot, given.offset, given.r}, each);
    const float *factor = each.data(), *pivot = factor + c, *offset = pivot + c, *slope = offset + c;
    const int64_t start = (n * shape.p + k * chunks.rows) * c;
    for (int64_t first = 0; first < c; first += kStrip) {
      const int64_t width = std::min(kStrip, c - first);
      double sum[2][kStrip];
      sum_rows(chunks.size(shape, k), width, sum, [&](int64_t r, int64_t channel, int64_t place, auto& few) {
        const int64_t j = first + channel, i = start + r * c + j;
        const float xh = ((load(x[i]) * factor[j] - pivot[j]) - offset[j]) * slope[j], cotangent = load(ct[i]);
        few[0][place] += cotangent * xh;
        few[1][place] += cotangent;
      });
      for (int64_t i = 0; i < 2; ++i) std::copy(sum[i], sum[i] + width, part + i * c + first);
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
  const int64_t per_scale = shape.n / shape.s;
  for (int64_t s = 0; s < shape.s; ++s) add_up(sums.data() + s * per_scale * 2 * c, per_scale, c, dscale + s * c, dbias + s * c);
}

ffi::Error backward_call(ffi::ThreadPool pool, Any x, Any ct, F32 scale, F32 factor, F32 pivot, F32 offset, F32 r,
                         F32 q, F32 by_offset, F32 by_var, ffi::Result<Any> dx, ffi::Result<F32> dscale,
                         ffi::Result<F32> dbias, int64_t p, int64_t g, int64_t d, bool centered, bool recompute) {
  const Shape shape = shape_of(x, scale, p, g, d);
  const Given given{factor.typed_data(), pivot.typed_data(),     offset.typed_data(), r.typed_data(),
                    q.typed_data(),      by_offset.typed_data(), by_var.typed_data(), recompute};
  return typed(x.element_type(), ct.element_type(), [&](auto* of_x, auto* of_ct) {
    backward(pool, shape, centered, (decltype(of_x))x.untyped_data(), (decltype(of_ct))ct.untyped_data(), scale.typed_data(), given,
             (decltype(of_x))in_large_pages(dx), dscale->typed_data(), dbias->typed_data());
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormBackward, backward_call,
                              giving<2>(taking<8>(on_threads().Arg<Any>().Arg<Any>()).Ret<Any>())
                                  .Attr<int64_t>("p")
                                  .Attr<int64_t>("g")
                                  .Attr<int64_t>("d")
                                  .Attr<bool>("centered")
                                  .Attr<bool>("recompute"));
