"""Detect at once that a rank has died or failed."""
