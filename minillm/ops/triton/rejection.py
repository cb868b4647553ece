"""Rejection sampling of draft chains on the device, one program per request.

    draft x is accepted if u < min(1, p(x) / q(x))
    the first rejected draft is replaced by a recovered token, drawn from max(0, p - q), normalised
    if all drafts are accepted, a bonus token is drawn from the next p

The residual max(0, p - q) is never written to memory: one pass over the row sums it, a second pass finds the token, as
in `sample.py`. It is not normalised either: the uniform is multiplied by its sum instead. So a token can differ from
the reference's if a uniform is within rounding error (some 10^-7) of a border between two tokens. Acceptance is
computed with the same bits as in the reference: one fp32 division (`div_rn`), compared in fp64.

Bytes moved: per draft one number of p and one of q; per request one row of p and q, and again up to the chosen token.
PyTorch gathers those rows, writes the residual and its cumulative sums, and needs some fifty launches. Wins: one
launch between the target's forward and the next draft's. Loses: where `sample` does.
"""

# ruff: noqa: ANN001, N803, SIM108  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.rejection import Verdicts
from minillm.ops.triton.machine import contiguous_last_dims, power_of_two

BLOCK = 2048
"""Tokens per iteration."""


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
    accepted, all_accepted, is_valid = count * 0, count >= 0, count >= 0
    for j in range(count):
        x = tl.load(draft_ptr + start + j)
        in_vocab = (x >= 0) & (x < vocab)
        ratio = tl.load(p_ptr + (start + request + j) * vocab + x, mask=in_vocab, other=0.0)
        if not ONE_HOT:
            q_x = tl.load(q_ptr + (start + j) * vocab + x, mask=in_vocab, other=0.0)
            is_valid = is_valid & (q_x > 0)
            ratio = tl.div_rn(ratio, q_x)
        is_valid = is_valid & in_vocab & (ratio == ratio)
        # min(1, ratio) is not needed: a uniform is below 1.
        all_accepted = all_accepted & (tl.load(accept_ptr + start + j) < ratio.to(tl.float64))
        accepted += all_accepted.to(tl.int64)

    rejected = accepted < count
    x = tl.load(draft_ptr + start + accepted, mask=rejected, other=-1)
    row = start + request + accepted
    p_row, q_row = p_ptr + row * vocab, q_ptr + (start + accepted) * vocab
    q_vocab = tl.where(rejected, vocab, 0)  # the row of the bonus token has no q
    lane = tl.arange(0, BLOCK)
    p_sums = tl.full((BLOCK,), 0.0, tl.float64)
    residual_sums = tl.full((BLOCK,), 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        p = tl.load(p_row + token, mask=token < vocab, other=0.0)
        if ONE_HOT:
            q = (token == x).to(tl.float32)
        else:
            q = tl.load(q_row + token, mask=token < q_vocab, other=0.0)
        p_sums += p.to(tl.float64)
        residual_sums += tl.maximum(p - q, 0.0).to(tl.float64)
    residual_total = tl.sum(residual_sums, 0)
    # If p and q are equal up to rounding, there is no residual: draw from p itself, as the reference does.
    no_residual = residual_total == 0
    total = tl.where(no_residual, tl.sum(p_sums, 0), residual_total)
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
        weight = tl.where(no_residual, p, tl.maximum(p - q, 0.0)).to(tl.float64)
        above = (before + tl.cumsum(weight, 0) > threshold) & (weight > 0)
        chosen = tl.min(tl.where(above, token, vocab), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), 0))
        before += tl.sum(weight, 0)
        first += BLOCK
    tl.store(accepted_ptr + request, accepted)
    tl.store(token_ptr + request, tl.where(chosen < vocab, chosen, last).to(tl.int64))
    # Check the sum of p too: max(0, p - q) hides a NaN in p.
    p_total = tl.sum(p_sums, 0)
    can_be_drawn = (total > 0) & (total < float("inf")) & (p_total < float("inf"))
    tl.store(valid_ptr + request, is_valid & can_be_drawn)


def rejection(
    draft_token_ids: Tensor,  # [drafts] int64
    draft_start: Tensor,  # [requests + 1] int32 or int64
    draft_probs: Tensor | None,  # [drafts, vocab] fp32; None: deterministic drafts (q one-hot)
    target_probs: Tensor,  # [drafts + requests, vocab] fp32
    accept_uniforms: Tensor,  # [drafts] fp64
    next_token_uniforms: Tensor,  # [drafts + requests] fp64
) -> Verdicts:
    """As `minillm.ops.rejection.rejection`; a token may differ if a uniform is within rounding error of a border."""
    requests, vocab, device = draft_start.shape[0] - 1, target_probs.shape[1], target_probs.device
    accepted, tokens = (torch.empty(requests, dtype=torch.int64, device=device) for _ in range(2))
    is_valid = torch.empty(requests, dtype=torch.bool, device=device)
    p = target_probs.contiguous()
    q = p if draft_probs is None else draft_probs.contiguous()
    if requests:
        drafts, start = contiguous_last_dims(draft_token_ids), contiguous_last_dims(draft_start)
        accept, own = (contiguous_last_dims(u.double()) for u in (accept_uniforms, next_token_uniforms))
        _rejection[(requests,)](
            *(drafts, start, q, p, accept, own, accepted, tokens, is_valid, vocab),
            ONE_HOT=draft_probs is None,
            BLOCK=min(BLOCK, power_of_two(vocab)),
            num_warps=8,
        )
    return Verdicts(accepted, tokens, is_valid)
