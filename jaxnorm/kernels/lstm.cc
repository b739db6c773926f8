// The loop over time of the LSTM, layer-normalized or not, and its transpose.
//
// Sequences do not see each other: a thread takes some of them through all steps, with the kernels in its cache.

#include <vector>

#include "lstm.h"
#include "pages.h"
#include "parallel.h"

namespace {

constexpr int64_t kBlock = 4;  // sequences whose sums of gradients are added before those of others

// Sequences in blocks, up to eight of them side by side: the kernel is then read less often. Every thread gets as many.
template <typename F>
void over_sequences(ffi::ThreadPool& pool, int64_t batch, F run) {
  const int64_t blocks = (batch + kBlock - 1) / kBlock, threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t tasks = std::min(blocks, (blocks + 8 * threads - 1) / (8 * threads) * threads);
  in_parallel(pool, tasks, [&](int64_t task) {
    const int64_t first = blocks * task / tasks * kBlock, end = std::min(batch, blocks * (task + 1) / tasks * kBlock);
    run(first, end - first);
  });
}

// What some sequences set out from at a step: one vector in every so many numbers.
struct States {
  const float* of;
  int64_t stride;
};

States states(const Lstm& net, int64_t step, int64_t first, const float* start, const float* after_steps) {
  if (step) return {after_steps + net.row(step - 1, first) * net.hidden, net.apart_by(net.time) * net.hidden};
  return {start + first * net.hidden, net.hidden};
}

// Of each step c and the gates are written down where a transpose needs them.
void forward(ffi::ThreadPool& pool, const Lstm& net, const float* h0, const float* c0, float* hs, float* last, float* cs, float* gates) {
  const int64_t hidden = net.hidden, n = net.packed();
  over_sequences(pool, net.batch, [&](int64_t first, int64_t rows) {
    std::vector<float> a(rows * net.padded()), x(rows * net.padded()), t(net.packed()), u(hidden), shown(hidden);
    float* c = last + first * hidden;
    std::copy_n(c0 + first * hidden, rows * hidden, c);
    for (int64_t step = 0; step < net.time; ++step) {
      const States h = states(net, step, first, h0, hs);
      net.products(step, first, rows, h.of, h.stride, x.data(), a.data());
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = net.row(step, first + r), wide = r * net.padded();
        float *next_h = hs + at * hidden, *of_gates = gates ? gates + at * n : t.data();
        if (net.taken[at]) {
          net.step(&a[wide], &x[wide], c + r * hidden, of_gates, u.data(), shown.data(), next_h);
        } else {
          std::copy_n(h.of + r * h.stride, hidden, next_h);
          if (gates) std::fill_n(of_gates, n, 0.f);
        }
        if (cs) std::copy_n(c + r * hidden, hidden, cs + at * hidden);
      }
    }
  });
}

// Cotangents: of what a step gives in, of what it takes out. Sums of a block of sequences are (4 H, 4 H, 4 H, H, H).
struct Cotangents {
  const Lstm& net;
  std::vector<float> t, u_x, next, u, shown;

  explicit Cotangents(const Lstm& net)
      : net(net), t(net.packed()), u_x(net.packed()), next(net.hidden), u(net.hidden), shown(net.hidden) {}

  // The transpose of a normalization, from the cotangent v of u = r (a - mean) to that of a.
  static void back(int64_t n, const float* u, float r, bool centered, const float* v, float* to) {
    float sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (int64_t k = 0; k < n; ++k) {
      sum += v[k];
      dot += v[k] * u[k];
    }
    const float mean = centered ? sum / n : 0, slope = dot / n;
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) to[k] = r * (v[k] - mean - u[k] * slope);
  }

  // One step of one sequence: a holds products and gets their cotangents, dh is used up, dc becomes that of c. Gates that
  // were written down stand for the products, where there is no norm.
  void step(float* a, const float* x, const float* gates, int64_t at, const float* c, const float* dh, float* dc, float* dx, float* sums) {
    const int64_t hidden = net.hidden, n = net.packed();
    float r[4], r_x = 0, cell_r = 0;
    bool still[4], cell_still = false;
    if (!gates) net.gates(a, x, t.data(), r, r_x, still);
    const float *i = gates ? gates : t.data(), *f = i + hidden, *g = f + hidden, *o = g + hidden;
    net.cell_of(i, c, next.data(), u.data(), shown.data(), cell_r, cell_still);
    float *by_scale = sums, *by_input_scale = by_scale + n, *by_bias = by_input_scale + n;
    float *by_cell_scale = by_bias + n, *by_cell_bias = by_cell_scale + hidden;
    float* d = dx;  // of the pre-activations
    float* v = shown.data();
    const float by_carried = net.carried ? 1 : 0;
#pragma omp simd
    for (int64_t k = 0; k < hidden; ++k) {
      const float y = tanh_of(v[k]);
      d[3 * hidden + k] = dh[k] * y * 0.5f * (1 - o[k] * o[k]);
      v[k] = dh[k] * (0.5f * o[k] + 0.5f) * (1 - y * y) + by_carried * dc[k];
    }
    if (net.cell) {
#pragma omp simd
      for (int64_t k = 0; k < hidden; ++k) {
        by_cell_scale[k] += v[k] * u[k];
        by_cell_bias[k] += v[k];
        v[k] *= net.cell_scale[k];
      }
      back(hidden, u.data(), cell_still && net.idle(at) ? 0 : cell_r, net.centered, v, v);
    }
#pragma omp simd
    for (int64_t k = 0; k < hidden; ++k) {
      const float by_c = v[k] + (1 - by_carried) * dc[k];
      d[k] = by_c * g[k] * 0.5f * (1 - i[k] * i[k]);
      d[hidden + k] = by_c * c[k] * 0.5f * (1 - f[k] * f[k]);
      d[2 * hidden + k] = by_c * (0.5f * i[k] + 0.5f) * (1 - g[k] * g[k]);
      dc[k] = by_c * (0.5f * f[k] + 0.5f);
    }
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) by_bias[k] += d[k];
    if (!net.sets) return;
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) {
      by_scale[k] += d[k] * a[k];
      t[k] = d[k] * net.scale[k];
    }
    const int64_t width = n / net.sets;
    for (int64_t s = 0; s < net.sets; ++s) {
      const float root = still[s] && net.idle(at) ? 0 : r[s];  // the weights are centered, and so is a
      back(width, a + s * width, root, false, &t[s * width], a + s * width);
    }
    if (!net.apart()) return;
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) {
      u_x[k] = x[k] * r_x;
      by_input_scale[k] += d[k] * u_x[k];
      d[k] *= net.input_scale[k];
    }
    back(n, u_x.data(), r_x, false, d, d);
  }
};

