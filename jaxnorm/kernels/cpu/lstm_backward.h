// The transpose of some steps of an LSTM: gradients of the products of kernels, of the state before and of the vectors
// of parameters. JAX multiplies the first by the rows that the kernels were multiplied with, which are written down
// beside them.
#pragma once

#include <vector>

#include "lstm_step.h"

namespace {

// For each vector of parameters its gradient.
struct VectorGradients {
  float *scale, *input_scale, *bias, *cell_scale, *cell_bias;
};

// Those of every block of sequences, which are added up in the end.
class BlockGradients {
 public:
  BlockGradients(int64_t blocks, int64_t packed, int64_t hidden)
      : blocks_(blocks), packed_(packed), hidden_(hidden), values_(blocks * (3 * packed + 2 * hidden)) {}

  VectorGradients block(int64_t b) {
    float* scale = values_.data() + b * (3 * packed_ + 2 * hidden_);
    float *input_scale = scale + packed_, *bias = input_scale + packed_, *cell_scale = bias + packed_;
    return {scale, input_scale, bias, cell_scale, cell_scale + hidden_};
  }

  void add_up(const VectorGradients& to) {
    for (auto vector : {&VectorGradients::scale, &VectorGradients::input_scale, &VectorGradients::bias})
      add_up(vector, packed_, to);
    for (auto vector : {&VectorGradients::cell_scale, &VectorGradients::cell_bias}) add_up(vector, hidden_, to);
  }

 private:
  void add_up(float* VectorGradients::* vector, int64_t size, const VectorGradients& to) {
    for (int64_t k = 0; k < size; ++k) {
      double sum = 0;
      for (int64_t b = 0; b < blocks_; ++b) sum += (block(b).*vector)[k];
      (to.*vector)[k] = float(sum);
    }
  }

  int64_t blocks_, packed_, hidden_;
  std::vector<float> values_;
};

// What the transpose is given beside the network, and what it results in.
struct LstmBackward {
  const float* transposed_kernel;    // in panels
  const float *h, *c;                // after every step
  const float* gates;                // null where they are recomputed
  const float* dh;                   // of the output of every step
  const float *dh_after, *dc_after;  // of the state after the last of these steps
  int64_t begin, steps;

  float* drecurrent_term;    // of h U or, with a joint norm or none, of the sum of both
  float* dinput_term;        // of x W where that differs
  float *rows, *input_rows;  // h and x: side by side, unless the gradients of their products differ
  float *dh_before, *dc_before;
  VectorGradients vectors;
};

// The transpose of u = r (a - mean): da from du.
inline void normalization_gradient(int64_t n, const float* u, float r, bool centered, const float* du, float* da) {
  float sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
  for (int64_t k = 0; k < n; ++k) {
    sum += du[k];
    dot += du[k] * u[k];
  }
  const float mean = centered ? sum / n : 0, slope = dot / n;
#pragma omp simd
  for (int64_t k = 0; k < n; ++k) da[k] = r * (du[k] - mean - u[k] * slope);
}

// What the transpose of one step of one sequence reads and writes.
struct StepArrays {
  float* term;              // products of h, then their gradient
  const float* input_term;  // products of x
  const float* gates;       // null where they are recomputed from the terms; given only where there is no norm
  const float *c, *dh;
  float *dc, *dinput_term;  // dc of the step after, then of this one
};

// One step of one sequence, with memory for what it recomputes.
class StepGradient {
 public:
  explicit StepGradient(const Lstm& net)
      : net_(net),
        gates_(net.packed()),
        unit_input_(net.packed()),
        next_c_(net.hidden),
        unit_cell_(net.hidden),
        normalized_cell_(net.hidden) {}

  void operator()(int64_t row, const StepArrays& of, const VectorGradients& vectors) {
    GateStats stats{};
    if (!of.gates) stats = net_.gates(of.term, of.input_term, gates_.data());
    const bool idle = net_.groups && net_.is_idle(row);
    cell(of, idle, vectors);
    normalizations(stats, idle, of.term, of.input_term, of.dinput_term, vectors);
  }

