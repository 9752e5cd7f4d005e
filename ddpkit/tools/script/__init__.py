"""Somebody's training script, run on ranks of this machine: for `check` and `rehearse`."""
