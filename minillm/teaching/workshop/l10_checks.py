"""Lesson 10: six checks of a loop of speculative decoding. Five say right or wrong, the sixth counts.

Each looks at another part: the rule, the distribution of whole texts, temperature 0, the caches, the ends, the gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from minillm.errors import MinillmError
from minillm.speculative.block_verification import acceptance, kept_weights
from minillm.speculative.rejection_sampler import acceptance_probability
from minillm.teaching.workshop.l10_loop import Generated, Loop, Rollback
from minillm.teaching.workshop.l10_words import (
    DRAFT,
    TARGET,
    TWELFTHS,
    WORDS,
    Judge,
    enumerate_round,
    role,
    target_joint,
)
from minillm.viz.charts.chi_square import ChiSquare

PROMPT = [2, 0]
NUM_TEXTS, NUM_TOKENS = 600, 12
THRESHOLD = 1e-6
"""A right loop falls below this p-value with one set of seeds in a million."""
CELLS = tuple(product(range(len(WORDS)), repeat=2))
"""The roles of two words in a row."""
ALMOST_ONE = 1 - 2.0**-24
Found = Callable[[type[Loop], Judge, Rollback], bool]


def role_pairs(tokens: list[int], prompt: list[int]) -> list[tuple[int, int]]:
    """The roles of the first two tokens, of the next two, …"""
    roles = [role([*prompt, *tokens[:i]], token) for i, token in enumerate(tokens)]
    return list(zip(roles[::2], roles[1::2], strict=False))


def chi_square(texts: list[list[int]]) -> ChiSquare:
    """Of texts that continue `PROMPT`: counts of the pairs of roles, against the target's probabilities."""
    counts = Counter(pair for tokens in texts for pair in role_pairs(tokens, PROMPT))
    row = TARGET.twelfths[0]
    return ChiSquare([counts[cell] for cell in CELLS], [row[a] * row[b] / TWELFTHS**2 for a, b in CELLS])


def many_texts(loop: Loop, num_texts: int = NUM_TEXTS) -> list[Generated]:
    """Texts of `NUM_TOKENS` tokens after `PROMPT`, with the seeds 0, 1, …"""
    return [loop.generate(PROMPT, NUM_TOKENS, seed) for seed in range(num_texts)]


def wrong_by_enumeration(kind: type[Loop], verify: Judge, rollback: Rollback) -> bool:
    """The distribution of three tokens, over all drafts and uniforms of a round, is not the target's.

    It is exact but for a round like `OneUniform`'s (see `TWELVE_MIDDLES`), whose exact distribution is wrong, too."""
    loop = kind(verify, rollback)
    return enumerate_round(loop.judge, PROMPT) != target_joint(PROMPT, 3)


def wrong_at_zero(kind: type[Loop], verify: Judge, rollback: Rollback) -> bool:
    """At temperature 0 the tokens are not those of the target alone."""
    loop = kind(verify, rollback, greedy=True)
    return any(
        loop.generate(list(prompt), NUM_TOKENS, seed).tokens[:NUM_TOKENS] != greedy_text(list(prompt))
        for seed, prompt in enumerate(product(range(len(WORDS)), repeat=3))
    )


def greedy_text(prompt: list[int]) -> list[int]:
    """What the target alone writes at temperature 0."""
    text = list(prompt)
    for _ in range(NUM_TOKENS):
        row = TARGET.row(text)
        text.append(row.index(max(row)))
    return text[len(prompt) :]


def wrong_with_itself(kind: type[Loop], verify: Judge, rollback: Rollback) -> bool:
    """A target that drafts for itself does not get every draft accepted and a bonus token in every round; or a draft
    model that is the target up to rounding breaks it."""
    loop = kind(verify, rollback, draft=TARGET)
    if any(count != loop.gamma + 1 for seed in range(20) for count in loop.generate(PROMPT, 30, seed).rounds):
        return True
    q = TARGET.forward([], PROMPT)
    [token] = loop.judge([0, 1], torch.cat([q, q[-1:]]) * (1 - 2.0**-22), q, [ALMOST_ONE, ALMOST_ONE, 0.5])[:1]
    return not 0 <= token < len(WORDS)


def wrong_at_the_end(kind: type[Loop], verify: Judge, rollback: Rollback) -> bool:
    """A text has more than max_tokens tokens, or a token after the end token."""
    loop = kind(verify, rollback)
    for seed in range(20):
        tokens = loop.generate(PROMPT, 7, seed, end=1).tokens
        if len(tokens) > 7 or 1 in tokens[:-1]:
            return True
    return False


CHECKS: dict[str, Found] = {
    "enumeration": wrong_by_enumeration,
    "temperature 0": wrong_at_zero,
    "own draft": wrong_with_itself,
    "ends": wrong_at_the_end,
}
COLUMNS = ("enumeration", "χ²", "temperature 0", "own draft", "ends")


@dataclass(frozen=True)
class Finding:
    """What the checks say about one loop. `tokens_per_round`: the mean number that a round committed."""

    caught_by: tuple[str, ...]
    tokens_per_round: float
    chi_square: ChiSquare


def wrong_or_raises(is_wrong: Found, kind: type[Loop], verify: Judge, rollback: Rollback) -> bool:
    """Whether the check finds the loop wrong. A loop that raises an error is wrong."""
    try:
        return is_wrong(kind, verify, rollback)
    except (MinillmError, IndexError, RuntimeError):
        return True


def examine(kind: type[Loop], verify: Judge, rollback: Rollback) -> Finding:
    """Run all checks."""
    texts = many_texts(kind(verify, rollback))
    test = chi_square([text.tokens[:NUM_TOKENS] for text in texts])
    caught = {"χ²"} if test.p_value < THRESHOLD else set()
    caught |= {name for name, is_wrong in CHECKS.items() if wrong_or_raises(is_wrong, kind, verify, rollback)}
    rounds = [count for text in texts for count in text.rounds]
    return Finding(tuple(name for name in COLUMNS if name in caught), sum(rounds) / len(rounds), test)


def mean_accepted(prompt: list[int], gamma: int) -> tuple[float, float]:
    """The mean number of accepted drafts of a round, over all drafts: judged one by one, and as a block."""
    one_by_one = as_block = 0.0
    for drafts in product(range(len(WORDS)), repeat=gamma):
        inputs, x = [prompt[-1], *drafts], torch.tensor(drafts)
        p, q = (model.forward(prompt[:-1], inputs)[:-1] for model in (TARGET, DRAFT))
        probability = float(q.gather(1, x[:, None]).prod())
        one_by_one += probability * float(acceptance_probability(p, q, x).cumprod(0).sum())
        chances = acceptance(kept_weights(p, q, x), p, q).tolist()
        none_later = 1.0
        for count in range(gamma, 0, -1):  # the largest count whose test succeeds
            as_block += probability * none_later * chances[count - 1] * count
            none_later *= 1 - chances[count - 1]
    return one_by_one, as_block
