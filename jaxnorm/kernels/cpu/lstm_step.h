// One step of an LSTM, with or without normalization, for one sequence. In the words of cells.py, whose weights have
// the halves in sigmoid(v) = tanh(v / 2) / 2 + 1 / 2 and the centering of the pre-activations in them:
//
//   i, f, g, o = tanh(scale norm(h U) + input_scale norm(x W) + bias)         a norm for each term
//   i, f, g, o = tanh(scale norm(h U + x W) + bias)                           a joint norm
//   c' = sigmoid(f) c + sigmoid(i) g
//   h' = sigmoid(o) tanh(cell_scale norm(c') + cell_bias)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ffi.h"
#include "inverse_root.h"
#include "matmul.h"
#include "threads.h"

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

// sigmoid(v), from the tanh of half of v.
inline float sigmoid_of(float tanh) { return 0.5f * tanh + 0.5f; }

struct LstmOptions {
  int64_t hidden, batch;
  int64_t groups;  // of the pre-activations: none, one, or one for each gate
  bool joint;      // input and recurrent term share a norm
  bool normalizes_cell;
  bool centered;    // the mean of c is subtracted
  bool carries;     // the normalized c is carried on
  bool time_major;  // x is (time, batch, inputs), else (batch, time, inputs)
  double epsilon;
};
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(LstmOptions, ffi::StructMember<int64_t>("hidden"),
                                      ffi::StructMember<int64_t>("batch"), ffi::StructMember<int64_t>("groups"),
                                      ffi::StructMember<bool>("joint"), ffi::StructMember<bool>("normalizes_cell"),
                                      ffi::StructMember<bool>("centered"), ffi::StructMember<bool>("carries"),
                                      ffi::StructMember<bool>("time_major"), ffi::StructMember<double>("epsilon"));

namespace {

// The parts of a packed vector.
template <typename T>
struct Gates {
  T *i, *f, *g, *o;

  Gates(T* packed, int64_t hidden) : i(packed), f(i + hidden), g(f + hidden), o(g + hidden) {}
};

// What normalizations found: 1 / deviation, and whether there was no spread.
struct GateStats {
  float rstd[4], input_rstd;
  bool constant[4];
};
struct CellStats {
  float rstd;
  bool constant;
};

struct Lstm : LstmOptions {
  int64_t time, inputs;
  const float *x, *scale, *input_scale, *bias, *cell_scale, *cell_bias;
  const bool* mask;                              // false carries the state through
  const float *input_kernel, *recurrent_kernel;  // in panels
  const float *h0, *c0;

  static Lstm read(Buffers& buffers, const LstmOptions& options) {
    Lstm net{options};
    const Array<const float> x = buffers.argument();
    net.x = x.data;
    for (const float** vector : {&net.scale, &net.input_scale, &net.bias, &net.cell_scale, &net.cell_bias})
      *vector = buffers.argument().data;
    const Array<const bool> mask = buffers.argument<ffi::PRED>();
    net.mask = mask.data;
    for (const float** matrix : {&net.input_kernel, &net.recurrent_kernel, &net.h0, &net.c0})
      *matrix = buffers.argument().data;
    const int64_t steps = std::max<int64_t>(1, mask.size);
    net.time = steps / options.batch;
    net.inputs = x.size / steps;
    return net;
  }

  // Where the vector of a sequence lies in an array of so many steps, and how far from it that of the next sequence.
  int64_t row(int64_t step, int64_t sequence, int64_t steps) const {
    return time_major ? step * batch + sequence : sequence * steps + step;
  }
  int64_t row(int64_t step, int64_t sequence) const { return row(step, sequence, time); }
  int64_t row_stride(int64_t steps) const { return time_major ? 1 : steps; }

  int64_t packed() const { return 4 * hidden; }  // i, f, g and o side by side
  int64_t panels() const { return (packed() + kPanel - 1) / kPanel; }
  int64_t padded() const { return panels() * kPanel; }

  bool separate() const { return groups && !joint; }

  float rstd(float var) const { return inverse_root(var, float(epsilon)); }

