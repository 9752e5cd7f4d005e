"""Continue after the loss of a rank."""
