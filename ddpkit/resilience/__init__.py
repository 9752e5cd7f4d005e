"""Keep a run going: stop it in good order where it must stop."""
