"""How the next token is chosen: the one function that makes probabilities, and the draw.

What is sampled and what is divided in the acceptance ratio of speculative decoding both come from
`probs_from_logits`. Randomness is a pure function of (seed, token index, purpose), so a request draws the same tokens
whatever else is in the batch, however its prompt was chunked and however often it was preempted.

This is the way of a CPU, and the meaning of every other: it looks at numbers when it needs them. `device_sampling` does
the same where looking means waiting. The parameters, `SamplingParams`, are in `sampling_params`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.errors import MinillmError, NonFiniteLogitsError
from minillm.sampling_params import SamplingParams as SamplingParams
from minillm.sampling_params import check_params as check_params

TAILS = (2**-9, 2**-12, 2**-15)
"""Probabilities that may be too small for top-p to reach; the first that is sure to be is taken."""


class Draw(IntEnum):
    """What a uniform is for. Each purpose has its own stream, so no uniform is used twice."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def uniform(seed: int, index: int, purpose: Draw) -> float:
    """A number in [0, 1), the same for the same arguments: splitmix64 over (seed, token index, purpose).

    It is a multiple of 2^-24, so it survives a trip through fp32 and never rounds up to 1.
    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    x = _mix(seed & _MASK)
    x = _mix(x ^ (index & _MASK))
    return (_mix(x ^ int(purpose)) >> 40) * 2.0**-24


def uniforms(seeds: Sequence[int], indices: Sequence[int], purposes: Sequence[Draw]) -> np.ndarray:
    """`uniform` of many arguments at once, the same numbers: `[len(seeds)]` fp64. Microseconds, however many."""
    words = np.array([[x & _MASK for x in column] for column in (seeds, indices, purposes)], np.uint64)
    x = _mix(_mix(_mix(words[0]) ^ words[1]) ^ words[2])
    return (x >> np.uint64(40)) * 2.0**-24


_MASK = (1 << 64) - 1


def _mix(x: Any) -> Any:
    """One round of splitmix64 on an integer, or on every one of an array of uint64, where it wraps around by itself."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class SamplingRow:
    """What `probs_from_logits` must know of the request behind one row of logits."""

    params: SamplingParams
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    """All tokens after the prompt and before the one to be chosen, drafts included."""
    forbidden_token_ids: Sequence[int] = ()
    """Tokens that may not come now (end of text before `min_tokens`)."""


def probs_from_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The distribution each row is sampled from: `[num_rows, vocab]` logits → fp32 probabilities.

    Order, as in vLLM: forbidden tokens, repetition / presence / frequency penalties, temperature, min-p, top-k, top-p.
    Temperature 0 gives a one-hot row at the (first) maximum, so greedy needs no other code path.

    Ties: tokens exactly as likely as the k-th all stay, so top-k may keep more than k; where top-p cuts through equal
    tokens the lower ids stay, and the likeliest token always does. A row's result, to the last bit, does not depend on
    the rows beside it. `logits` is left as it was.

    Raises `NonFiniteLogitsError` if a row holds NaN or +inf, or has no token left that may be chosen.
    """
    logits, peak = _peaks(logits, rows)
    params = [row.params for row in rows]
    greedy = [i for i, p in enumerate(params) if p.is_greedy]
    if len(greedy) == len(rows):
        probs = torch.zeros_like(logits)
        probs[greedy, likeliest(logits)] = 1.0
        return probs

    probs = _softmax(logits, peak, [1.0 if p.is_greedy else p.temperature for p in params])
    drawn = [(i, p) for i, p in enumerate(params) if not p.is_greedy]
    _narrow(probs, {i: p.min_p for i, p in drawn if p.min_p > 0}, _reach_min_p)
    _narrow(probs, {i: p.top_k for i, p in drawn if 0 < p.top_k < logits.shape[1]}, _are_top_k)
    _narrow(probs, {i: p.top_p for i, p in drawn if p.top_p < 1}, _make_top_p)
    if greedy:
        probs[greedy] = 0.0
        probs[greedy, likeliest(logits[greedy])] = 1.0
    return probs


def likeliest(logits: Tensor) -> list[int]:
    """The (first) largest logit of each row: `[num_rows, vocab]` → `num_rows` token ids. A NaN counts as largest."""
    if logits.device.type == "cpu":  # NumPy's arg-max is vectorised and PyTorch's is not: 5 to 15 times as slow
        return logits.detach().float().numpy().argmax(axis=-1).tolist()
    return logits.argmax(dim=-1).tolist()


def logprobs_of(logits: Tensor) -> Tensor:
    """What is reported as log-probability: `[..., vocab]` logits → fp32 log-softmax of the same shape.

    It is the model's own opinion, before penalties, temperature and filters (vLLM's default, `raw_logprobs`).
    """
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def sample(probs: Tensor, uniforms: Tensor | Sequence[float]) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    `probs`: `[num_rows, vocab]`, fp32, not negative, not necessarily summing to 1. `uniforms`: `num_rows` in [0, 1).
    Returns `[num_rows]` int64; never a token of probability 0.

    The sum runs in fp64: fp32 near 1 steps by 6e-8, and the tail of a vocabulary of 150 000 would drown in that.
    Raises `NonFiniteLogitsError` for a row that is all zero or not finite: that is a bug of the caller.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    totals = cumulative[:, -1].tolist()
    _refuse_unless([0 < total < math.inf for total in totals], "the probabilities sum to 0, NaN or infinity")
    # The first token whose cumulative sum is *above* the threshold: it lies above its left neighbour's sum too, so the
    # token has probability > 0, at uniform 0 as well. A threshold of `total`, from a uniform that rounded up to 1,
    # would be past the end.
    uniforms = uniforms.tolist() if isinstance(uniforms, Tensor) else uniforms
    thresholds = [[min(u * total, math.nextafter(total, 0.0))] for u, total in zip(uniforms, totals, strict=True)]
    threshold = torch.tensor(thresholds, dtype=torch.float64, device=probs.device).view(-1, 1)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def choose(logits: Tensor, rows: Sequence[SamplingRow], uniforms: Sequence[float]) -> Tensor:
    """One token for each row: what `sample` draws from `probs_from_logits`, `[num_rows]` int64.

    Where all rows are greedy their probabilities would be one-hot, and the one is taken without making them. Raises
    what those two raise.
    """
    if all(row.params.is_greedy for row in rows):
        return torch.tensor(likeliest(_peaks(logits, rows)[0]), dtype=torch.int64, device=logits.device)
    return sample(probs_from_logits(logits, rows), uniforms)


def _peaks(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
    """The logits in fp32 with penalties applied, `[num_rows, vocab]`, and the largest of each row, `[num_rows]`."""
    check_rows(logits, rows)
    logits = _with_penalties(logits.float(), rows)
    peak = logits.amax(dim=-1)
    _refuse_unless([math.isfinite(p) for p in peak.tolist()], "the largest logit is NaN or infinite")
    return logits, peak


def check_rows(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Raise `MinillmError` unless there is one of `rows` for each row of `[num_rows, vocab]` logits."""
    if len(rows) != len(logits):
        raise MinillmError(f"{len(logits)} rows of logits came with {len(rows)} sampling rows: give one for each")


