"""The engine of code completion: the model of the lessons, with speculation and a prefix cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from minillm.config import EngineArgs
from minillm.models import bundled

MODEL, DRAFT = "MINILLM_MODEL", "MINILLM_DRAFT"
"""The variables that name the models of the lessons, and these."""
NUM_BLOCKS = 512
"""8,192 tokens: several notebooks stay in the prefix cache. For the bundled pair it is about 72 MB."""


def engine_args(environ: Mapping[str, str] = os.environ) -> EngineArgs:
    """The bundled pair, or the models that the variables name. Bundled ones get 8-bit weights; others stay as they are.

    Without a draft model, suffix decoding drafts from the text so far.
    """
    model = environ.get(MODEL) or "minicoder"
    is_bundled = model in bundled.names()
    draft = environ.get(DRAFT) or ("minicoder-draft" if is_bundled else None)
    speculative: dict[str, Any] = {"method": "suffix"}
    if draft is not None:
        speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    if draft in bundled.names():
        speculative["quantization"] = "w8a8"  # the draft's weights; the output does not change
    return EngineArgs(
        model,
        quantization="int8" if is_bundled else None,
        num_kv_blocks=NUM_BLOCKS,
        max_num_seqs=4,
        speculative_config=speculative,
    )
