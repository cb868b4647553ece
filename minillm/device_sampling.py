"""`minillm.sampling` where looking at a number means waiting for the device: everything is launched, nothing is read.

    on the host     which rules bend which rows, and the uniforms (they depend on seeds alone): one copy to the device
    on the device   penalties, temperature, filters, the draw; what may be wrong with a row becomes a flag
    on the host     one read of tokens and flags, and an error if a flag says so

The rules, their order and their ties are those of `sampling`, row for row; a probability differs by rounding at most
(10^-6), a token only if its uniform falls that near a border. Two things are done otherwise. Top-p sorts the whole
vocabulary: which part of it would do is a number that would have to be read. And a rule that one row asks for is worked
out for all rows, and its result taken where it was asked for, which is cheaper there than picking rows.

Wins: the host can plan while the model runs, and waits once for everything. Loses: a sort of 128,000 numbers per row
where a CPU sorts some hundreds; and on a CPU, where reading costs nothing, so it is not used there. Not yet measured on
a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from minillm.errors import NonFiniteLogitsError
from minillm.ops.dispatch import op
from minillm.ops.transfer import current, read, send
from minillm.sampling import SamplingRow, check_rows, probs_from_logits, used_tokens

if TYPE_CHECKING:
    from minillm.models.runner import ModelRunner


class SamplingPlan:
    """What is to be done to some rows of logits, as columns of numbers. A rule that bends no row has no column."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int) -> None:
        params = [row.params for row in rows]
        greedy = [p.is_greedy for p in params]
        self.is_greedy = all(greedy)
        """Whether every row takes its likeliest token; then there is nothing to filter."""
        self.columns = _edits(rows, vocab)
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

    def _add(self, name: str, values: Sequence[float], off: float, dtype: Any = np.float64) -> None:
        if any(value != off for value in values):
            self.columns[name] = np.array(values, dtype)


def _edits(rows: Sequence[SamplingRow], vocab: int) -> dict[str, np.ndarray]:
    """The logits that are changed before anything else, by their place in the flat `[num_rows * vocab]`."""
    columns: dict[str, np.ndarray] = {}
    forbidden = [i * vocab + t for i, row in enumerate(rows) for t in row.forbidden_token_ids if t < vocab]
    if forbidden:
        columns["forbidden"] = np.array(forbidden, np.int64)
    places, counts = [], []
    for i, row in enumerate(rows):
        if row.params.has_penalties:
            used, count = used_tokens(row)
            places.append(np.array(used, np.int64) + i * vocab)
            counts.append(np.array(count, np.float64))
    if places:
        columns["used"], columns["count"] = np.concatenate(places), np.concatenate(counts)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            columns[name] = np.array([getattr(row.params, name) for row in rows], np.float64)
    return columns


