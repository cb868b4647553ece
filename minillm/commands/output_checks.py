"""Check that a command can write its output before it starts the work."""

from __future__ import annotations

import os
from pathlib import Path

from minillm import whole_file
from minillm.errors import ConfigError


def check_new_file(option: str, file: Path) -> None:
    """Raise `ConfigError` if a file cannot be created or overwritten at this path."""
    try:
        if file.is_dir():
            raise ConfigError(f"{option} {file} is a folder; name a file")
        if not file.parent.is_dir():
            raise ConfigError(f"{option} {file}: there is no folder {file.parent}; create it first")
        if not file.exists():
            check_writable(option, file.parent)
        elif not os.access(file, os.W_OK):
            raise ConfigError(f"{option} {file} may not be overwritten; name another file")
    except (OSError, ValueError) as problem:
        if isinstance(problem, ConfigError):
            raise
        reason = getattr(problem, "strerror", None) or problem
        place = file.parent if len(file.name) > 255 else file
        raise ConfigError(f"{option}: nothing can be written at {place} ({reason}); name another file") from None


def check_writable(option: str, folder: Path) -> None:
    """Raise `ConfigError` if no file can be created in the folder."""
    try:
        whole_file.check_writable(folder)
    except OSError as problem:
        reason = problem.strerror or problem
        raise ConfigError(f"{option}: nothing can be written to {folder} ({reason}); name another place") from None
