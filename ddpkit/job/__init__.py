"""The job of this process: joining it, its device, leaving it."""
