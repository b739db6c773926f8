"""Check the arguments of callers: axes, masks, dtypes and options."""
