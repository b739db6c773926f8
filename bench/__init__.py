"""Measurements: how exact, how large; each script writes JSON and a table to bench/results."""
