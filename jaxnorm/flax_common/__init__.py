"""What linen and nnx share."""
