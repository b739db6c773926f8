"""Experiments on real data that show which normalization helps where."""
