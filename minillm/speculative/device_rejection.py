"""The inputs of rejection sampling on a GPU (`minillm.ops.rejection`), which decides what `rejection_sample` does.

The drafts of all requests are concatenated. The uniforms of every token that could be judged or sampled are computed in
advance, although only some are used: they depend only on seeds, and the host is idle while the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.sampling import Draw, uniforms


def rejection_inputs(
    draft_token_ids: Sequence[Sequence[int]],  # per request, k_i drafts (k_i may be 0)
    seeds: Sequence[int],  # per request
    first_index: Sequence[int],  # per request: token index of its first draft
) -> dict[str, np.ndarray]:
    """The inputs of `ops.rejection` other than probabilities, for D drafts of R requests: `drafts` `[D]`, `start`
    `[R + 1]`, and the uniforms that `rejection_sample` would use: `accept` `[D]` judges each draft, `own` `[D + R]`
    samples the token of the target that follows each number of accepted drafts."""
    num_drafts = [len(drafts) for drafts in draft_token_ids]
    judged = [(r, j) for r, k in enumerate(num_drafts) for j in range(k)]
    rows = [(r, j) for r, k in enumerate(num_drafts) for j in range(k + 1)]
    keys = [(seeds[r], first_index[r] + j, Draw.ACCEPT) for r, j in judged]
    keys += [(seeds[r], first_index[r] + j, Draw.RECOVER if j < num_drafts[r] else Draw.SAMPLE) for r, j in rows]
    drawn = uniforms(*zip(*keys, strict=True)) if keys else np.empty(0)
    return {
        "drafts": np.array([x for drafts in draft_token_ids for x in drafts], np.int64),
        "start": np.concatenate([[0], np.cumsum(num_drafts)]).astype(np.int64),
        "accept": drawn[: len(judged)],
        "own": drawn[len(judged) :],
    }


def flat_draft_probs(
    draft_token_ids: Sequence[Sequence[int]],  # per request
    draft_probs: Sequence[Tensor | None],  # per request [k_i, vocab], or None: deterministic drafts
    drafts: Tensor,  # [D] int64, all of them, on the device
    like: Tensor,  # [..., vocab]: dtype and device of the result
) -> Tensor | None:  # [D, vocab]
    """q of all drafts; None if all are deterministic. If only some are, their q is expanded to one-hot rows."""
    given = [None if not ids else q for ids, q in zip(draft_token_ids, draft_probs, strict=True)]
    if all(q is None for q in given):
        return None
    counts = [len(ids) for ids in draft_token_ids]
    if any(ids and q is None for ids, q in zip(draft_token_ids, given, strict=True)):
        one_hot = like.new_zeros(len(drafts), like.shape[-1]).scatter_(1, drafts[:, None], 1.0)
        parts = zip(given, one_hot.split(counts), strict=True)
        given = [part if q is None else q for q, part in parts]
    rows = [_like(q, like) for q in given if q is not None]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _like(q: Tensor, like: Tensor) -> Tensor:
    """Convert q: a user's drafter may use another device or dtype."""
    return q if q.device == like.device and q.dtype == like.dtype else q.to(like.device, like.dtype)
