"""Launch ranks from Python."""
