"""Start a job's process group, notice when a rank fails, and end it."""
