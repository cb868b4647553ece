"""How the next token is chosen: logits → probabilities (`probs_from_logits`) → token (`sample`).

Sampling and the acceptance ratio p / q of speculative decoding both use the probabilities of `probs_from_logits`.
Random numbers are a pure function of (seed, token index, purpose). So a request samples the same tokens whatever else
is in the batch, however its prompt was chunked and however often it was preempted. With drafts this holds as long as it
gets the same number of them. There are fewer where the block pool or the token budget of a step has no room for more,
in the step behind a preemption, over `disable_by_batch_size`, and with `adaptive`, the default, where more would not
pay: there only a request with a `seed` of its own always gets all.

This is the CPU path and the reference: it reads values from tensors when it needs them. `sampling.device` does the same
on a GPU, where such a read waits for all kernels. The user's options are in `minillm.sampling.params`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.errors import MinillmError, NonFiniteLogitsError
from minillm.sampling.filters import in_min_p, in_top_k, in_top_p, penalised, softmax_at
from minillm.sampling.params import SamplingParams

TAILS = (2**-9, 2**-12, 2**-15)
"""Thresholds for top-p, tried in order: if the tokens above a threshold already reach top-p, only those are sorted."""


class Draw(IntEnum):
    """What a uniform random number is for. Each purpose has its own stream, so no number is used twice."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def uniform(seed: int, index: int, purpose: Draw, sibling: int = 0) -> float:
    """A uniform number in [0, 1), a pure function of its arguments: splitmix64 over (seed, token index, purpose).

    `sibling`: separates numbers of one index and purpose, such as those of the siblings in a draft tree.

    The result is a multiple of 2^-24, so fp32 represents it exactly and it never rounds up to 1.
    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    x = _mix(seed & _MASK)
    x = _mix(x ^ (index & _MASK))
    return (_mix(x ^ (int(purpose) + len(Draw) * sibling)) >> 40) * 2.0**-24


def uniforms(seeds: Sequence[int], indices: Sequence[int], purposes: Sequence[Draw]) -> np.ndarray:
    """`uniform` for many arguments at once, in microseconds and with the same results: `[len(seeds)]` fp64."""
    words = np.array([[x & _MASK for x in column] for column in (seeds, indices, purposes)], np.uint64)
    x = _mix(_mix(_mix(words[0]) ^ words[1]) ^ words[2])
    return (x >> np.uint64(40)) * 2.0**-24


_MASK = (1 << 64) - 1


def _mix(x: Any) -> Any:
    """One round of splitmix64 on an integer or on each element of a uint64 array, whose arithmetic wraps around."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class SamplingRow:
    """What `probs_from_logits` needs to know about the request of one row of logits."""

    params: SamplingParams
    prompt_token_ids: Sequence[int] | np.ndarray = ()
    """The tokens of the prompt, in any order, each at least once."""
    output_token_ids: Sequence[int] = ()
    """All tokens after the prompt and before the one to be chosen, drafts included."""
    forbidden_token_ids: Sequence[int] = ()
    """Tokens that must not be chosen: end-of-text and stop tokens before `min_tokens`, and the last tokens of
    `bad_words`."""


