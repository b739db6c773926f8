"""Code that linen and nnx share: arguments, calls of norms, running statistics, serialization."""
