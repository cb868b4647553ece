"""Lesson 1's tools to inspect a decoder: a record of its forwards, retokenization drift, and five checks.

A decoder here is a function `forward(ids) -> logits [len(ids), vocab]`; row i scores the token after `ids[i]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.llm import LLM
from minillm.sampling.params import SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.trace import StepFinished, Trace
from minillm.viz.tensors.attention_work import ForwardWork

Decoder = Callable[..., Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
LOGIT_TOLERANCE = 1e-3
"""Logits that differ by less are equal up to rounding."""


class FunctionAttention:
    """A function `attend(q, k, v)` in the place of a KV cache: `Decoder` accepts any object with `attend`."""

    def __init__(self, function: Attention) -> None:
        self.function = function

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: object = None) -> Tensor:
        """Apply the function, which is the same in every layer; nothing is cached."""
        return self.function(q, k, v)


class WatchedForward:
    """`forward` that also records in `trace` how many rows have other logits than in the previous forward."""

    def __init__(self, forward: Decoder, trace: Trace) -> None:
        self.forward, self.trace, self.steps = forward, trace, 0
        self.previous_logits: Tensor | None = None

    def __call__(self, ids: list[int]) -> Tensor:
        """The logits of the whole text, as `forward` returns them."""
        logits = self.forward(ids)
        num_same = 0
        if self.previous_logits is not None:
            num_same = int(
                ((logits[: len(self.previous_logits)] - self.previous_logits).abs().amax(1) < LOGIT_TOLERANCE).sum()
            )
        self.previous_logits, self.steps = logits, self.steps + 1
        self.trace.append(ForwardWork(num_tokens=len(ids), num_rows=len(ids), num_new=len(ids) - num_same))
        self.trace.append(StepFinished(self.steps, 0.0, 0.0, 0.0, 0))
        return logits


def retokenization_drift(llm: LLM, texts: Sequence[str], temperature: float) -> list[tuple[int, list[int], list[int]]]:
    """(index of the text, its ids, the ids after decoding and encoding them) for each text where the two differ.

    Each text is completed by up to 16 tokens. The ids are decoded and encoded after each of them except the last, after
    which a loop does not call the model again; the first token at which that changes the ids is reported.
    """
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=0)
    tokenizer = llm.engine.tokenizer
    changed = []
    for number, out in enumerate(llm.generate(list(texts), params, use_tqdm=False)):
        ids, new = list(out.prompt_token_ids), list(out.outputs[0].token_ids)
        for count in range(1, len(new)):
            written = ids + new[:count]
            returned = retokenized(tokenizer, written)
            if returned != written:
                changed.append((number, written, returned))
                break
    return changed


def num_leading_special(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """How many special tokens `ids` begin with, such as the one that the tokenizer puts before a text."""
    return next((i for i, token in enumerate(ids) if token not in tokenizer.special_ids), len(ids))


def retokenized(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """`ids` decoded and encoded again. Special tokens in front stay as they are: no text stands for them."""
    start = num_leading_special(tokenizer, ids)
    text = tokenizer.decode(ids[start:], skip_special_tokens=False)
    return [*ids[:start], *tokenizer.encode(text, add_special_tokens=False)]


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix of two lists of tokens."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def bits_per_token(forward: Decoder, samples: Sequence[list[int]]) -> float:
    """-log2 of the probability of the right next token, averaged over all tokens of all samples."""
    losses = [F.cross_entropy(forward(ids)[:-1], torch.tensor(ids[1:]), reduction="none") for ids in samples]
    return float(torch.cat(losses).mean()) / math.log(2)


@dataclass(frozen=True)
class CheckResults:
    """The results of five checks of a decoder."""

    runs: bool
    """The shapes fit and nothing is NaN."""
    causal: bool
    """Later tokens do not change the logits of earlier ones."""
    position_independent: bool
    """A text moved by 100 positions gets the same logits."""
    bits: float
    """See `bits_per_token`."""
    tokens: list[int]
    """The tokens that the decoder generates."""


def five_checks(forward: Decoder, write: Callable[[Decoder], list[int]], samples: Sequence[list[int]]) -> CheckResults:
    """Check a decoder that also takes `first_position`, the position of its first token. `write` generates with it."""
    whole, half = forward(samples[0]), forward(samples[0][: len(samples[0]) // 2])
    moved = forward(samples[0], first_position=100)
    return CheckResults(
        runs=len(whole) == len(samples[0]) and bool(whole.isfinite().all()),
        causal=bool((whole[: len(half)] - half).abs().max() < 10 * LOGIT_TOLERANCE),
        position_independent=bool((moved - whole).abs().max() < 10 * LOGIT_TOLERANCE),
        bits=bits_per_token(forward, samples),
        tokens=write(forward),
    )
