"""Questions on the lessons 10 and 11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from instructors.exam.question import Answer, Numbers, Question
from minillm.speculative.rejection_sampler import residual
from minillm.teaching.variants.random_numbers import Draw

Function = Callable[..., Any]


def percents(d: Draw, count: int) -> list[int]:
    """`count` percentages that sum to 100, each at least 5."""
    cuts = sorted(d.some(range(1, 100 - 5 * count), count - 1))
    return [5 + b - a for a, b in zip([0, *cuts], [*cuts, 100 - 5 * count], strict=True)]


def _accept(d: Draw) -> Numbers:
    p, q = percents(d, 4), percents(d, 4)
    while p == q:
        p = percents(d, 4)
    return {"p": p, "q": q, "draft": d.int(0, 3)}


def _rows(*percent: list[int]) -> torch.Tensor:
    return torch.tensor(percent, dtype=torch.float64).div(100).float()


def _accept_answer(accept_rule: Function, p: list[int], q: list[int], draft: int) -> Answer:
    target, proposal = _rows(p), _rows(q)
    chances = [float(accept_rule(target, proposal, torch.tensor([x]))) for x in range(4)]
    return {
        "chance of this draft": chances[draft],
        "chance of any draft": sum(q[x] / 100 * chances[x] for x in range(4)),
        "residual": [round(x, 4) for x in residual(target, proposal)[0].tolist()],
    }


def _chain(d: Draw) -> Numbers:
    return {
        "drafts": [d.int(0, 2) for _ in range(2)],
        "q": [percents(d, 3) for _ in range(2)],
        "p": [percents(d, 3) for _ in range(3)],
        "uniforms": [d.int(0, 999) / 1000 + 0.0007 for _ in range(3)],
    }


def _chain_answer(
    verify_chain: Function, drafts: list[int], q: list[list[int]], p: list[list[int]], uniforms: list[float]
) -> Answer:
    return {"tokens": [int(x) for x in verify_chain(list(drafts), _rows(*p), _rows(*q), list(uniforms))]}


def _rollback(d: Draw) -> Numbers:
    drafts = d.int(2, 8)
    return {"text": d.int(20, 300), "drafts": drafts, "accepted": d.int(0, drafts)}


def _rollback_answer(rollback: Function, text: int, drafts: int, accepted: int) -> Answer:
    target, draft = rollback(list(range(text + drafts)), list(range(text + drafts - 1)), drafts, accepted)
    return {"rows of the target": len(target), "rows of the draft": len(draft), "tokens of the round": accepted + 1}


def _tokens(d: Draw) -> Numbers:
    count = d.int(3, 5)
    return {
        "alphas": [d.int(40, 95) / 100 for _ in range(count)],
        "count": count,
        "c": d.int(5, 30) / 100,
        "v": d.int(105, 180) / 100,
    }


def _tokens_answer(expected_tokens: Function, alphas: list[float], count: int, c: float, v: float) -> Answer:
    tokens = float(expected_tokens(list(alphas)))
    return {"tokens per round": tokens, "speed-up": tokens / (count * c + v)}


def _gamma(d: Draw) -> Numbers:
    verify = [1.0]
    for _ in range(4):
        verify.append(round(verify[-1] + d.int(2, 25) / 100, 2))
    return {"alpha": d.int(40, 92) / 100, "c": d.int(3, 30) / 100, "v": verify}


def _gamma_answer(best_gamma: Function, alpha: float, c: float, v: list[float]) -> Answer:
    return {"drafts per round": best_gamma([alpha] * 4, c, list(v))}


def _ngram(d: Draw) -> Numbers:
    return {"tokens": [d.int(1, 3) for _ in range(10)], "longest": d.int(2, 3), "count": d.int(3, 4)}


def _ngram_answer(ngram_propose: Function, tokens: list[int], longest: int, count: int) -> Answer:
    return {"drafts": list(ngram_propose(list(tokens), 1, longest, count))}


def _tree(d: Draw) -> Numbers:
    parents = sorted(min(d.int(-1, i), i - 1) for i in range(6))
    return {"parents": [min(parent, i - 1) for i, parent in enumerate(parents)], "draft": d.int(3, 5)}


def _tree_answer(tree_mask: Function, parents: list[int], draft: int) -> Answer:
    mask = tree_mask(list(parents))
    seen = (mask[draft + 1].nonzero().flatten() - 1).tolist()
    return {"visible (-1: the root)": seen, "entries of the mask that are true": int(mask.sum())}


QUESTIONS = [
    Question(
        "10.accept",
        7,
        "The target's probabilities of four tokens are p = {p} percent, the draft model's are q = {q} percent. Token "
        "{draft} (counted from 0) was drawn from q. With what probability is it accepted? With what probability is a "
        "draft accepted, over all drafts? From which distribution is the token drawn that replaces a rejected draft?",
        _accept,
        _accept_answer,
        "min(1, p / q) for the token; Σ min(p, q) over all; max(p − q, 0), normalised.",
        "l10.accept_rule",
    ),
    Question(
        "10.round",
        8,
        "A round of speculative decoding over a vocabulary of three tokens has the drafts {drafts}. The draft model "
        "drew them from {q} (percent); the target's probabilities at the three positions are {p}. The uniform "
        "numbers are {uniforms}: one for each draft, which is accepted if its number is below its acceptance "
        "probability, and the last one for the recovered or bonus token (ids side by side, the first whose "
        "cumulative probability exceeds it). Which tokens does the round commit?",
        _chain,
        _chain_answer,
        "Accept drafts in order until one fails; then one token from the residual at that position, or, if none "
        "failed, from the target's last row. A round always adds one token of the target.",
        "l10.verify_chain",
    ),
    Question(
        "10.rollback",
        5,
        "The draft model proposed {drafts} tokens, and the target's forward has just verified them. The target's "
        "cache now holds the rows of {text} committed tokens and of all {drafts} drafts; the draft model's cache "
        "holds one row less, because its last draft never went through it. The target accepts {accepted} of the "
        "drafts. How many rows of each cache stay valid, and how many tokens does the round commit?",
        _rollback,
        _rollback_answer,
        "Rows of rejected drafts are dropped from the end of both; the draft's cache never has more rows than it "
        "wrote.",
        "l10.rollback",
    ),
    Question(
        "11.speed_up",
        6,
        "A draft is accepted, if all before it were, with the probabilities {alphas} at the positions 1 to {count}. A "
        "draft token costs {c} and verifying all of them {v} of a plain step. How many tokens does a round give on "
        "average, and how many times faster than plain decoding is it?",
        _tokens,
        _tokens_answer,
        "1 + Σᵢ Πⱼ≤ᵢ αⱼ tokens in γ·c + v plain steps.",
        "l11.expected_tokens",
    ),
    Question(
        "11.best_gamma",
        7,
        "Each draft is accepted with probability {alpha}, if all before it were. A draft costs {c} of a plain step, "
        "and verifying 0, 1, 2, 3, 4 drafts costs {v} plain steps. Which number of drafts per round, from 0 to 4, "
        "decodes fastest?",
        _gamma,
        _gamma_answer,
        "Compute τ(g) / (g · c + v(g)) for g = 0 … 4; 0 drafts have the speed 1.",
        "l11.best_gamma",
    ),
    Question(
        "11.ngram",
        4,
        "An n-gram drafter matches at most {longest} tokens, at least 1. The longest match decides, of equally long "
        "ones the latest; what followed it is proposed, {count} tokens, from its first one again if the text ends. "
        "Which drafts does it propose after the tokens {tokens}?",
        _ngram,
        _ngram_answer,
        "Search the last n tokens in the text before them, n from the largest down.",
        "l11.ngram_propose",
    ),
    Question(
        "11.tree",
        5,
        "The drafts 0 to 5 of a tree have the parents {parents} (−1: the root, which is the last committed token). "
        "Which tokens does draft {draft} attend to, itself included, and how many entries of the whole tree mask "
        "(root and drafts) are true?",
        _tree,
        _tree_answer,
        "A token sees itself and its ancestors up to the root: follow the parents.",
        "l11.tree_mask",
    ),
]
