// Gradients where groups are rows: x is (N, 1, G, D).
#pragma once

#include "backward.h"

namespace {

// Those of one example; dscale and dbias are added to.
template <typename X, typename DY>
void backward_example(const Backward& call, int64_t first_group, const GroupStats* stats, const float* rstd,
                      const float* scale, const X* x, const DY* dy, X* dx, float* dscale, float* dbias) {
  const int64_t d = call.shape.d;
  for (int64_t g = 0; g < call.shape.g; ++g, x += d, dy += d, dx += d, scale += d, dscale += d, dbias += d) {
    const float factor = factor_of(stats[g].exponent), shift = stats[g].shift, low_mean = stats[g].low_mean,
                r = rstd[g];
    double sums[2];
    row_sums(d, sums, [&](int64_t i, int64_t way, auto& partial) {
      const float xhat = ((load(x[i]) * factor - shift) - low_mean) * r, cotangent = load(dy[i]),
                  scaled = cotangent * scale[i];
      partial[0][way] += scaled;
      partial[1][way] += scaled * xhat;
      dscale[i] += cotangent * xhat;
      dbias[i] += cotangent;
    });
    const GroupGradient by = group_gradient(call, first_group + g, double(d), stats[g], r, sums[0], sums[1]);
#pragma omp simd
    for (int64_t i = 0; i < d; ++i) {
      const float u = (load(x[i]) * factor - shift) - low_mean;
      store(dx + i, factor * (by.rstd * (load(dy[i]) * scale[i]) + by.intercept + u * by.spread));
    }
  }
}

// Examples from first to end, which share scale s, a few at a time: gradients of parameters are added in float32 for
// these, then in double.
template <typename X, typename DY>
void backward_examples(const Backward& call, int64_t s, int64_t first, int64_t end, const X* x, const DY* dy, X* dx,
                       double* dscale, double* dbias) {
  const Shape& shape = call.shape;
  const int64_t channels = shape.channels();
  std::vector<float> few_dscale(channels), few_dbias(channels), rstd(kFloatRows * shape.g);
  std::vector<GroupStats> stats(kFloatRows * shape.g);
  for (int64_t start = first; start < end; start += kFloatRows) {
    const int64_t examples = std::min(kFloatRows, end - start), first_group = start * shape.g,
                  groups = examples * shape.g;
    if (call.recompute) stats_of_rows(call.options, x + first_group * shape.d, shape.d, groups, stats.data());
    for (int64_t i = 0; !call.recompute && i < groups; ++i) stats[i] = call.residuals(first_group + i);
    call.rule.rstds(stats.data(), groups, double(shape.d), rstd.data());
    std::fill(few_dscale.begin(), few_dscale.end(), 0.0f);
    std::fill(few_dbias.begin(), few_dbias.end(), 0.0f);
    for (int64_t i = 0; i < examples; ++i) {
      const int64_t g = i * shape.g, at = (start + i) * channels;
      if (call.mask.hides(start + i)) {
        std::fill_n(dx + at, channels, X{});
        continue;
      }
      backward_example(call, first_group + g, &stats[g], &rstd[g], call.scale + s * channels, x + at, dy + at, dx + at,
                       few_dscale.data(), few_dbias.data());
    }
    for (int64_t j = 0; j < channels; ++j) dscale[j] += few_dscale[j];
    for (int64_t j = 0; j < channels; ++j) dbias[j] += few_dbias[j];
  }
}

template <typename X, typename DY>
void backward_rows(ffi::ThreadPool& pool, const Backward& call, const X* x, const DY* dy, X* dx) {
  const Shape& shape = call.shape;
  const int64_t per_scale = shape.n / shape.s;
  const int64_t wanted =
      std::min<int64_t>(std::max<int64_t>(1, 64 / shape.s), (per_scale + kFloatRows - 1) / kFloatRows);
  const int64_t of_block = (per_scale + wanted - 1) / wanted;
  ParameterSums sums(shape.s * wanted, shape.channels());
  run_in_parallel(pool, shape.s * wanted, [&](int64_t task) {
    const int64_t s = task / wanted, block = task % wanted, first = s * per_scale;
    const int64_t end = std::min(per_scale, (block + 1) * of_block);
    backward_examples(call, s, first + block * of_block, first + end, x, dy, dx, sums.dscale(task), sums.dbias(task));
  });
  sums.add_up(shape.s, call.dscale, call.dbias);
}

}  // namespace
