"""Save a run, and go on with it."""