def probs_from_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The distribution each row is sampled from: `[num_rows, vocab]` logits → fp32 probabilities.

    Order, as in vLLM: tokens that are not allowed or forbidden, biases, repetition / presence / frequency penalties,
    temperature, min-p, top-k, top-p.
    Temperature 0 gives a one-hot row at the (first) maximum, so greedy needs no other code path.

    Ties: top-k keeps all tokens that are exactly as likely as the k-th, so it may keep more than k. Among equally
    likely tokens, top-p keeps the lower ids; it always keeps the most likely token. The result of a row does not depend
    on the other rows, to the last bit. `logits` is not modified.

    Raises `NonFiniteLogitsError` if a row contains NaN or +inf, or if all its tokens are forbidden.
    """
    logits, peak = _peaks(logits, rows)
    params = [row.params for row in rows]
    greedy = [i for i, p in enumerate(params) if p.is_greedy]
    if len(greedy) == len(rows):
        probs = torch.zeros_like(logits)
        probs[greedy, argmax(logits)] = 1.0
        return probs

    probs = _softmax(logits, peak, [1.0 if p.is_greedy else p.temperature for p in params])
    drawn = [(i, p) for i, p in enumerate(params) if not p.is_greedy]
    _apply_filter(probs, {i: p.min_p for i, p in drawn if p.min_p > 0}, _keep_min_p)
    _apply_filter(probs, {i: p.top_k for i, p in drawn if 0 < p.top_k < logits.shape[1]}, _keep_top_k)
    _apply_filter(probs, {i: p.top_p for i, p in drawn if p.top_p < 1}, _keep_top_p)
    if greedy:
        probs[greedy] = 0.0
        probs[greedy, argmax(logits[greedy])] = 1.0
    return probs


def argmax(logits: Tensor) -> list[int]:
    """The token id of the (first) largest logit of each row of `[num_rows, vocab]`. A NaN counts as largest."""
    if logits.device.type == "cpu":  # NumPy's argmax is vectorised; PyTorch's is not and takes 5 to 15 times as long
        return logits.detach().float().numpy().argmax(axis=-1).tolist()
    return logits.argmax(dim=-1).tolist()


def logprobs_of(logits: Tensor) -> Tensor:
    """The log-probabilities that are reported to users: the fp32 log-softmax of `[..., vocab]` logits, same shape.

    The logits are the model's, before biases, penalties, temperature and filters (vLLM's default, `raw_logprobs`).
    """
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def sample(probs: Tensor, uniforms: Tensor | Sequence[float]) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    `probs`: `[num_rows, vocab]`, fp32, not negative, not necessarily summing to 1. `uniforms`: `num_rows` in [0, 1).
    Returns `[num_rows]` int64; never a token of probability 0.

    The sum is in fp64: the resolution of fp32 near 1 is 6e-8, so the tail of a vocabulary of 150 000 would be lost.
    Raises `NonFiniteLogitsError` for a row that is all zero or not finite: that is a bug of the caller.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    totals = cumulative[:, -1].tolist()
    _check_valid([0 < total < math.inf for total in totals], "the probabilities sum to 0, NaN or infinity")
    # Take the first token whose cumulative sum is *above* the threshold. The sum before it is not, so the token has
    # probability > 0, even for uniform 0. The threshold must be below `total`: otherwise a uniform that was rounded up
    # to 1 would give an index past the end.
    uniforms = uniforms.tolist() if isinstance(uniforms, Tensor) else uniforms
    thresholds = [[min(u * total, math.nextafter(total, 0.0))] for u, total in zip(uniforms, totals, strict=True)]
    threshold = torch.tensor(thresholds, dtype=torch.float64, device=probs.device).view(-1, 1)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def choose(logits: Tensor, rows: Sequence[SamplingRow], uniforms: Sequence[float]) -> Tensor:
    """One token per row, `[num_rows]` int64: `sample` applied to `probs_from_logits`. Raises what those two raise.

    If all rows are greedy, this takes the argmax directly, which gives the same tokens as one-hot probabilities.
    """
    if all(row.params.is_greedy for row in rows):
        return torch.tensor(argmax(_peaks(logits, rows)[0]), dtype=torch.int64, device=logits.device)
    return sample(probs_from_logits(logits, rows), uniforms)


def _peaks(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
    """The logits in fp32 after `_edited`, `[num_rows, vocab]`, and each row's largest logit, `[num_rows]`."""
    check_rows(logits, rows)
    logits = _edited(logits.float(), rows)
    peak = logits.amax(dim=-1)
    _check_valid([math.isfinite(p) for p in peak.tolist()], "the largest logit is NaN or infinite")
    return logits, peak


