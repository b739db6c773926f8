// Arrays (N, P, G, D) whose normalization groups (n, g) are reduced over P and D:
//
//   layer norm (rows, 1, 1, C)       batch norm     (1, N H W, C, 1)
//   group norm (N, H W, g, C / g)    instance norm  (N, H W, C, 1)
//
// Scale and bias are (S, G, D), with S a divisor of N: neighbouring examples n share one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "ffi.h"

struct Shape {
  int64_t p, g, d;       // passed as attributes
  int64_t n = 0, s = 1;  // as many as the arrays have

  Shape of_arrays(int64_t x_size, int64_t scale_size) const {
    return {p, g, d, x_size / (p * g * d), scale_size / (g * d)};
  }

  int64_t channels() const { return g * d; }
  int64_t groups() const { return n * g; }
  int64_t group_size() const { return p * d; }

  // Scale or bias of an example, or of a group.
  const float* of_example(const float* params, int64_t i) const { return params + i / (n / s) * channels(); }
  const float* of_group(const float* params, int64_t i) const { return of_example(params, i / g) + i % g * d; }

  // Gives each channel of an example the value of its group, value(g).
  template <typename T, typename Value>
  void spread(T* to, Value value) const {
    if (d == 1)
      for (int64_t i = 0; i < g; ++i) to[i] = value(i);
    else
      for (int64_t i = 0; i < g; ++i, to += d) std::fill(to, to + d, value(i));
  }

  // Gives each group of an example the sum over its channels.
  void gather(const double* of_channels, double* to) const {
    if (d == 1) std::copy(of_channels, of_channels + g, to);
    else
      for (int64_t i = 0; i < g; ++i, of_channels += d) to[i] = std::accumulate(of_channels, of_channels + d, 0.0);
  }
};
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Shape, ffi::StructMember<int64_t>("p"), ffi::StructMember<int64_t>("g"),
                                      ffi::StructMember<int64_t>("d"));

// A boolean mask (M, P) of positions, with M a divisor of N: neighbouring examples share one. Without one every
// position counts.
struct Mask {
  const bool* values;   // null where there is none
  int64_t p, per_mask;  // positions; examples that share a mask

  Mask(const Array<const bool>& where, const Shape& shape)
      : values(where.or_null()), p(shape.p), per_mask(values ? shape.n * p / where.size : shape.n) {}
  const bool* of_example(int64_t n) const { return values + n / per_mask * p; }
  // Of an example that is one position.
  bool hides(int64_t n) const { return values && !*of_example(n); }
};
