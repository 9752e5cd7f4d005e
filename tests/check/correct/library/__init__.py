"""What sibling_module.py imports."""
