"""Conclude from the records of all ranks: pure functions, one module for each subject."""
