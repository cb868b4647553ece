"""Rejection sampling of draft chains on the device: accept, recover or add the bonus token, one program per request.

    draft x stays if u < min(1, p(x) / q(x));   the first that does not is replaced from max(0, p - q), normalised;
    if all stay, one more is drawn from the next p

The residual is never written: its sum is taken in one walk over the row, the token found in a second one, as in
`sample.py`. It is not normalised either, for the uniform is multiplied by the sum instead. So a token can differ from
the reference's where a uniform falls within rounding (some 10^-7) of a border between two tokens. Whether a draft stays
is decided with the same bits as there: one fp32 division (`div_rn`), compared in fp64.

Bytes moved: of each draft one number of p and of q; of one row of p and q per request all, and up to the chosen token
again. PyTorch gathers those rows, writes the residual and its cumulative sums, and needs some fifty launches. Wins: one
launch between the target's forward and the next draft's. Loses: as `sample` does.
"""

# ruff: noqa: ANN001, N803, SIM108  (the compiler looks annotations up, so pointers have none; constants are capitals)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.rejection import Verdicts
from minillm.ops.triton.machine import power_of_two

BLOCK = 2048
"""Tokens at a time."""


@triton.jit
def _rejection(
    draft_ptr,  # [drafts] int64
    start_ptr,  # [requests + 1] int32 or int64
    q_ptr,  # [drafts, vocab] fp32, unless ONE_HOT
    p_ptr,  # [drafts + requests, vocab] fp32
    accept_ptr,  # [drafts] fp64
    own_ptr,  # [drafts + requests] fp64
    accepted_ptr,  # [requests] int64
    token_ptr,  # [requests] int64
    valid_ptr,  # [requests] bool
    vocab: int,
    ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(start_ptr + request).to(tl.int64)
    count = tl.load(start_ptr + request + 1).to(tl.int64) - start
    accepted, alive, is_valid = count * 0, count >= 0, count >= 0
    for j in range(count):
        x = tl.load(draft_ptr + start + j)
        known = (x >= 0) & (x < vocab)
        chance = tl.load(p_ptr + (start + request + j) * vocab + x, mask=known, other=0.0)
        if not ONE_HOT:
            q_x = tl.load(q_ptr + (start + j) * vocab + x, mask=known, other=0.0)
            is_valid = is_valid & (q_x > 0)
            chance = tl.div_rn(chance, q_x)
        is_valid = is_valid & known & (chance == chance)
        # No cap at 1: a uniform is below it.
        alive = alive & (tl.load(accept_ptr + start + j) < chance.to(tl.float64))
        accepted += alive.to(tl.int64)

    rejected = accepted < count
    x = tl.load(draft_ptr + start + accepted, mask=rejected, other=-1)
    row = start + request + accepted
    p_row, q_row = p_ptr + row * vocab, q_ptr + (start + accepted) * vocab
    q_vocab = tl.where(rejected, vocab, 0)  # the bonus has no q
    lane = tl.arange(0, BLOCK)
    p_sums = tl.full((BLOCK,), 0.0, tl.float64)
    left_sums = tl.full((BLOCK,), 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        p = tl.load(p_row + token, mask=token < vocab, other=0.0)
        if ONE_HOT:
            q = (token == x).to(tl.float32)
        else:
            q = tl.load(q_row + token, mask=token < q_vocab, other=0.0)
        p_sums += p.to(tl.float64)
        left_sums += tl.maximum(p - q, 0.0).to(tl.float64)
    left_total = tl.sum(left_sums, 0)
    # Equal up to rounding: then p itself, as the reference explains.
    whole = left_total == 0
    total = tl.where(whole, tl.sum(p_sums, 0), left_total)
    threshold = tl.load(own_ptr + row) * total

    before = threshold * 0.0
    chosen, last, first = vocab, 0, 0
    while (first < vocab) & (chosen == vocab):
        token = first + lane
        p = tl.load(p_row + token, mask=token < vocab, other=0.0)
        if ONE_HOT:
            q = (token == x).to(tl.float32)
        else:
            q = tl.load(q_row + token, mask=token < q_vocab, other=0.0)
        weight = tl.where(whole, p, tl.maximum(p - q, 0.0)).to(tl.float64)
        above = (before + tl.cumsum(weight, 0) > threshold) & (weight > 0)
        chosen = tl.min(tl.where(above, token, vocab), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), 0))
        before += tl.sum(weight, 0)
        first += BLOCK
    tl.store(accepted_ptr + request, accepted)
    tl.store(token_ptr + request, tl.where(chosen < vocab, chosen, last).to(tl.int64))
    # The sum of p too: a maximum with 0 would hide its NaN.
    p_total = tl.sum(p_sums, 0)
    can_be_drawn = (total > 0) & (total < float("inf")) & (p_total < float("inf"))
    tl.store(valid_ptr + request, is_valid & can_be_drawn)


def rejection(
    draft_token_ids: Tensor,  # [drafts] int64
    draft_start: Tensor,  # [requests + 1] int32 or int64
    draft_probs: Tensor | None,  # [drafts, vocab] fp32; None: deterministic drafts (q one-hot)
    target_probs: Tensor,  # [drafts + requests, vocab] fp32
    accept_uniforms: Tensor,  # [drafts] fp64
    own_uniforms: Tensor,  # [drafts + requests] fp64
) -> Verdicts:
    """As `minillm.ops.rejection.rejection`, but for draws within rounding of a border between two tokens."""
    requests, vocab, device = draft_start.shape[0] - 1, target_probs.shape[1], target_probs.device
    accepted, tokens = (torch.empty(requests, dtype=torch.int64, device=device) for _ in range(2))
    is_valid = torch.empty(requests, dtype=torch.bool, device=device)
    p = target_probs.contiguous()
    q = p if draft_probs is None else draft_probs.contiguous()
    if requests:
        _rejection[(requests,)](
            *(draft_token_ids, draft_start, q, p, accept_uniforms.double(), own_uniforms.double()),
            *(accepted, tokens, is_valid, vocab),
            ONE_HOT=draft_probs is None,
            BLOCK=min(BLOCK, power_of_two(vocab)),
            num_warps=8,
        )
    return Verdicts(accepted, tokens, is_valid)
