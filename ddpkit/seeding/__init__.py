"""Seed random number generators, and save their states."""
