"""`python -m tests.faults`, from the top of the repository."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does
    from faults.table import main

    main()
