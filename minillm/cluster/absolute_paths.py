"""Folders of models as absolute paths: a worker of the cluster runs in another folder than this program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm.models import bundled


def absolute_model(model: Any) -> Any:
    """A local folder as an absolute path. A bundled name, a hub id and what does not exist here stay as they are, and
    so does what is no name: it is refused where it is used."""
    if not isinstance(model, str | os.PathLike) or model in bundled.names():
        return model
    try:
        folder = Path(model).expanduser()
        return str(folder.absolute()) if folder.exists() else model
    except (RuntimeError, ValueError, OSError):  # unknown home directory, a null byte, a name too long
        return model


def with_absolute_models(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an `LLM`, the draft models of `speculative_config` and of its fallback by `absolute_model`."""
    given = engine.get("speculative_config")
    return dict(engine) if given is None else {**engine, "speculative_config": _absolute_drafts(given)}


def _absolute_drafts(config: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    if "model" in found:
        found["model"] = absolute_model(found["model"])
    if isinstance(found.get("fallback"), Mapping):
        found["fallback"] = _absolute_drafts(found["fallback"])
    return found
