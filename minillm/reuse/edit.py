"""Editing a prompt without computing all of it again (PIE: He et al. 2024, "positional integrity encoding").

    before    prefix │ old span │ suffix           after    prefix │ new tokens │ suffix
                                                            as it is   computed     keys re-rotated by the shift

Everything behind an edit moves, so its keys are at the wrong positions. PIE rotates them by the shift and keeps their
values. Only the new tokens go through the model; the suffix costs a copy and a rotation of its keys.

Exact in the first layer. In deeper ones a suffix token's key and value depend on what it attended to, and that was the
old span. So the result is an approximation: a suffix that refers to the span (a renamed variable) still remembers the
old one. Lesson 14 measures it for milder edits: an inserted comment, a deleted line.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from minillm.errors import PromptError
from minillm.input_processor import check_token_ids
from minillm.json_files import short_repr
from minillm.llm import LLM
from minillm.ops.rerotation import rerotate
from minillm.reuse.kv_span import KVSpan, Rotation
from minillm.reuse.scratch import Scratch, check_prefix_caching


def edited_prompt(
    llm: LLM,
    token_ids: Sequence[int] | np.ndarray | torch.Tensor,
    start: int,
    stop: int,
    new_ids: Sequence[int] | np.ndarray | torch.Tensor,
    *,
    salt: str,
    rotate: Rotation = rerotate,
) -> dict[str, Any]:
    """Replace `token_ids[start:stop]` by `new_ids` and return the prompt for `llm.generate`, its keys and values ready.

    Keys and values of `token_ids` are taken from the prefix cache and computed where it has none. `salt`: the
    `cache_salt` under which the edited ones are published; choose one for each text that is edited. The last token of
    the prompt is always computed again, with the rest of its block. `rotate`: how keys are moved.
    Raises `PromptError` for a span outside the text, a token that is not in the vocabulary, an edit that leaves no
    token and a salt that is no text, `UnsupportedError` without prefix caching, and what `Scratch` raises.
    """
    token_ids, new_ids = _as_list("token_ids", token_ids), _as_list("new_ids", new_ids)
    if not (isinstance(start, Integral) and isinstance(stop, Integral)):
        raise PromptError(f"the span {start!r}:{stop!r} must be two integers")
    if not 0 <= start <= stop <= len(token_ids):
        raise PromptError(f"the span {start}:{stop} is not within the {len(token_ids)} tokens; give 0 ≤ start ≤ stop")
    if not isinstance(salt, str) or not salt:
        raise PromptError("edited keys and values are approximate and need a salt of their own; give salt='some name'")
    after = [*token_ids[:start], *new_ids, *token_ids[stop:]]
    if not after:
        raise PromptError(f"the edit deletes all {len(token_ids)} tokens; leave at least one, or give new ones")
    for ids in (token_ids, after):
        check_token_ids(ids, llm.engine.runner.model.config.vocab_size)
    room = Scratch(llm, len(after))
    check_prefix_caching(llm)
    before = _stored(llm, token_ids)
    config = llm.engine.runner.model.config
    with room as scratch:
        scratch.write(before.between(0, start))
        if new_ids:
            scratch.forward(new_ids, start)
        suffix = before.between(stop, len(token_ids))
        scratch.write(suffix.moved_to(start + len(new_ids), config, rotate))
        scratch.publish(after, salt)
    return {"prompt_token_ids": after, "cache_salt": salt}


def _as_list(name: str, ids: Sequence[int] | np.ndarray | torch.Tensor) -> list[Any]:
    """Raises `PromptError` for what is no sequence."""
    if isinstance(ids, np.ndarray | torch.Tensor) and ids.ndim == 1:
        return ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise PromptError(f"{name}={short_repr(ids)} must be a sequence of token ids")
    return list(ids)


def _stored(llm: LLM, token_ids: Sequence[int]) -> KVSpan:
    """Keys and values of a text as the model computes them."""
    with Scratch(llm, len(token_ids)) as scratch:
        known = scratch.copy_cached(token_ids)
        if known < len(token_ids):
            scratch.forward(token_ids[known:], known)
        return scratch.read(0, len(token_ids), token_ids)
