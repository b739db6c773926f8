// XLA's foreign function interface, in the words of these kernels.
#pragma once

#include <cstdint>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Any = ffi::AnyBuffer;
using F32 = ffi::Buffer<ffi::F32>;

// Calls f with the two buffers as pointers of their types.
template <typename F>
ffi::Error typed(ffi::DataType x, ffi::DataType y, F f) {
  const bool half_x = x == ffi::BF16, half_y = y == ffi::BF16;
  if ((!half_x && x != ffi::F32) || (!half_y && y != ffi::F32)) return ffi::Error::InvalidArgument("float32 and bfloat16 only");
  if (half_x && half_y) f((uint16_t*)nullptr, (uint16_t*)nullptr);
  if (half_x && !half_y) f((uint16_t*)nullptr, (float*)nullptr);
  if (!half_x && half_y) f((float*)nullptr, (uint16_t*)nullptr);
  if (!half_x && !half_y) f((float*)nullptr, (float*)nullptr);
  return ffi::Error::Success();
}

inline auto on_threads() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

// So many more buffers of float32 taken, or given.
template <int count, typename B>
auto taking(B binding) {
  if constexpr (count == 1) return std::move(binding).template Arg<F32>();
  else return taking<count - 1>(std::move(binding).template Arg<F32>());
}
template <int count, typename B>
auto giving(B binding) {
  if constexpr (count == 1) return std::move(binding).template Ret<F32>();
  else return giving<count - 1>(std::move(binding).template Ret<F32>());
}
