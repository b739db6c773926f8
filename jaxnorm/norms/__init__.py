"""The named norms: choices of axes, and of what becomes of the statistics."""
