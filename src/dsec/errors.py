"""Every error that a caller can act on; `core/errors.py` has the tree."""

from dsec.core.errors import *  # noqa: F403
from dsec.core.errors import Outcome as Outcome
