"""Keeps pytest from importing the scripts beside it: they train as soon as they are imported."""

collect_ignore = ["wrong", "mended", "correct"]
