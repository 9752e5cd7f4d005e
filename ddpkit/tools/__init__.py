"""The command line: `python -m ddpkit`."""
