"""Measure how fast a job communicates and trains."""