// The rows are what the kernels were multiplied with, h and x: side by side, unless their products have cotangents apart.
struct Results {
  float *da, *dx, *rows, *inputs, *dh, *dc, *dscale, *dinput_scale, *dbias, *dcell_scale, *dcell_bias;
};

// Over some steps, from the cotangents of h after each and of the state after the last.
void backward(ffi::ThreadPool& pool, const Lstm& net, int64_t begin, int64_t steps, const float* transposed, const float* h0,
              const float* c0, const float* hs, const float* cs, const float* gates, const float* by_h, const float* later_h,
              const float* later_c, const Results& to) {
  const int64_t hidden = net.hidden, n = net.packed(), of_block = 3 * n + 2 * hidden;
  const int64_t padded = (hidden + kPanel - 1) / kPanel * kPanel, blocks = (net.batch + kBlock - 1) / kBlock;
  const bool apart = net.apart();  // dx differs from da
  const int64_t width = apart ? hidden : hidden + net.inputs;
  std::vector<float> sums(blocks * of_block);
  over_sequences(pool, net.batch, [&](int64_t first, int64_t rows) {
    std::vector<float> a(rows * net.padded()), x(rows * net.padded()), dh(rows * padded);
    Cotangents cotangents(net);
    float* dc = to.dc + first * hidden;
    std::copy_n(later_c + first * hidden, rows * hidden, dc);
    for (int64_t r = 0; r < rows; ++r) std::copy_n(later_h + (first + r) * hidden, hidden, &dh[r * padded]);
    for (int64_t step = begin + steps - 1; step >= begin; --step) {
      const States h = states(net, step, first, h0, hs), c = states(net, step, first, c0, cs);
      if (!gates) net.products(step, first, rows, h.of, h.stride, x.data(), a.data());
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = net.row(step, first + r), to_at = net.row(step - begin, first + r, steps);
        float *products = &a[r * net.padded()], *by = &dh[r * padded];
        for (int64_t k = 0; k < hidden; ++k) by[k] += by_h[at * hidden + k];
        float *da = to.da + to_at * n, *dx = apart ? to.dx + to_at * n : da;
        float *row = to.rows + to_at * width, *input = apart ? to.inputs + to_at * net.inputs : row + hidden;
        std::copy_n(h.of + r * h.stride, hidden, row);
        if (net.taken[at]) {
          float* sum = &sums[(first + r) / kBlock * of_block];
          const float* of_gates = gates ? gates + at * n : nullptr;
          cotangents.step(products, &x[r * net.padded()], of_gates, at, c.of + r * c.stride, by, dc + r * hidden, dx, sum);
          if (net.sets) std::copy_n(products, n, da);
          std::copy_n(net.x + at * net.inputs, net.inputs, input);
        } else {
          std::fill_n(input, net.inputs, 0.f);
          std::fill_n(da, n, 0.f);
          if (apart) std::fill_n(dx, n, 0.f);
        }
      }
      // Sequences whose step is not taken keep their dh.
      std::vector<float>& next = a;
      const float* da = to.da + net.row(step - begin, first, steps) * n;
      product(rows, n, padded / kPanel, da, net.apart_by(steps) * n, transposed, next.data(), padded);
      for (int64_t r = 0; r < rows; ++r)
        if (net.taken[net.row(step, first + r)]) std::copy_n(&next[r * padded], hidden, &dh[r * padded]);
    }
    for (int64_t r = 0; r < rows; ++r) std::copy_n(&dh[r * padded], hidden, to.dh + (first + r) * hidden);
  });
  float* sum_of[] = {to.dscale, to.dinput_scale, to.dbias, to.dcell_scale, to.dcell_bias};
  for (int64_t part = 0, start = 0; part < 5; ++part) {
    const int64_t size = part < 3 ? n : hidden;
    for (int64_t k = 0; k < size; ++k) {
      double sum = 0;
      for (int64_t b = 0; b < blocks; ++b) sum += sums[b * of_block + start + k];
      sum_of[part][k] = float(sum);
    }
    start += size;
  }
}

