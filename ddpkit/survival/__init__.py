"""Going on after the loss of a rank."""
