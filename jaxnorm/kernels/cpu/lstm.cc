// The loop over time of the LSTM of lstm_step.h, and its transpose. A thread takes some sequences through all steps,
// with the kernels in its cache.

#include "lstm_backward.h"
#include "pages.h"

namespace {

// h and c after every step; c and the gates only where a transpose needs them.
struct ForwardResults {
  float *h, *last_c, *c, *gates;
};

void forward_sequences(const Lstm& net, const ForwardResults& to, int64_t first, int64_t rows) {
  const int64_t hidden = net.hidden, n = net.packed();
  std::vector<float> terms(rows * net.padded()), input_terms(rows * net.padded()), gates(n), unit(hidden),
      normalized(hidden);
  float* c = to.last_c + first * hidden;
  std::copy_n(net.c0 + first * hidden, rows * hidden, c);
  for (int64_t step = 0; step < net.time; ++step) {
    const States h(net, step, first, net.h0, to.h);
    net.products(step, first, rows, h.values, h.stride, input_terms.data(), terms.data());
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = net.row(step, first + r);
      float *own_c = c + r * hidden, *next_h = to.h + row * hidden,
            *of_gates = to.gates ? to.gates + row * n : gates.data();
      if (net.mask[row]) {
        net.gates(&terms[r * net.padded()], &input_terms[r * net.padded()], of_gates);
        net.cell(of_gates, own_c, own_c, unit.data(), normalized.data());
        const float* o = Gates(of_gates, hidden).o;
#pragma omp simd
        for (int64_t k = 0; k < hidden; ++k) next_h[k] = sigmoid_of(o[k]) * tanh_of(normalized[k]);
        if (net.carries) std::copy_n(normalized.data(), hidden, own_c);
      } else {
        std::copy_n(h.of(r), hidden, next_h);
        if (to.gates) std::fill_n(of_gates, n, 0.f);
      }
      if (to.c) std::copy_n(own_c, hidden, to.c + row * hidden);
    }
  }
}

ffi::Error forward(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                   LstmOptions options) {
  Buffers buffers(arguments, results);
  const Lstm net = Lstm::read(buffers, options);
  const Array<float> h = buffers.result(), last_c = buffers.result(), c = buffers.result(), gates = buffers.result();
  if (buffers.error().failure()) return buffers.error();
  for (const Array<float>& large : {h, c, gates}) prefer_large_pages(large.data, large.size);
  const ForwardResults to{h.data, last_c.data, c.or_null(), gates.or_null()};
  over_sequences(pool, net.batch, [&](int64_t first, int64_t rows) { forward_sequences(net, to, first, rows); });
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                    LstmOptions options) {
  Buffers buffers(arguments, results);
  const Lstm net = Lstm::read(buffers, options);
  LstmBackward call{};
  for (const float** argument :
       {&call.transposed_kernel, &call.h, &call.c, &call.gates, &call.dh, &call.dh_after, &call.dc_after})
    *argument = buffers.argument().or_null();
  const Array<const int32_t> begin = buffers.argument<ffi::S32>();
  const Array<float> drecurrent_term = buffers.result(), dinput_term = buffers.result(), rows = buffers.result();
  call.drecurrent_term = drecurrent_term.data;
  call.dinput_term = dinput_term.data;
  call.rows = rows.data;
  for (float** result :
       {&call.input_rows, &call.dh_before, &call.dc_before, &call.vectors.scale, &call.vectors.input_scale,
        &call.vectors.bias, &call.vectors.cell_scale, &call.vectors.cell_bias})
    *result = buffers.result().data;
  if (buffers.error().failure()) return buffers.error();
  call.begin = *begin.data;
  call.steps = drecurrent_term.size / (net.batch * net.packed());
  for (const Array<float>& large : {drecurrent_term, dinput_term, rows}) prefer_large_pages(large.data, large.size);
  BlockGradients blocks((net.batch + kBlock - 1) / kBlock, net.packed(), net.hidden);
  over_sequences(pool, net.batch,
                 [&](int64_t first, int64_t rows) { SequencesGradient(net, call, first, rows)(blocks); });
  blocks.add_up(call.vectors);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormLstmForward, forward, bind_buffers().Attrs<LstmOptions>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxnormLstmBackward, backward, bind_buffers().Attrs<LstmOptions>());
