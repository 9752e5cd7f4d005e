"""A package as a user of the video example may have one, with a network of theirs."""
