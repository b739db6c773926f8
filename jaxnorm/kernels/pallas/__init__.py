"""Kernels in Pallas: programs for TPUs that read an array once where XLA reads it again."""
