"""Lesson 10: a learner's round inside the engine, the target's own probabilities, and drafts as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.models.causal import CausalAttention
from minillm.models.decoder import Decoder
from minillm.request import Request
from minillm.sampling import Draw, SamplingRow, probs_from_logits, sample, uniform
from minillm.speculative.rejection_sampler import AcceptRule, Verdict, draft_distribution
from minillm.teaching.decoding import num_leading_special, retokenized
from minillm.teaching.submitted import submitted
from minillm.teaching.workshop.l10_words import Judge
from minillm.tokenizer import Tokenizer
from minillm.trace import DraftProposed, TokensCommitted, Trace
from minillm.viz.charts.chi_square import FEWEST, ChiSquare


@dataclass(frozen=True)
class ChainRule(AcceptRule):
    """Lets `verify` judge the drafts of each request: `rejection_sample_method=ChainRule(verify=verify_chain)`."""

    verify: Judge | None = None

    def verdicts(
        self,
        draft_token_ids: Sequence[Sequence[int]],
        draft_probs: Sequence[Tensor | None],
        target_probs: Tensor,
        seeds: Sequence[int],
        first_index: Sequence[int],
    ) -> list[Verdict]:
        """See `minillm.speculative.rejection_sampler.rejection_sample`."""
        found, start = [], 0
        for drafts, q, seed, index in zip(draft_token_ids, draft_probs, seeds, first_index, strict=True):
            k = len(drafts)
            p, start = target_probs[start : start + k + 1], start + k + 1
            if not drafts:
                found.append(Verdict(sample(p, [uniform(seed, index, Draw.SAMPLE)]).tolist(), 0))
                continue
            ids = torch.tensor(drafts, device=target_probs.device)
            q = draft_distribution(ids, q, target_probs, 0, k)  # one-hot rows if q is None
            uniforms = [uniform(seed, index + i, Draw.ACCEPT) for i in range(k)]
            tokens = self.verify(list(drafts), p, q, [*uniforms, uniform(seed, index, Draw.RECOVER)])
            found.append(Verdict(tokens, len(tokens) - 1))
        return found


@dataclass(frozen=True)
class RoundOfRequest:
    """One round of a request in the engine: the text before it, its drafts, and what both caches held afterwards."""

    text: list[int]
    drafts: list[int]
    num_accepted: int
    target_rows: int
    draft_rows: int


def rounds_of(llm: LLM, prompt: str, params: SamplingParams) -> Iterator[RoundOfRequest]:
    """Run one request step by step; yields every round after which the request goes on.

    When the generator ends or is closed, the request is aborted if it still runs.
    """
    with submitted(llm, prompt, params) as [request], llm.trace() as trace:
        while not request.finished:
            text, seen = list(request.token_ids), len(trace)
            llm.engine.step()
            events = list(trace)[seen:]
            drafts = [event.token_ids for event in events if isinstance(event, DraftProposed)]
            if drafts and not request.finished:
                yield _round(llm, request, text, drafts[0], events)


def _round(llm: LLM, request: Request, text: list[int], drafts: list[int], events: list) -> RoundOfRequest:
    [committed] = [event for event in events if isinstance(event, TokensCommitted)]
    in_draft = llm.engine.drafter.num_computed_tokens(request)
    return RoundOfRequest(text, drafts, committed.num_accepted, request.num_computed_tokens, in_draft)


def target_probabilities(
    model: Decoder, prompt: list[int], params: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens that the target may sample, computed without drafts."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, probability in found.items():
            ids = [*prompt, *tokens]
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), CausalAttention(len(ids)))
            row = probs_from_logits(model.logits(hidden[-1:]), [SamplingRow(params)])[0]
            for token in row.nonzero().flatten().tolist():
                longer[(*tokens, token)] = probability * float(row[token])
        found = longer
    return found


def chi_square_of_texts(
    texts: Sequence[Sequence[int]], probabilities: dict[tuple[int, ...], float], most_cells: int
) -> tuple[list[tuple[int, ...]], ChiSquare]:
    """The test of sampled continuations: a cell for each of the most likely ones, and one for all others."""
    counts = Counter(map(tuple, texts))
    likely = sorted(probabilities, key=probabilities.get, reverse=True)[: most_cells - 1]
    cells = [cell for cell in likely if probabilities[cell] * len(texts) >= FEWEST]
    rest = 1 - sum(probabilities[cell] for cell in cells)
    if rest * len(texts) < FEWEST:
        rest += probabilities[cells.pop()]
    observed = [counts[cell] for cell in cells]
    return cells, ChiSquare([*observed, len(texts) - sum(observed)], [*(probabilities[cell] for cell in cells), rest])


def sampled_texts(llm: LLM, prompt: str, params: Callable[[int], SamplingParams], count: int) -> list[list[int]]:
    """`count` completions of one prompt, with the seeds 0, 1, …"""
    outputs = llm.generate([prompt] * count, [params(seed) for seed in range(count)], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@dataclass(frozen=True)
class RoundTrip:
    """What becomes of drafts that are sent to the target as text. Rounds with special tokens, which a decoded text does
    not show, are left out, unless they only begin the prompt."""

    num_rounds: int
    changed: int
    """Rounds whose drafts are not the last tokens of the text that is decoded and encoded again."""
    text_changed: int
    """Rounds whose committed tokens are not the first tokens of that text."""
    example: tuple[list[str], list[str]] | None
    """The last tokens of one such round, before and after."""


def through_text(trace: Trace, tokenizer: Tokenizer, prompts: Sequence[str]) -> RoundTrip:
    """Decode the text and the drafts of every round, and encode them again."""
    texts: dict[str, list[int]] = {}
    num_rounds = changed = text_changed = 0
    example = None
    for event in trace:
        name = getattr(event, "request_id", None)
        if name is not None and name not in texts:
            texts[name] = tokenizer.encode(prompts[len(texts)])
        if isinstance(event, DraftProposed):
            text = texts[name][num_leading_special(tokenizer, texts[name]) :]
            before = [*text, *event.token_ids]
            if not event.token_ids or tokenizer.special_ids.intersection(before):
                continue
            after = retokenized(tokenizer, before)
            num_rounds += 1
            text_changed += after[: len(text)] != text
            if after[-len(event.token_ids) :] != event.token_ids:
                changed += 1
                example = example or _ends(before, after, tokenizer)
        if isinstance(event, TokensCommitted):
            texts[name] += event.token_ids
    return RoundTrip(num_rounds, changed, text_changed, example)


def _ends(before: list[int], after: list[int], tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """The tokens from the first difference on."""
    pairs = list(zip(before, after, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return tuple([tokenizer.token_text(token) for token in tokens[first:]] for tokens in (before, after))


def conditional_acceptance(rounds: Sequence[TokensCommitted]) -> float:
    """Accepted drafts, divided by those that were judged: the accepted ones and the first rejected one of a round."""
    judged = sum(event.num_accepted + (event.num_accepted < event.num_drafts) for event in rounds)
    return sum(event.num_accepted for event in rounds) / judged
