"""Measurements: how exact, how large; each script writes JSON and a table to bench/results."""

import os

# else PyTorch's threads poll for 10 ms after each call, in the time of the peer whose turn is next
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
