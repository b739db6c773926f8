// One step of an LSTM, layer-normalized or not, for one sequence. The equations are those of cells.py and pointwise.py, and so
// are the names.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "product.h"

// E / (E + 2) with E = exp(2 |v|) - 1 = 2**n (exp(r) - 1) + 2**n - 1, which loses nothing near 0.
inline float tanh_of(float v) {
  const float size = std::fabs(v), y = 2 * (size > 9 ? 9 : size);
  const float n = std::rint(y * 1.44269504f), r = y - n * 0.693145752f - n * 1.42860677e-6f;
  const float e = r + r * r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f + r / 5040)))));
  const int32_t bits = (int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  const float big = power * e + (power - 1);
  return std::copysign(big / (big + 2), v);
}

struct Lstm {
  int64_t time, batch, hidden, inputs;
  int64_t sets;  // of the pre-activations: none, one, or one for each gate
  bool joint;    // input and recurrent term have one norm, else each its own
  bool cell, centered, carried;  // c is normalized, with its mean taken away, and so is carried on
  bool time_major;               // steps lie one after the other, else sequences do
  float epsilon;
  const float *x, *scale, *input_scale, *bias, *cell_scale, *cell_bias;
  const bool* taken;
  const float *input_kernel, *kernel;  // in panels

  // Where a sequence's vector of a step lies, in arrays of so many steps.
  int64_t row(int64_t step, int64_t sequence, int64_t steps) const { return time_major ? step * batch + sequence : sequence * steps + step; }
  int64_t row(int64_t step, int64_t sequence) const { return row(step, sequence, time); }
  int64_t apart_by(int64_t steps) const { return time_major ? 1 : steps; }  // two sequences' rows of a step

  int64_t packed() const { return 4 * hidden; }
  int64_t padded() const { return (packed() + kPanel - 1) / kPanel * kPanel; }
  int64_t panels() const { return padded() / kPanel; }

  float rstd(float var) const { return epsilon > 0 ? 1 / std::sqrt(var + epsilon) : var > 0 ? 1 / std::sqrt(var) : 0; }

  bool apart() const { return sets && !joint; }

  // Both terms of some sequences at a step: the products of x, and of h, with their kernels.
  void products(int64_t step, int64_t first, int64_t rows, const float* h, int64_t h_stride, float* of_x, float* of_h) const {
    product(rows, inputs, panels(), x + row(step, first) * inputs, apart_by(time) * inputs, input_kernel, of_x, padded());
    product(rows, hidden, panels(), h, h_stride, kernel, of_h, padded());
  }

  // Whether there is nothing to read: then norms of nothing have no gradient.
  bool idle(int64_t at) const { return std::all_of(x + at * inputs, x + (at + 1) * inputs, [](float v) { return v == 0; }); }

  static float square(int64_t n, const float* a) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += a[i] * a[i];
    return sum / n;
  }

  // Turns the recurrent products of one sequence, a, into normalized ones (x: those of the input), and gives t, the tanh of the
  // pre-activations, and 1 / deviation of a and x. Where terms are apart, t begins as that of x.
  void gates(float* a, const float* x, float* t, float* r, float& r_x, bool* still) const {
    const int64_t n = packed(), width = sets ? n / sets : n;
    if (apart()) {
      const float root = r_x = rstd(square(n, x));
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) t[i] = input_scale[i] * (x[i] * root) + bias[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        a[i] += x[i];
        t[i] = bias[i];
      }
    }
    if (!sets)
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) t[i] = tanh_of(a[i] + t[i]);
    for (int64_t s = 0; s < sets; ++s) {
      const float var = square(width, a + s * width), root = r[s] = rstd(var);
      still[s] = var == 0;
#pragma omp simd
      for (int64_t i = s * width; i < (s + 1) * width; ++i) {
        a[i] *= root;
        t[i] = tanh_of(scale[i] * a[i] + t[i]);
      }
    }
  }

  // c', which may take the place of c, and what h' shows of it: where it is normalized, u is that without gain and shift, r is
  // 1 / deviation.
  void cell_of(const float* t, const float* c, float* next, float* u, float* shown, float& r, bool& still) const {
    const float *i = t, *f = t + hidden, *g = f + hidden;
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < hidden; ++k) sum += next[k] = (0.5f * f[k] + 0.5f) * c[k] + (0.5f * i[k] + 0.5f) * g[k];
    if (!cell) {
      std::copy_n(next, hidden, shown);
      return;
    }
    const float mean = centered ? sum / hidden : 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t k = 0; k < hidden; ++k) {
      u[k] = next[k] - mean;
      squares += u[k] * u[k];
    }
    const float root = r = rstd(squares / hidden);
    still = squares == 0;
#pragma omp simd
    for (int64_t k = 0; k < hidden; ++k) {
      u[k] *= root;
      shown[k] = u[k] * cell_scale[k] + cell_bias[k];
    }
  }

  // One step of one sequence.
  void step(float* a, const float* x, float* c, float* t, float* u, float* shown, float* next_h) const {
    float r[4], r_x;
    bool still[4];
    gates(a, x, t, r, r_x, still);
    cell_of(t, c, c, u, shown, r[0], still[0]);
    const float* o = t + 3 * hidden;
#pragma omp simd
    for (int64_t k = 0; k < hidden; ++k) next_h[k] = (0.5f * o[k] + 0.5f) * tanh_of(shown[k]);
    if (carried) std::copy_n(shown, hidden, c);
  }
};
