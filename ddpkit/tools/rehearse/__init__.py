"""Disturb a training script on purpose, start it again, and compare how it ends with an undisturbed run."""
