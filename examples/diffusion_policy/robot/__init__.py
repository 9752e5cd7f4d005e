"""A diffusion policy for a robot arm: demonstrations, training on any number of ranks, rollouts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `shared` is, which all trainers share