  static float mean_square(int64_t n, const float* a) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += a[i] * a[i];
    return sum / n;
  }

  // Whether x is 0 in a row: norms of a zero state then have no gradient.
  bool is_idle(int64_t row) const {
    return std::all_of(x + row * inputs, x + (row + 1) * inputs, [](float v) { return v == 0; });
  }

  // The products of x and of h with their kernels, for some sequences at a step.
  void products(int64_t step, int64_t first, int64_t rows, const float* h, int64_t h_stride, float* input_term,
                float* recurrent_term) const {
    multiply(rows, inputs, panels(), x + row(step, first) * inputs, row_stride(time) * inputs, input_kernel, input_term,
             padded());
    multiply(rows, hidden, panels(), h, h_stride, recurrent_kernel, recurrent_term, padded());
  }

  // Normalizes the recurrent term, or the sum of both, in place; gates becomes the tanh of the pre-activations.
  GateStats gates(float* term, const float* input_term, float* gates) const {
    GateStats stats{};
    const int64_t n = packed(), width = groups ? n / groups : n;
    if (separate()) {
      const float r = stats.input_rstd = rstd(mean_square(n, input_term));
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) gates[i] = input_scale[i] * (input_term[i] * r) + bias[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        term[i] += input_term[i];
        gates[i] = bias[i];
      }
    }
    if (!groups)
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) gates[i] = tanh_of(term[i] + gates[i]);
    for (int64_t g = 0; g < groups; ++g) {
      const float var = mean_square(width, term + g * width), r = stats.rstd[g] = rstd(var);
      stats.constant[g] = var == 0;
#pragma omp simd
      for (int64_t i = g * width; i < (g + 1) * width; ++i) {
        term[i] *= r;
        gates[i] = tanh_of(scale[i] * term[i] + gates[i]);
      }
    }
    return stats;
  }

  // c' from c, which it may take the place of, and what h' sees of it: its normalization, if any, whose unscaled value
  // is `unit`.
  CellStats cell(const float* gates, const float* c, float* next_c, float* unit, float* normalized) const {
    const Gates t(gates, hidden);
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < hidden; ++k) {
      next_c[k] = sigmoid_of(t.f[k]) * c[k] + sigmoid_of(t.i[k]) * t.g[k];
      sum += next_c[k];
    }
    if (!normalizes_cell) {
      std::copy_n(next_c, hidden, normalized);
      return {0, false};
    }
    const float mean = centered ? sum / hidden : 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t k = 0; k < hidden; ++k) {
      unit[k] = next_c[k] - mean;
      squares += unit[k] * unit[k];
    }
    const float r = rstd(squares / hidden);
#pragma omp simd
    for (int64_t k = 0; k < hidden; ++k) {
      unit[k] *= r;
      normalized[k] = unit[k] * cell_scale[k] + cell_bias[k];
    }
    return {r, squares == 0};
  }
};

constexpr int64_t kBlock = 4;  // sequences whose sums of gradients are added before those of others

// Calls run(first sequence, sequences) for blocks of sequences, which do not see each other: up to eight blocks side by
// side, so that kernels are read less often, and as many for every thread.
template <typename Run>
void over_sequences(ffi::ThreadPool& pool, int64_t batch, Run run) {
  const int64_t blocks = (batch + kBlock - 1) / kBlock, threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t tasks = std::min(blocks, (blocks + 8 * threads - 1) / (8 * threads) * threads);
  run_in_parallel(pool, tasks, [&](int64_t task) {
    const int64_t first = blocks * task / tasks * kBlock, end = std::min(batch, blocks * (task + 1) / tasks * kBlock);
    run(first, end - first);
  });
}

// h or c of some sequences before a step: vectors `stride` elements apart.
struct States {
  const float* values;
  int64_t stride;

  States(const Lstm& net, int64_t step, int64_t first, const float* initial, const float* after_steps)
      : values(step ? after_steps + net.row(step - 1, first) * net.hidden : initial + first * net.hidden),
        stride(step ? net.row_stride(net.time) * net.hidden : net.hidden) {}
  const float* of(int64_t sequence) const { return values + sequence * stride; }
};

}  // namespace
