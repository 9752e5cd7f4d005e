"""The tools of the command line, `python -m ddpkit`."""
