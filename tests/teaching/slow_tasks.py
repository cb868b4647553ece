"""What worker processes do in tests, in a module that imports nothing of minillm, so that they start at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

TAKEN = "MINILLM_TEST_TAKEN"
"""The variable that names the file in which every task leaves a mark."""


def prepare(*_: object) -> None:
    """In place of the preparation of a worker."""


def take(*_: object) -> None:
    """In place of a task: leave a mark, and take some time."""
    with Path(os.environ[TAKEN]).open("a") as file:
        file.write("x")
    time.sleep(0.1)
