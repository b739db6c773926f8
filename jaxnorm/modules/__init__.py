"""What the Flax modules of both families share."""
