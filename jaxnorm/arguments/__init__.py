"""What callers pass: axes, masks, dtypes and options, and the errors that they get."""
