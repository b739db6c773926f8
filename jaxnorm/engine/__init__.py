"""What the public functions run on."""
