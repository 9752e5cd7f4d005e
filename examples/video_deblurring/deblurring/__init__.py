"""Video deblurring: the parts of the trainer; `main_train_vrt.py` and `main_test_vrt.py` put them together."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `shared` is, which all trainers share
