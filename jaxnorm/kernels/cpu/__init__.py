"""Kernels for CPUs: in C++, called through jax.ffi."""
