"""Results, sums and gradients that do not depend on the number of ranks."""
