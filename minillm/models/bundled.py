"""The checkpoints that come with minillm, found on disk."""

from __future__ import annotations

from pathlib import Path

from minillm.errors import CheckpointError

WEIGHTS = Path(__file__).parent / "weights"


def names() -> list[str]:
    """Names of the bundled models, sorted."""
    return sorted(config.parent.name for config in WEIGHTS.glob("*/config.json"))


def path(name: str) -> Path:
    """The folder of a bundled model, for transformers and anyone else. Raises `CheckpointError` if there is none."""
    if name not in names():
        raise CheckpointError(f"no bundled model is called {name!r}; there are: {', '.join(names()) or 'none'}")
    return WEIGHTS / name