def _with_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The logits with forbidden tokens at -inf and penalties applied: a copy if any row asks for that."""
    edited = [i for i, row in enumerate(rows) if row.forbidden_token_ids or row.params.has_penalties]
    if not edited:
        return logits
    logits = logits.clone()
    for i in edited:
        forbidden = [token for token in rows[i].forbidden_token_ids if token < logits.shape[1]]
        if forbidden:
            logits[i, forbidden] = -math.inf
        if rows[i].params.has_penalties:
            _penalise(logits[i], rows[i])
    return logits


def _penalise(logits: Tensor, row: SamplingRow) -> None:
    """Change `[vocab]` logits in place; only the tokens that the request has used so far are touched."""
    params, (used, counts) = row.params, used_tokens(row)
    index = torch.tensor(used, dtype=torch.int64, device=logits.device)
    count = torch.tensor(counts, dtype=torch.float32, device=logits.device)
    chosen = logits[index]
    chosen = torch.where(chosen > 0, chosen / params.repetition_penalty, chosen * params.repetition_penalty)
    logits[index] = chosen - params.frequency_penalty * count - params.presence_penalty * (count > 0)


def used_tokens(row: SamplingRow) -> tuple[list[int], list[int]]:
    """The tokens that penalties are about, each once and in order, and how often the output has each."""
    counts = Counter(row.output_token_ids)
    used = sorted({*row.prompt_token_ids, *counts})
    return used, [counts[token] for token in used]


def _softmax(logits: Tensor, peak: Tensor, temperatures: list[float]) -> Tensor:
    """Row-wise softmax at each row's temperature."""
    if all(t == 1 for t in temperatures):
        return torch.softmax(logits, dim=-1)
    # The peak goes first: a large logit over a tiny temperature would overflow to infinity.
    scale = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
    return torch.softmax((logits - peak[:, None]) / scale[:, None], dim=-1)


def _narrow(probs: Tensor, limits: dict[int, float], keep: Callable[[Tensor, list[float]], Tensor]) -> None:
    """Zero in place what `keep` leaves out, in the rows (the keys) that have a limit; those sum to 1 again after."""
    if not limits:
        return
    rows = list(limits) if len(limits) < len(probs) else slice(None)
    kept = probs[rows]
    kept = kept * keep(kept, list(limits.values()))
    probs[rows] = kept / kept.sum(dim=-1, keepdim=True)


def _column(limits: list[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.tensor(limits, dtype=dtype, device=like.device)[:, None]


def _reach_min_p(probs: Tensor, min_p: list[float]) -> Tensor:
    return probs >= probs.amax(dim=-1, keepdim=True) * _column(min_p, torch.float32, probs)


def _are_top_k(probs: Tensor, top_k: list[int]) -> Tensor:
    ranked = probs.topk(max(top_k), dim=-1).values
    return probs >= ranked.gather(1, _column(top_k, torch.int64, probs) - 1)


def _make_top_p(probs: Tensor, top_p: list[float]) -> Tensor:
    columns = _without_tail(probs, top_p).any(dim=0).nonzero().squeeze(1)  # few of a large vocabulary are sorted
    ranked, order = probs[:, columns].sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked  # nothing is before the first: it stays
    keep = torch.zeros_like(probs, dtype=torch.bool)
    return keep.scatter_(1, columns[order], before < _column(top_p, torch.float64, probs))


def _without_tail(probs: Tensor, top_p: list[float]) -> Tensor:
    """`probs` with 0 for tokens so unlikely that the others reach top-p without them; not all such tokens are found."""
    for floor in TAILS:
        likely = torch.threshold(probs, floor, 0.0)
        if all(mass > p + 1e-4 for mass, p in zip(likely.sum(dim=-1).tolist(), top_p, strict=True)):
            return likely  # rounding is far below 1e-4
    return probs


def _refuse_unless(good: Sequence[bool], trouble: str) -> None:
    """`good`: one for each row."""
    if not all(good):
        row = good.index(False)
        raise NonFiniteLogitsError(
            f"row {row} of {len(good)}: {trouble}, so no token can be chosen; check the model's weights and dtype "
            "(fp16 overflows above 65504)"
        )
