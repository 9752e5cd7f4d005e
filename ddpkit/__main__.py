"""Run the command line with `python -m ddpkit`."""

import sys

from .tools.cli import main

if __name__ == "__main__":  # the ranks that `spawn` starts import this module, too
    sys.exit(main())
