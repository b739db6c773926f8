"""The engine under the public functions: formulas, loops and primitives."""
