"""Makers for the lessons 10 to 15."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minillm.teaching.exercise import Case
from minillm.teaching.variants.random_numbers import Draw, Maker
from minillm.teaching.workshop.l12_costs import Machine, Shape
from minillm.teaching.workshop.l14_store import NOTHING, Key


def _accept(d: Draw) -> Case:
    drafts, vocab = d.int(1, 4), d.int(3, 6)
    x = d.integers(0, vocab - 1, drafts)
    return Case(f"{drafts} drafts", (d.chances(drafts, vocab), d.chances(drafts, vocab), x))


def _residual(d: Draw) -> Case:
    rows, vocab = d.int(1, 3), d.int(3, 6)
    return Case(f"{rows} rows", (d.chances(rows, vocab), d.chances(rows, vocab)))


def _chain(d: Draw) -> Case:
    gamma, vocab = d.int(1, 4), d.int(3, 6)
    drafts = [d.int(0, vocab - 1) for _ in range(gamma)]
    uniforms = [d.float(0.001, 0.999) for _ in range(gamma + 1)]
    return Case(f"{gamma} drafts", (drafts, d.chances(gamma + 1, vocab), d.chances(gamma, vocab), uniforms))


def _rollback(d: Draw) -> Case:
    text, drafts = [d.int(1, 4) for _ in range(d.int(1, 8))], d.int(1, 6)  # few tokens, so that many repeat
    proposed = [d.int(1, 4) for _ in range(drafts)]
    accepted = d.int(0, drafts)
    target, draft = [*text, *proposed], [*text, *proposed[:-1]]
    return Case(f"{accepted} of {drafts} accepted", (target, draft, drafts, accepted))


def _expected(d: Draw) -> Case:
    return Case("other chances", ([d.float(0.05, 0.95) for _ in range(d.int(2, 6))],))


def _best_gamma(d: Draw) -> Case:
    longest = d.int(2, 6)
    verify = [1.0]
    for _ in range(longest):
        verify.append(round(verify[-1] + d.float(0.0, 0.3), 3))
    return Case(f"at most {longest} drafts", ([d.float(0.3, 0.95) for _ in range(longest)], d.float(0.01, 0.4), verify))


def _ngram(d: Draw) -> Case:
    tokens = [d.int(1, 4) for _ in range(d.int(6, 14))]
    shortest = d.int(1, 2)
    return Case(f"a text of {len(tokens)} tokens", (tokens, shortest, shortest + d.int(0, 2), d.int(1, 5)))


def _tree(d: Draw) -> Case:
    parents = sorted(d.int(-1, i - 1) for i in range(d.int(3, 7)))
    return Case(f"{len(parents)} drafts", ([min(parent, i - 1) for i, parent in enumerate(parents)],))


def _choose(d: Draw) -> Case:
    survival = []
    for _ in range(d.int(1, 3)):
        chances, left = [], 1.0
        for _ in range(d.int(2, 3)):
            left *= d.float(0.3, 0.95)
            chances.append(left)
        survival.append(chances)
    seconds = [1.0]
    for _ in range(sum(map(len, survival))):
        seconds.append(round(seconds[-1] + d.float(0.02, 0.5), 3))
    return Case(f"{len(survival)} requests", (survival, seconds))


def _distil(d: Draw) -> Case:
    rows, vocab = d.int(2, 4), d.int(3, 8)
    return Case(f"{rows} rows of {vocab} tokens", (d.normal(rows, vocab), d.normal(rows, vocab)))


def _shape(d: Draw) -> Shape:
    return Shape(d.float(50, 900), d.float(50, 900), d.float(1, 9), d.float(1, 30))


def _step(d: Draw) -> Case:
    machine = Machine(d.float(100, 3000), d.float(10, 900))
    return Case("another machine", (d.int(1, 8), d.int(1, 6), d.int(1, 300), _shape(d), machine))


def _break_even(d: Draw) -> Case:
    return Case("another machine", (d.int(1, 8), _shape(d), Machine(d.float(900, 3000), d.float(10, 90))))


def _sink(d: Draw) -> Case:
    size, blocks = d.int(2, 6), d.int(3, 8)
    tokens = d.int(size * (blocks - 1) + 1, size * blocks)
    return Case(f"{tokens} tokens in blocks of {size}", (d.some(range(20), blocks), tokens, size, d.int(1, blocks)))


def _snapkv(d: Draw) -> Case:
    size, count = d.int(2, 3), d.int(3, 6)
    attention = d.chances(d.int(1, 3), size * count)
    return Case(f"{count} blocks of {size}", (attention, size, count, d.int(1, count)))


def _levels(d: Draw) -> Case:
    rows, columns = d.int(1, 3), d.int(2, 5)
    scale, zero = d.normal(rows, 1).abs() + 0.3, d.integers(0, 9, rows, 1).float()
    x = zero + d.normal(rows, columns).abs() * 9 % 15 * scale
    return Case(f"{rows} rows", (x, scale, zero))


def _channels(d: Draw) -> Case:
    width, kv = d.int(4, 9), d.int(1, 3)
    queries, keys = d.normal(d.int(1, 6), kv * d.int(1, 3), width), d.normal(d.int(1, 9), kv, width)
    return Case(f"{kv} KV heads of {width} channels", (queries, keys, d.int(1, width - 1)))


def _low_rank(d: Draw) -> Case:
    kv, width = d.int(1, 2), d.int(2, 4)
    hidden, group, rank = kv * width + d.int(0, 4), d.int(1, 2), d.int(1, width)
    weight = d.normal(kv * width, hidden)
    while _singular_values_are_near(weight, rank):
        weight = d.normal(kv * width, hidden)
    return Case(f"{kv} KV heads, {hidden} inputs", (weight, d.normal(kv * group, hidden, width), rank))


def _singular_values_are_near(weight: Tensor, rank: int) -> bool:
    """Whether float32 is too coarse for the first `rank` singular vectors, as it is where two values nearly agree."""
    values = torch.linalg.svdvals(weight)[: rank + 1]
    return bool((values[:-1] - values[1:] < 0.05 * values[0]).any())


def _commutation(d: Draw) -> Case:
    pairs = d.int(1, 4)
    frequencies = d.normal(pairs).abs() + 0.05
    return Case(
        f"{2 * pairs} channels", (d.normal(2 * pairs, 2 * pairs), frequencies, d.some(range(1, 40), d.int(1, 4)))
    )


def _centres(d: Draw) -> Case:
    width, count = 2 * d.int(1, 5), d.int(1, 7)
    return Case(f"{count} centres of {width} channels", (d.normal(width), d.normal(count, width)))


def _clusters(d: Draw) -> Case:
    width, count = d.int(2, 8), d.int(3, 20)
    sizes = d.integers(1, 9, count).float()
    return Case(f"{count} clusters", (d.normal(d.int(1, 4), width), d.normal(count, width), sizes, d.float(0.2, 1.8)))


def _load_or_compute(d: Draw) -> Case:
    bandwidth, seconds = d.int(1000, 9000), d.float(0.3, 2.0)
    return Case("another link", (d.int(200, 2000), bandwidth, d.float(0.5, 9.0), seconds))


def _split(d: Draw) -> Case:
    kv = d.int(8, 90)
    share = d.float(0.1, 0.99) if d.int(0, 5) else d.float(1.01, 1.2)  # at 1 splits are equal but for rounding
    return Case("another link", (d.int(5, 60), kv, share * kv, d.float(1, 90), d.float(0.1, 3.0)))


def _rerotate(d: Draw) -> Case:
    pairs = d.int(1, 5)
    keys = d.normal(d.int(1, 4), d.int(1, 3), 2 * pairs)
    return Case(f"heads of {2 * pairs} channels", (keys, d.normal(pairs).abs(), d.int(-60, 60)))


def _entry(d: Draw) -> Case:
    wanted = Key("util.py", "import os", d.int(1, 90), "base", "float32", 1)
    stored = [replace(wanted, start=0, before=NOTHING), replace(wanted, before="import re", start=d.int(91, 180))]
    stored += [replace(wanted, text="main.py"), replace(wanted, model="fine-tuned"), replace(wanted, format=2)]
    stored += [wanted] * d.int(0, 1)
    return Case("other entries", (d.some(stored, d.int(1, len(stored))), wanted))


_MARKS = (
    "RequestAdded",
    "StepStarted",
    "StepRan prefill",
    "Committing",
    "Detokenised",
    "TokensCommitted",
    "StepFinished",
)


def _attribute(d: Draw) -> Case:
    time = d.int(0, 64) / 8  # what the clock showed
    marks = [(time, ("Start", "StepRan prefill")[d.int(0, 1)])]
    for name in _MARKS:
        time += d.int(1, 64) / 8
        marks.append((time, name))
    return Case("other times", (marks,))


def _seconds(d: Draw) -> Case:
    numbers = d.float(1, 90), d.float(1, 90), d.int(0, 30), d.float(5, 50), d.float(5, 50), d.float(0.01, 0.9)
    return Case("another step", numbers)


def _panel(d: Draw) -> Case:
    out, columns = d.int(3, 40), d.int(2, 12)
    weight, x = d.integers(-4, 4, out, columns).float(), d.integers(-4, 4, d.int(1, 2), columns).float()
    return Case(f"{out} outputs, {columns} inputs", (weight, x))


def _gamma(d: Draw) -> Case:
    verify = [1.0]
    for _ in range(d.int(2, 8)):
        verify.append(round(verify[-1] + d.float(0.0, 0.4), 3))
    return Case("other costs", (d.float(0.3, 0.95), d.float(0.01, 0.5), verify))


MAKERS: dict[str, Maker] = {
    "l10.accept_rule": _accept,
    "l10.residual": _residual,
    "l10.verify_chain": _chain,
    "l10.rollback": _rollback,
    "l11.expected_tokens": _expected,
    "l11.best_gamma": _best_gamma,
    "l11.ngram_propose": _ngram,
    "l11.tree_mask": _tree,
    "l11.choose_drafts": _choose,
    "l11.distil_loss": _distil,
    "l12.step_seconds": _step,
    "l12.break_even_context": _break_even,
    "l12.sink_view": _sink,
    "l12.snapkv_blocks": _snapkv,
    "l12.two_levels": _levels,
    "l13.kept_channels": _channels,
    "l13.low_rank": _low_rank,
    "l13.commutation_error": _commutation,
    "l13.absorb_centres": _centres,
    "l13.kept_clusters": _clusters,
    "l14.break_even_tokens": _load_or_compute,
    "l14.best_split": _split,
    "l14.rerotate": _rerotate,
    "l14.find_entry": _entry,
    "l15.attribute": _attribute,
    "l15.step_seconds": _seconds,
    "l15.panel_product": _panel,
    "l15.choose_gamma": _gamma,
}
