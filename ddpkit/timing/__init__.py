"""How long the parts of a training step take, and which rank makes the others wait."""
