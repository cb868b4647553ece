"""The model checkpoints bundled with minillm."""

from __future__ import annotations

from pathlib import Path

from minillm.errors import CheckpointError

WEIGHTS = Path(__file__).parent / "weights"


def names() -> list[str]:
    """Return the names of the bundled models, sorted. Trained drafters, which have no tokenizer, are not among them."""
    return sorted(file.parent.name for file in WEIGHTS.glob("*/tokenizer.json"))


def path(name: str) -> Path:
    """Return the folder of a bundled model, a Hugging Face checkpoint. Raises `CheckpointError` for an unknown name."""
    if name not in names():
        raise CheckpointError(f"no bundled model is called {name!r}; there are: {', '.join(names()) or 'none'}")
    return WEIGHTS / name
