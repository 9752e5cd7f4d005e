"""Deal samples to ranks."""
