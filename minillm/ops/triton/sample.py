"""Choose tokens on the device: by argmax, or by sampling from a cumulative distribution.

    argmax        each lane keeps the largest of every BLOCK-th logit and its token id; at the end the lanes are
                  reduced, and of equal logits the lowest token id wins
    all_finite    each lane records whether any of its logits was NaN or infinite
    sample        a first pass sums T = Σ p; a second pass finds the first token whose cumulative sum is above u · T

Sums are in fp64. They are not added from left to right, so a cumulative sum may differ from the reference's by a few
10^-16 of the total. If the uniform falls into that difference, the token differs too. A token of probability 0 is never
chosen: rounding may raise the cumulative sum at such a token, so its own probability is checked as well.

Bytes moved: the logits once; the probabilities once, and again up to the chosen token. PyTorch writes and reads all
cumulative sums as fp64. One program per row. Wins: no tensor as large as the logits is made, and the device never waits
for the host. Loses: one row of a large vocabulary occupies one SM of a hundred; `sample` on GPUs whose fp64 rate is
1/32 of their fp32 rate (T4).
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.triton.machine import contiguous_last_dims, power_of_two

BLOCK = 2048
"""Tokens per iteration."""


@triton.jit
def _argmax(
    logit_ptr,  # [rows, vocab]
    token_ptr,  # [rows] int64
    valid_ptr,  # [rows] bool
    vocab: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = lane
    is_nan = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        x = tl.load(logit_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        is_nan |= (x != x).to(tl.int32)
        better = x > best
        best = tl.where(better, x, best)
        best_at = tl.where(better, token, best_at)
    peak = tl.max(best, 0)
    winner = tl.min(tl.where(best == peak, best_at, vocab - 1), 0)
    is_valid = (tl.max(is_nan, 0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    tl.store(token_ptr + row, winner.to(tl.int64))
    tl.store(valid_ptr + row, is_valid)


@triton.jit
def _sample(
    prob_ptr,  # [rows, vocab] fp32
    uniform_ptr,  # [rows] fp64
    token_ptr,  # [rows] int64
    valid_ptr,  # [rows] bool
    vocab: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    sums = tl.full((BLOCK,), 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        sums += tl.load(prob_ptr + row * stride + token, mask=token < vocab, other=0.0).to(tl.float64)
    total = tl.sum(sums, 0)
    threshold = tl.load(uniform_ptr + row) * total

    before = threshold * 0.0
    chosen, last, first = vocab, 0, 0
    while (first < vocab) & (chosen == vocab):
        token = first + lane
        p = tl.load(prob_ptr + row * stride + token, mask=token < vocab, other=0.0).to(tl.float64)
        above = (before + tl.cumsum(p, 0) > threshold) & (p > 0)
        chosen = tl.min(tl.where(above, token, vocab), 0)
        last = tl.maximum(last, tl.max(tl.where(p > 0, token, 0), 0))
        before += tl.sum(p, 0)
        first += BLOCK
    tl.store(token_ptr + row, tl.where(chosen < vocab, chosen, last).to(tl.int64))
    tl.store(valid_ptr + row, (total > 0) & (total < float("inf")))


@triton.jit
def _all_finite(
    logit_ptr,  # [rows, vocab]
    finite_ptr,  # [rows] bool
    vocab: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    is_bad = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + lane
        x = tl.load(logit_ptr + row * stride + token, mask=token < vocab, other=0.0).to(tl.float32)
        is_bad |= (x != x).to(tl.int32) | (tl.abs(x) == float("inf")).to(tl.int32)
    tl.store(finite_ptr + row, tl.max(is_bad, 0) == 0)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `minillm.ops.sample.argmax`."""
    x, (rows, vocab) = contiguous_last_dims(logits), logits.shape
    tokens, is_valid = _results(rows, x.device)
    if rows:
        _argmax[(rows,)](x, tokens, is_valid, vocab, x.stride(0), BLOCK=min(BLOCK, power_of_two(vocab)), num_warps=8)
    return tokens, is_valid


def all_finite(logits: Tensor) -> Tensor:
    """As `minillm.ops.sample.all_finite`."""
    x, (rows, vocab) = contiguous_last_dims(logits), logits.shape
    is_finite = torch.empty(rows, dtype=torch.bool, device=x.device)
    if rows:
        _all_finite[(rows,)](x, is_finite, vocab, x.stride(0), BLOCK=min(BLOCK, power_of_two(vocab)), num_warps=8)
    return is_finite


def sample(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """As `minillm.ops.sample.sample`; the token may differ if a uniform is within rounding error of a border."""
    p, (rows, vocab) = contiguous_last_dims(probs), probs.shape
    tokens, is_valid = _results(rows, p.device)
    if rows:
        u, block = contiguous_last_dims(uniforms.double()), min(BLOCK, power_of_two(vocab))
        _sample[(rows,)](p, u, tokens, is_valid, vocab, p.stride(0), BLOCK=block, num_warps=8)
    return tokens, is_valid


def _results(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, dtype=torch.bool, device=device)
