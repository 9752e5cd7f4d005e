"""The job that this process is in: setting it up, its device, leaving it."""