 private:
  // Through h' = sigmoid(o) tanh(normalized c') and c' = sigmoid(f) c + sigmoid(i) g. What goes to dinput_term is for
  // now the gradient of the pre-activations.
  void cell(const StepArrays& of, bool idle, const VectorGradients& vectors) {
    const int64_t hidden = net_.hidden;
    const float *gates = of.gates ? of.gates : gates_.data(), *c = of.c, *dh = of.dh;
    float *dc = of.dc, *dterm = of.dinput_term;
    const Gates<const float> t(gates, hidden);
    const Gates<float> d(dterm, hidden);
    float *unit = unit_cell_.data(), *dcell = normalized_cell_.data();
    const CellStats stats = net_.cell(gates, c, next_c_.data(), unit, dcell);
    const float carries = net_.carries ? 1 : 0;
#pragma omp simd
    for (int64_t k = 0; k < hidden; ++k) {
      const float y = tanh_of(dcell[k]);
      d.o[k] = dh[k] * y * 0.5f * (1 - t.o[k] * t.o[k]);
      dcell[k] = dh[k] * sigmoid_of(t.o[k]) * (1 - y * y) + carries * dc[k];
    }
    if (net_.normalizes_cell) {
#pragma omp simd
      for (int64_t k = 0; k < hidden; ++k) {
        vectors.cell_scale[k] += dcell[k] * unit[k];
        vectors.cell_bias[k] += dcell[k];
        dcell[k] *= net_.cell_scale[k];
      }
      normalization_gradient(hidden, unit, stats.constant && idle ? 0 : stats.rstd, net_.centered, dcell, dcell);
    }
#pragma omp simd
    for (int64_t k = 0; k < hidden; ++k) {
      const float dnext = dcell[k] + (1 - carries) * dc[k];
      d.i[k] = dnext * t.g[k] * 0.5f * (1 - t.i[k] * t.i[k]);
      d.f[k] = dnext * c[k] * 0.5f * (1 - t.f[k] * t.f[k]);
      d.g[k] = dnext * sigmoid_of(t.i[k]) * (1 - t.g[k] * t.g[k]);
      dc[k] = dnext * sigmoid_of(t.f[k]);
    }
#pragma omp simd
    for (int64_t k = 0; k < net_.packed(); ++k) vectors.bias[k] += dterm[k];
  }

  // From the gradient d of the pre-activations to those of both terms: `term`, and d itself.
  void normalizations(const GateStats& stats, bool idle, float* term, const float* input_term, float* d,
                      const VectorGradients& vectors) {
    if (!net_.groups) return;
    const int64_t n = net_.packed(), width = n / net_.groups;
    float *dunit = gates_.data(), *unit_input = unit_input_.data();
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) {
      vectors.scale[k] += d[k] * term[k];
      dunit[k] = d[k] * net_.scale[k];
    }
    for (int64_t g = 0; g < net_.groups; ++g) {
      const float r = stats.constant[g] && idle ? 0 : stats.rstd[g];
      float* of_group = term + g * width;  // the kernels are centered, and with them the terms
      normalization_gradient(width, of_group, r, false, dunit + g * width, of_group);
    }
    if (!net_.separate()) return;
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) {
      unit_input[k] = input_term[k] * stats.input_rstd;
      vectors.input_scale[k] += d[k] * unit_input[k];
      d[k] *= net_.input_scale[k];
    }
    normalization_gradient(n, unit_input, stats.input_rstd, false, d, d);
  }

  const Lstm& net_;
  std::vector<float> gates_, unit_input_, next_c_, unit_cell_, normalized_cell_;
};

