"""Write a file in one step."""

from __future__ import annotations

from pathlib import Path


def write_file(path: Path, text: str | bytes) -> None:
    """Write the file beside its place, then rename it, so that an interrupted run leaves no half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(text.encode() if isinstance(text, str) else text)
    part.replace(path)