def check_rows(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Raise `MinillmError` unless `rows` has one entry per row of the `[num_rows, vocab]` logits."""
    if len(rows) != len(logits):
        raise MinillmError(f"{len(logits)} rows of logits came with {len(rows)} sampling rows: give one for each")


def _edited(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The logits with forbidden tokens at -inf, biases and penalties applied; a copy if any row changes."""
    edited = [i for i, row in enumerate(rows) if row.forbidden_token_ids or row.params.edits_logits]
    if not edited:
        return logits
    logits, vocab = logits.clone(), logits.shape[1]
    for i in edited:
        if len(allowed := allowed_tokens(rows[i], vocab)):
            allowed = torch.from_numpy(allowed).to(logits.device)
            kept = logits[i, allowed]
            logits[i] = -math.inf
            logits[i, allowed] = kept
        forbidden = [token for token in rows[i].forbidden_token_ids if token < vocab]
        if forbidden:
            logits[i, forbidden] = -math.inf
        if biases := biases_of(rows[i], vocab):
            logits[i, list(biases)] += torch.tensor(list(biases.values()), device=logits.device)
        if rows[i].params.has_penalties:
            _penalise(logits[i], rows[i])
    return logits


def _penalise(logits: Tensor, row: SamplingRow) -> None:
    """Penalise `[vocab]` logits in place: only those of the tokens that the request has used so far."""
    params, (used, counts) = row.params, used_tokens(row)
    index = torch.from_numpy(used).to(logits.device)
    count = torch.from_numpy(counts).to(logits.device, torch.float32)
    logits[index] = penalised(
        logits[index], count, params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    )


def allowed_tokens(row: SamplingRow, vocab: int) -> np.ndarray:
    """Those of `allowed_token_ids` that are below `vocab`, `[num_allowed]` int64; empty if all tokens are allowed. A
    draft model may have fewer tokens than the target, whose verdict counts: without any allowed one it may draft all.
    """
    allowed = row.params.sorted_allowed_token_ids
    return allowed[: np.searchsorted(allowed, vocab)]


def biases_of(row: SamplingRow, vocab: int) -> dict[int, float]:
    """Those of `logit_bias` whose tokens are below `vocab`."""
    return {token: bias for token, bias in (row.params.logit_bias or {}).items() if token < vocab}


def used_tokens(row: SamplingRow) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that penalties apply to (those of prompt and output), sorted, and how often each is in the output,
    both `[num_used]` int64."""
    written, times = np.unique(np.array(row.output_token_ids, np.int64), return_counts=True)
    used = np.union1d(np.asarray(row.prompt_token_ids, np.int64), written)
    counts = np.zeros(len(used), np.int64)
    counts[np.searchsorted(used, written)] = times
    return used, counts


def _softmax(logits: Tensor, peak: Tensor, temperatures: list[float]) -> Tensor:
    """Row-wise softmax at each row's temperature."""
    if all(t == 1 for t in temperatures):
        return torch.softmax(logits, dim=-1)
    return softmax_at(logits, peak[:, None], _column(temperatures, torch.float32, logits))


def _apply_filter(probs: Tensor, limits: dict[int, float], keep: Callable[[Tensor, list[float]], Tensor]) -> None:
    """Filter the rows in `limits` (row → limit) in place: zero the tokens that `keep` rejects and renormalise."""
    if not limits:
        return
    rows = list(limits) if len(limits) < len(probs) else slice(None)
    kept = probs[rows]
    kept = kept * keep(kept, list(limits.values()))
    probs[rows] = kept / kept.sum(dim=-1, keepdim=True)


def _column(limits: list[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.tensor(limits, dtype=dtype, device=like.device)[:, None]


def _keep_min_p(probs: Tensor, min_p: list[float]) -> Tensor:
    return in_min_p(probs, _column(min_p, torch.float32, probs))


def _keep_top_k(probs: Tensor, top_k: list[int]) -> Tensor:
    return in_top_k(probs, _column(top_k, torch.int64, probs), max(top_k))


def _keep_top_p(probs: Tensor, top_p: list[float]) -> Tensor:
    columns = _without_tail(probs, top_p).any(dim=0).nonzero().squeeze(1)  # sort only a small part of the vocabulary
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep[:, columns] = in_top_p(probs[:, columns], _column(top_p, torch.float64, probs))
    return keep


def _without_tail(probs: Tensor, top_p: list[float]) -> Tensor:
    """`probs` with 0 for unlikely tokens, if the others reach top-p without them in every row (see `TAILS`)."""
    for floor in TAILS:
        likely = torch.threshold(probs, floor, 0.0)
        if all(mass > p + 1e-4 for mass, p in zip(likely.sum(dim=-1).tolist(), top_p, strict=True)):
            return likely  # the margin of 1e-4 is far above rounding errors
    return probs


def _check_valid(is_valid: Sequence[bool], problem: str) -> None:
    """Raise `NonFiniteLogitsError` for the first row that is not valid. `is_valid`: one flag per row."""
    if not all(is_valid):
        row = is_valid.index(False)
        raise NonFiniteLogitsError(
            f"row {row} of {len(is_valid)}: {problem}, so no token can be chosen; check the model's weights and dtype "
            "(fp16 overflows above 65504)"
        )