// All steps of some sequences, from the last to the first.
class SequencesGradient {
 public:
  SequencesGradient(const Lstm& net, const LstmBackward& call, int64_t first, int64_t rows)
      : net_(net),
        call_(call),
        first_(first),
        rows_(rows),
        padded_((net.hidden + kPanel - 1) / kPanel * kPanel),
        terms_(rows * net.padded()),
        input_terms_(rows * net.padded()),
        dh_(rows * padded_),
        step_gradient_(net) {}

  void operator()(BlockGradients& blocks) {
    const int64_t hidden = net_.hidden;
    std::copy_n(call_.dc_after + first_ * hidden, rows_ * hidden, call_.dc_before + first_ * hidden);
    for (int64_t r = 0; r < rows_; ++r) std::copy_n(call_.dh_after + (first_ + r) * hidden, hidden, dh(r));
    for (int64_t step = call_.begin + call_.steps - 1; step >= call_.begin; --step) {
      const States h(net_, step, first_, net_.h0, call_.h), c(net_, step, first_, net_.c0, call_.c);
      if (!call_.gates) net_.products(step, first_, rows_, h.values, h.stride, input_terms_.data(), terms_.data());
      for (int64_t r = 0; r < rows_; ++r) one(step, r, h.of(r), c.of(r), blocks.block((first_ + r) / kBlock));
      multiply_by_transposed(step);
    }
    for (int64_t r = 0; r < rows_; ++r) std::copy_n(dh(r), hidden, call_.dh_before + (first_ + r) * hidden);
  }

 private:
  float* dh(int64_t r) { return &dh_[r * padded_]; }

  void one(int64_t step, int64_t r, const float* h, const float* c, const VectorGradients& vectors) {
    const int64_t hidden = net_.hidden, inputs = net_.inputs, n = net_.packed();
    const int64_t row = net_.row(step, first_ + r), to = net_.row(step - call_.begin, first_ + r, call_.steps);
    const bool separate = net_.separate();
    for (int64_t k = 0; k < hidden; ++k) dh(r)[k] += call_.dh[row * hidden + k];
    float* dterm = call_.drecurrent_term + to * n;
    float* dinput_term = separate ? call_.dinput_term + to * n : dterm;
    float* h_row = call_.rows + to * (separate ? hidden : hidden + inputs);
    float* x_row = separate ? call_.input_rows + to * inputs : h_row + hidden;
    std::copy_n(h, hidden, h_row);
    if (net_.mask[row]) {
      const StepArrays of{&terms_[r * net_.padded()],
                          &input_terms_[r * net_.padded()],
                          call_.gates ? call_.gates + row * n : nullptr,
                          c,
                          dh(r),
                          call_.dc_before + (first_ + r) * hidden,
                          dinput_term};
      step_gradient_(row, of, vectors);
      if (net_.groups) std::copy_n(of.term, n, dterm);
      std::copy_n(net_.x + row * inputs, inputs, x_row);
    } else {
      std::fill_n(x_row, inputs, 0.f);
      std::fill_n(dterm, n, 0.f);
      if (separate) std::fill_n(dinput_term, n, 0.f);
    }
  }

  // dh of the step before; that of sequences whose step is masked out stays.
  void multiply_by_transposed(int64_t step) {
    const int64_t n = net_.packed();
    float* product = terms_.data();  // no longer needed
    const float* dterm = call_.drecurrent_term + net_.row(step - call_.begin, first_, call_.steps) * n;
    multiply(rows_, n, padded_ / kPanel, dterm, net_.row_stride(call_.steps) * n, call_.transposed_kernel, product,
             padded_);
    for (int64_t r = 0; r < rows_; ++r)
      if (net_.mask[net_.row(step, first_ + r)]) std::copy_n(product + r * padded_, net_.hidden, dh(r));
  }

  const Lstm& net_;
  const LstmBackward& call_;
  int64_t first_, rows_, padded_;
  std::vector<float> terms_, input_terms_, dh_;
  StepGradient step_gradient_;
};

}  // namespace