class DeviceSampler:
    """Tokens from logits that lie on `device`, with the best ops there are for it or the `implementation` named."""

    def __init__(self, device: torch.device | str, implementation: str | None = None) -> None:
        self.device = torch.device(device)
        self.argmax = op("argmax", device, implementation)
        self.invert = op("sample", device, implementation)

    @classmethod
    def beside(cls, runner: ModelRunner) -> DeviceSampler | None:
        """The one for the logits of `runner`; None on a CPU, where looking at a number is no wait."""
        return None if runner.device.type == "cpu" else cls(runner.device, implementation_beside(runner))

    def choose(self, logits: Tensor, rows: Sequence[SamplingRow], uniforms: np.ndarray) -> tuple[Tensor, Tensor]:
        """Launch what `sampling.choose` does: tokens `[num_rows]` int64, and flags `[num_rows]` bool, False where a
        token means nothing. `uniforms`: `[num_rows]` fp64, on the host. Raises what `check_rows` raises."""
        check_rows(logits, rows)
        plan = SamplingPlan(rows, logits.shape[1])
        if plan.is_greedy:
            return self.argmax(edited(logits, send(plan.columns, self.device)))
        tokens, is_valid, _ = self._drawn(logits, plan, uniforms)
        return tokens, is_valid

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow], uniforms: np.ndarray) -> tuple[list[int], Tensor]:
        """One token per row, read at once, and the distributions they were drawn from, `[num_rows, vocab]` fp32, which
        stay on the device. Raises what `probs_from_logits` raises."""
        check_rows(logits, rows)
        with current(self.device):
            tokens, is_valid, probs = self._drawn(logits, SamplingPlan(rows, logits.shape[1]), uniforms)
            drawn, flags = read(tokens, is_valid)
        if not all(flags):
            say_why(lambda: probs_from_logits(logits.cpu(), rows))
        return drawn, probs

    def _drawn(self, logits: Tensor, plan: SamplingPlan, uniforms: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, flags and probabilities."""
        sent = send(plan.columns | {"uniforms": uniforms}, self.device)
        probs, is_valid = self.probs(logits, plan, sent)
        tokens, can_be_drawn = self.invert(probs, sent["uniforms"])
        return tokens, is_valid & can_be_drawn, probs

    def probs(self, logits: Tensor, plan: SamplingPlan, sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Launch what `probs_from_logits` does: fp32 probabilities `[num_rows, vocab]`, and flags `[num_rows]` bool,
        False where a row's largest logit is not finite. `sent`: the plan's columns, on the device."""
        logits = edited(logits, sent)
        if plan.is_greedy:
            likeliest, is_valid = self.argmax(logits)
            return _one_hot(likeliest, logits), is_valid
        peak = logits.amax(dim=-1, keepdim=True)
        probs = _filtered(_softmax(logits, peak, sent), plan, sent)
        if "greedy" in sent:
            probs = torch.where(sent["greedy"][:, None] > 0, _one_hot(self.argmax(logits)[0], logits), probs)
        return probs, peak.abs().squeeze(1) < math.inf


def edited(logits: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
    """The logits in fp32, forbidden tokens at -inf and penalties applied: a copy if any are. In the order, and by the
    formulas, of `sampling`."""
    logits = logits.float()
    if "forbidden" not in sent and "used" not in sent:
        return logits
    flat = logits.clone(memory_format=torch.contiguous_format).view(-1)
    if "forbidden" in sent:
        flat.index_fill_(0, sent["forbidden"], -math.inf)
    if "used" in sent:
        used, count = sent["used"], sent["count"].float()
        row = used // logits.shape[1]
        repetition, frequency, presence = (
            sent[f"{name}_penalty"].float()[row] for name in ("repetition", "frequency", "presence")
        )
        chosen = flat[used]
        chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        flat.scatter_(0, used, chosen - frequency * count - presence * (count > 0))
    return flat.view_as(logits)


def _softmax(logits: Tensor, peak: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
    if "temperature" not in sent:
        return torch.softmax(logits, dim=-1)
    return torch.softmax((logits - peak) / sent["temperature"].float()[:, None], dim=-1)


def _filtered(probs: Tensor, plan: SamplingPlan, sent: Mapping[str, Tensor]) -> Tensor:
    """Min-p, top-k and top-p, each where some row asks for it."""
    if "min_p" in sent:
        min_p = sent["min_p"].float()[:, None]
        probs = _narrow(probs, probs >= probs.amax(dim=-1, keepdim=True) * min_p, min_p > 0)
    if "top_k" in sent:
        top_k = sent["top_k"][:, None]
        ranked = probs.topk(plan.max_top_k, dim=-1).values
        probs = _narrow(probs, probs >= ranked.gather(1, (top_k - 1).clamp(min=0)), top_k > 0)
    if "top_p" in sent:
        top_p = sent["top_p"][:, None]
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
        keep = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, before < top_p)
        probs = _narrow(probs, keep, top_p < 1)
    return probs


def _narrow(probs: Tensor, keep: Tensor, is_limited: Tensor) -> Tensor:
    """Without what is not kept, and summing to 1 again, in the rows that are limited (`[num_rows, 1]`)."""
    kept = probs * keep
    return torch.where(is_limited, kept / kept.sum(dim=-1, keepdim=True), probs)


def _one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(1, tokens[:, None], 1.0)


def implementation_beside(runner: ModelRunner) -> str | None:
    """Which ops choose tokens from what `runner` computes: the device's best (None) if an executor runs the model, for
    that has found out that kernels can be compiled here; else PyTorch, which always runs."""
    return "reference" if runner.executor is None else None


def say_why(plainly: Callable[[], object]) -> NoReturn:
    """Raise for a step in which a flag says that no token can be chosen: what the way of a CPU, asked to do it again,
    has to say about it. That names the row, the draft and the number, for which flags have no room."""
    plainly()
    raise NonFiniteLogitsError(
        "the device found a row of probabilities that it cannot draw from, and the host, computing it again, did not; "
        "run the model in float32, or on device='cpu'"
    )
