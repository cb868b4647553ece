"""Sampling on a GPU, where reading a value waits for all kernels before it: launch everything, then read once.

    on the host     which rules apply to which rows, and the uniforms (from seeds alone): one copy to the device
    on the device   forbidden tokens, biases, penalties, temperature, filters, the draw; an invalid row clears its flag
    on the host     one read of tokens and flags, and an error if a flag is cleared

The rules (`filters.py`), their order and their ties are those of `host.py`. Probabilities differ by rounding (at most
10^-6), and a token differs only if its uniform is within rounding of a border. Two things are done differently. Top-p
sorts the whole vocabulary, because finding the part that suffices needs a read. A rule that one row needs is computed
for all rows and used only where it applies, which is cheaper on a GPU than selecting rows.

Wins: the host prepares while the model runs, and waits once per step. Loses: it sorts 128,000 numbers per row where the
CPU path sorts a few hundred. On a CPU a read costs nothing, so this is not used there. What the sort costs on a GPU has
not been measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from minillm.errors import NonFiniteLogitsError
from minillm.ops.dispatch import op
from minillm.ops.sample import one_hot
from minillm.ops.transfer import copy_to_device, copy_to_host, on_device
from minillm.sampling import SamplingRow, allowed_tokens, biases_of, check_rows, probs_from_logits, used_tokens
from minillm.sampling.filters import in_min_p, in_top_k, in_top_p, penalised, softmax_at


class SamplingPlan:
    """The parameters of each rule as arrays with one value per row of logits. A rule that no row needs has no array."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int) -> None:
        params = [row.params for row in rows]
        greedy = [p.is_greedy for p in params]
        self.is_greedy = all(greedy)
        """Whether every row is greedy; then no filter is needed."""
        self.columns = _edit_columns(rows, vocab)
        self.max_top_k = 0
        if self.is_greedy:
            return
        drawn = [None if g else p for g, p in zip(greedy, params, strict=True)]
        top_k = [p.top_k if p and 0 < p.top_k < vocab else 0 for p in drawn]
        self.max_top_k = max(top_k)
        self._add("greedy", greedy, False, np.int64)
        self._add("temperature", [p.temperature if p else 1.0 for p in drawn], 1.0)
        self._add("min_p", [p.min_p if p else 0.0 for p in drawn], 0.0)
        self._add("top_k", top_k, 0, np.int64)
        self._add("top_p", [p.top_p if p else 1.0 for p in drawn], 1.0)

    def _add(self, name: str, values: Sequence[float], default: float, dtype: Any = np.float64) -> None:
        if any(value != default for value in values):
            self.columns[name] = np.array(values, dtype)


def _edit_columns(rows: Sequence[SamplingRow], vocab: int) -> dict[str, np.ndarray]:
    """Allowed, forbidden, biased and penalised tokens, as indices into the flattened `[num_rows * vocab]` logits, and
    what belongs to them."""
    columns: dict[str, np.ndarray] = {}
    allowed = [allowed_tokens(row, vocab) for row in rows]
    if any(map(len, allowed)):
        columns["allowed"] = np.concatenate([i * vocab + tokens for i, tokens in enumerate(allowed)])
        columns["is_limited"] = np.array([len(tokens) > 0 for tokens in allowed], np.int64)
    biases = {i * vocab + t: bias for i, row in enumerate(rows) for t, bias in biases_of(row, vocab).items()}
    if biases:
        columns["biased"] = np.array(list(biases), np.int64)
        columns["bias"] = np.array(list(biases.values()), np.float64)
    forbidden = [i * vocab + t for i, row in enumerate(rows) for t in row.forbidden_token_ids if t < vocab]
    if forbidden:
        columns["forbidden"] = np.array(forbidden, np.int64)
    positions, counts = [], []
    for i, row in enumerate(rows):
        if row.params.has_penalties:
            used, count = used_tokens(row)
            positions.append(used + i * vocab)
            counts.append(count.astype(np.float64))
    if positions:
        columns["used"], columns["count"] = np.concatenate(positions), np.concatenate(counts)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            columns[name] = np.array([getattr(row.params, name) for row in rows], np.float64)
    return columns


