"""A model with a chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def with_template(model: Path, to: Path, template: str) -> Path:
    """Copy the folder `model` to `to`, with this template in its tokenizer's configuration."""
    shutil.copytree(model, to)
    file = to / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return to
