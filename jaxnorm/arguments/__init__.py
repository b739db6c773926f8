"""Arguments of callers: axes, masks, dtypes and options, and the errors about them."""
