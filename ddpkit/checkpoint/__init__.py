"""Save and resume a run."""
