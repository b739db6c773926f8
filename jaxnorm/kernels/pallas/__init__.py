"""Kernels in Pallas: for TPUs and GPUs, they read an array once where XLA reads it again."""
