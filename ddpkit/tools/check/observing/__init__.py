"""Observe a checked script from inside: each module records the facts of one subject."""
