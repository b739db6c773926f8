// XLA's foreign function interface: the buffers of a call, read in order, and their element types.
#pragma once

#include <cstdint>

#include "dtypes.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

template <typename T>
struct Array {
  T* data = nullptr;
  int64_t size = 0;

  T* or_null() const { return size ? data : nullptr; }
};

// An array whose dtype is known when it is called.
struct AnyArray {
  void* data = nullptr;
  int64_t size = 0;
  ffi::DataType dtype = ffi::DataType::INVALID;
};

// Reads the arguments and the results of a call, each in order.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs arguments, ffi::RemainingRets results) : arguments_(arguments), results_(results) {}

  template <ffi::DataType dtype = ffi::F32>
  Array<const ffi::NativeType<dtype>> argument() {
    const auto buffer = arguments_.get<ffi::Buffer<dtype>>(next_argument_++);
    if (!found(buffer)) return {};
    return {buffer->typed_data(), int64_t(buffer->element_count())};
  }

  AnyArray any_argument() {
    const auto buffer = arguments_.get<ffi::AnyBuffer>(next_argument_++);
    if (!found(buffer)) return {};
    return {buffer->untyped_data(), int64_t(buffer->element_count()), buffer->element_type()};
  }

  Array<float> result() {
    auto buffer = results_.get<ffi::Buffer<ffi::F32>>(next_result_++);
    if (!found(buffer)) return {};
    return {(*buffer)->typed_data(), int64_t((*buffer)->element_count())};
  }

  AnyArray any_result() {
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
    if (!found(buffer)) return {};
    return {(*buffer)->untyped_data(), int64_t((*buffer)->element_count()), (*buffer)->element_type()};
  }

  // A failure where a buffer is missing or has another dtype; what was read is then empty.
  const ffi::Error& error() const { return error_; }

 private:
  template <typename Buffer>
  bool found(const Buffer& buffer) {
    if (!buffer.has_value()) error_ = buffer.error();
    return buffer.has_value();
  }

  ffi::RemainingArgs arguments_;
  ffi::RemainingRets results_;
  size_t next_argument_ = 0, next_result_ = 0;
  ffi::Error error_;
};

inline auto bind_buffers() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets(); }

// Calls f with the elements of an array, as float or BFloat16.
template <typename F>
ffi::Error with_elements(const AnyArray& a, F f) {
  if (a.dtype != ffi::F32 && a.dtype != ffi::BF16) return ffi::Error::InvalidArgument("float32 and bfloat16 only");
  a.dtype == ffi::F32 ? f(static_cast<float*>(a.data)) : f(static_cast<BFloat16*>(a.data));
  return ffi::Error::Success();
}

// The same with those of two arrays.
template <typename F>
ffi::Error with_elements(const AnyArray& a, const AnyArray& b, F f) {
  ffi::Error error;
  ffi::Error outer =
      with_elements(a, [&](auto* of_a) { error = with_elements(b, [&](auto* of_b) { f(of_a, of_b); }); });
  return outer.failure() ? outer : error;
}