using Flags = ffi::Buffer<ffi::PRED>;
using Result = ffi::Result<F32>;

Lstm network(const F32& x, const F32& scale, const F32& input_scale, const F32& bias, const F32& cell_scale, const F32& cell_bias,
             const Flags& taken, const F32& input_kernel, const F32& kernel, int64_t hidden, int64_t batch, int64_t sets,
             bool joint, bool cell, bool centered, bool carried, bool time_major, double epsilon) {
  const int64_t steps = taken.element_count();
  return {steps / batch, batch, hidden, int64_t(x.element_count()) / steps, sets, joint, cell, centered, carried, time_major, float(epsilon),
          x.typed_data(), scale.typed_data(), input_scale.typed_data(), bias.typed_data(), cell_scale.typed_data(), cell_bias.typed_data(),
          taken.typed_data(), input_kernel.typed_data(), kernel.typed_data()};
}

// Absent where it is empty.
float* given(F32& buffer) { return buffer.element_count() ? buffer.typed_data() : nullptr; }

ffi::Error forward_call(ffi::ThreadPool pool, F32 x, F32 scale, F32 input_scale, F32 bias, F32 cell_scale, F32 cell_bias, Flags taken,
                        F32 input_kernel, F32 kernel, F32 h, F32 c, Result hs, Result last, Result cs, Result gates, int64_t hidden,
                        int64_t batch, int64_t sets, bool joint, bool cell, bool centered, bool carried, bool time_major, double epsilon) {
  const Lstm net = network(x, scale, input_scale, bias, cell_scale, cell_bias, taken, input_kernel, kernel, hidden, batch, sets,
                           joint, cell, centered, carried, time_major, epsilon);
  for (Result* large : {&hs, &cs, &gates}) in_large_pages(*large);
  forward(pool, net, h.typed_data(), c.typed_data(), hs->typed_data(), last->typed_data(), given(*cs), given(*gates));
  return ffi::Error::Success();
}

ffi::Error backward_call(ffi::ThreadPool pool, F32 x, F32 scale, F32 input_scale, F32 bias, F32 cell_scale, F32 cell_bias, Flags taken,
                         F32 input_kernel, F32 kernel, F32 h, F32 c, F32 transposed, F32 hs, F32 cs, F32 gates, F32 by_h, F32 later_h,
                         F32 later_c, ffi::Buffer<ffi::S32> begin, Result da, Result dx, Result rows, Result inputs, Result dh,
                         Result dc, Result dscale, Result dinput_scale, Result dbias, Result dcell_scale, Result dcell_bias,
                         int64_t hidden, int64_t batch, int64_t sets, bool joint, bool cell, bool centered, bool carried,
                         bool time_major, double epsilon) {
  const Lstm net = network(x, scale, input_scale, bias, cell_scale, cell_bias, taken, input_kernel, kernel, hidden, batch, sets,
                           joint, cell, centered, carried, time_major, epsilon);
  const Results to{da->typed_data(),    dx->typed_data(),          rows->typed_data(),   inputs->typed_data(),
                   dh->typed_data(),    dc->typed_data(),          dscale->typed_data(), dinput_scale->typed_data(),
                   dbias->typed_data(), dcell_scale->typed_data(), dcell_bias->typed_data()};
  for (Result* large : {&da, &dx, &rows}) in_large_pages(*large);
  backward(pool, net, *begin.typed_data(), da->element_count() / (batch * net.packed()), transposed.typed_data(), h.typed_data(),
           c.typed_data(), hs.typed_data(), cs.typed_data(), given(gates), by_h.typed_data(), later_h.typed_data(), later_c.typed_data(), to);
  return ffi::Error::Success();
}

template <typename Binding>
auto facts(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("hidden")
      .template Attr<int64_t>("batch")
      .template Attr<int64_t>("sets")
      .template Attr<bool>("joint")
      .template Attr<bool>("cell")
      .template Attr<bool>("centered")
      .template Attr<bool>("carried")
      .template Attr<bool>("time_major")
      .template Attr<double>("epsilon");
}

auto network_and_start() { return taking<4>(taking<6>(on_threads()).template Arg<Flags>()); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormLstmForward, forward_call, (facts(giving<4>(network_and_start()))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormLstmBackward, backward_call,
                              (facts(giving<11>(taking<7>(network_and_start()).template Arg<ffi::Buffer<ffi::S32>>()))));
