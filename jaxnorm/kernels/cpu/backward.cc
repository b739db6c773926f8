// The transpose of the tangent of forward.cc: the gradients of x, scale and bias, as in backward.h.

#include "backward.h"

#include "backward_channels.h"
#include "backward_rows.h"
#include "pages.h"

namespace {

ffi::Error backward(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results, Shape sizes,
                    Rule rule, StatsOptions options, bool recompute) {
  Buffers buffers(arguments, results);
  const AnyArray x = buffers.any_argument(), dy = buffers.any_argument(), dx = buffers.any_result();
  const Array<const float> scale = buffers.argument();
  const Shape shape = sizes.of_arrays(x.size, scale.size);
  auto next = [&] { return PerGroup<float>(buffers.argument(), shape.groups()); };
  const PerGroup<float> shift = next(), low_mean = next(), var = next(), dlow_mean = next(), dvar = next();
  const PerGroup<int8_t> exponent(buffers.argument<ffi::S8>(), shape.groups());
  const Mask mask(buffers.argument<ffi::PRED>(), shape);
  float *dscale = buffers.result().data, *dbias = buffers.result().data;
  if (buffers.error().failure()) return buffers.error();
  const Backward call{shape,    mask, rule,      options, recompute, scale.data, shift,
                      low_mean, var,  dlow_mean, dvar,    exponent,  dscale,     dbias};
  return with_elements(x, dy, [&](auto* x_elements, auto* dy_elements) {
    auto* to = static_cast<decltype(x_elements)>(dx.data);
    prefer_large_pages(to, dx.size);
    shape.p == 1 ? backward_rows(pool, call, x_elements, dy_elements, to)
                 : backward_channels(pool, call, x_elements, dy_elements, to);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxnormBackward, backward,
    bind_buffers().Attr<Shape>("shape").Attr<Rule>("rule").Attr<StatsOptions>("stats").Attr<bool>("recompute"));
