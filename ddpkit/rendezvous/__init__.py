"""Joining the other ranks: the store, the members, waits, failures. Loaded where there are several ranks."""
