"""Train one model on several ranks."""
