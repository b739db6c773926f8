"""Compare norms on real data, and show which of them helps where and why."""
