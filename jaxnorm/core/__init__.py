"""The core: what every norm is made of, above the engine and the kernels."""
