"""Each Python that tests start ends without looking through all of torch for garbage: a third of a short life."""

import atexit
import gc

atexit.register(gc.freeze)
