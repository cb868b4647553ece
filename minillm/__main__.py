"""`python -m minillm`: the `minillm` command, also in a checkout that is not installed."""

from __future__ import annotations

import sys

from minillm.cli import main

if __name__ == "__main__":
    sys.exit(main())