class DeviceSampler:
    """Samples tokens from logits on `device`, with the best ops for it, or with those of `implementation`."""

    def __init__(self, device: torch.device | str, implementation: str | None = None) -> None:
        self.device = torch.device(device)
        self.argmax = op("argmax", device, implementation)
        self.sample_op = op("sample", device, implementation)

    @classmethod
    def for_device(cls, device: torch.device, implementation: str | None) -> DeviceSampler | None:
        """A sampler for `device`, or None for a CPU, where reading a value does not wait."""
        return None if device.type == "cpu" else cls(device, implementation)

    def choose(self, logits: Tensor, rows: Sequence[SamplingRow], uniforms: np.ndarray) -> tuple[Tensor, Tensor]:
        """Launch `sampling.choose` on the device. Returns tokens `[num_rows]` int64, and flags `[num_rows]` bool, False
        where the token is invalid. `uniforms`: `[num_rows]` fp64, on the host. Raises what `check_rows` raises."""
        check_rows(logits, rows)
        plan = SamplingPlan(rows, logits.shape[1])
        if plan.is_greedy:
            return self.argmax(edited_logits(logits, copy_to_device(plan.columns, self.device)))
        tokens, is_valid, _ = self._drawn(logits, plan, uniforms)
        return tokens, is_valid

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow], uniforms: np.ndarray) -> tuple[list[int], Tensor]:
        """Sample one token per row and read the tokens. Also returns the distributions that they were sampled from,
        `[num_rows, vocab]` fp32, which stay on the device. Raises what `probs_from_logits` raises."""
        check_rows(logits, rows)
        with on_device(self.device):
            tokens, is_valid, probs = self._drawn(logits, SamplingPlan(rows, logits.shape[1]), uniforms)
            drawn, flags = copy_to_host(tokens, is_valid)
        if not all(flags):
            raise_host_error(lambda: probs_from_logits(logits.cpu(), rows))
        return drawn, probs

    def _drawn(self, logits: Tensor, plan: SamplingPlan, uniforms: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Launch the sampling of all rows. Returns tokens, flags and probabilities."""
        sent = copy_to_device(plan.columns | {"uniforms": uniforms}, self.device)
        probs, is_valid = self.probs(logits, plan, sent)
        tokens, can_be_drawn = self.sample_op(probs, sent["uniforms"])
        return tokens, is_valid & can_be_drawn, probs

    def probs(self, logits: Tensor, plan: SamplingPlan, sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Launch `probs_from_logits` on the device. Returns fp32 probabilities `[num_rows, vocab]`, and flags
        `[num_rows]` bool, False where a row's largest logit is not finite. `sent`: the plan's columns on the device."""
        logits = edited_logits(logits, sent)
        if plan.is_greedy:
            token_ids, is_valid = self.argmax(logits)
            return one_hot(token_ids, logits), is_valid
        peak = logits.amax(dim=-1, keepdim=True)
        probs = _filtered(_softmax(logits, peak, sent), plan, sent)
        if "greedy" in sent:
            probs = torch.where(sent["greedy"][:, None] > 0, one_hot(self.argmax(logits)[0], logits), probs)
        return probs, peak.abs().squeeze(1) < math.inf


def edited_logits(logits: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
    """The logits in fp32 with forbidden tokens at -inf, biases and penalties applied, as in `sampling.host`; a copy if
    any change."""
    logits = logits.float()
    if sent.keys().isdisjoint(("allowed", "forbidden", "biased", "used")):
        return logits
    flat = logits.clone(memory_format=torch.contiguous_format).view(-1)
    if "allowed" in sent:
        is_allowed = (sent["is_limited"] == 0)[:, None].repeat(1, logits.shape[1]).view(-1)
        flat.masked_fill_(~is_allowed.index_fill_(0, sent["allowed"], True), -math.inf)
    if "forbidden" in sent:
        flat.index_fill_(0, sent["forbidden"], -math.inf)
    if "biased" in sent:
        flat.index_add_(0, sent["biased"], sent["bias"].float())
    if "used" in sent:
        used, count = sent["used"], sent["count"].float()
        row = used // logits.shape[1]
        repetition, frequency, presence = (
            sent[f"{name}_penalty"].float()[row] for name in ("repetition", "frequency", "presence")
        )
        flat.scatter_(0, used, penalised(flat[used], count, repetition, frequency, presence))
    return flat.view_as(logits)


def _softmax(logits: Tensor, peak: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
    if "temperature" not in sent:
        return torch.softmax(logits, dim=-1)
    return softmax_at(logits, peak, sent["temperature"].float()[:, None])


def _filtered(probs: Tensor, plan: SamplingPlan, sent: Mapping[str, Tensor]) -> Tensor:
    """Apply min-p, top-k and top-p, each only if a row needs it."""
    if "min_p" in sent:
        min_p = sent["min_p"].float()[:, None]
        probs = _apply_filter(probs, in_min_p(probs, min_p), min_p > 0)
    if "top_k" in sent:
        top_k = sent["top_k"][:, None]
        probs = _apply_filter(probs, in_top_k(probs, top_k, plan.max_top_k), top_k > 0)
    if "top_p" in sent:
        top_p = sent["top_p"][:, None]
        probs = _apply_filter(probs, in_top_p(probs, top_p), top_p < 1)
    return probs


def _apply_filter(probs: Tensor, keep: Tensor, is_limited: Tensor) -> Tensor:
    """Zero the tokens that are not kept and renormalise, in the rows where `is_limited` (`[num_rows, 1]`)."""
    kept = probs * keep
    return torch.where(is_limited, kept / kept.sum(dim=-1, keepdim=True), probs)


def raise_host_error(compute_on_host: Callable[[], object]) -> NoReturn:
    """Raise the error of a step with a cleared flag. The CPU path computes the step again and raises it, because its
    error includes the row, the draft and the value, which flags do not."""
    compute_on_host()
    raise NonFiniteLogitsError(
        "the device found a row of probabilities that it cannot sample from, but the host recomputed it without error; "
        "run the model in float32, or on device='cpu'"
    )
