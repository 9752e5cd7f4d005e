"""Find the silent bugs of a distributed training script."""
