"""What needs Ray is collected where Ray is installed: `make test-ray` makes such an environment."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("ray") else ["on_ray"]
