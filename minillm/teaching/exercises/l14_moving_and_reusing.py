"""Lesson 14, moving and reusing the cache: load or compute, a split transfer, moved keys, what may be used."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises import _l14_mistakes as mistakes
from minillm.teaching.exercises._facts import about_tensor
from minillm.teaching.exercises._l14_reference import best_split, break_even_tokens, find_entry, rerotate
from minillm.teaching.source import body_of
from minillm.teaching.workshop.l14_store import NOTHING, Key


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _about_break_even(attempt: Attempt) -> str | None:
    kv_bytes, bandwidth, latency, seconds_per_token = attempt.case.args
    got = attempt.got
    if not _is_number(got):
        return None
    if got < 0:
        return "a number of tokens cannot be negative; return math.inf where loading is never faster"
    if math.isinf(got) != math.isinf(attempt.expected):
        return "math.inf means that loading is never faster: a token takes at least as long to load as to compute"
    load, compute = latency + got * kv_bytes / bandwidth, got * seconds_per_token
    which, when = ("loading", "already") if load < compute else ("computing", "still")
    return f"{got:g} tokens take {load:g} s to load and {compute:g} s to compute, so {which} is {when} faster"


_BREAK_EVEN = Exercise(
    name="l14.break_even_tokens",
    reference=break_even_tokens,
    cases=[
        Case("loading a token takes a quarter of computing it", (1024, 4096, 3.0, 1.0)),
        Case("half of it, and the result is no whole number", (1024, 2048, 1.25, 1.0)),
        Case("a faster processor: more tokens are needed", (1024, 4096, 3.0, 0.5)),
        Case("nothing to wait for: loading is faster from the first token on", (1024, 4096, 0.0, 1.0)),
        Case("loading a token takes as long as computing it", (1024, 1024, 3.0, 1.0)),
        Case("loading a token takes longer than computing it", (1024, 512, 3.0, 1.0)),
        Case("a very fast link: what counts is the latency", (1024, 2**40, 3.0, 0.5)),
        Case("a token saves hardly anything", (1000, 1000, 1.0, 1.0078125)),
        Case("nothing to wait for, but loading takes longer", (1024, 512, 0.0, 1.0)),
    ],
    hints=(
        "What does one token save if it is loaded instead of computed? How many of them pay for the latency?",
        "A token takes kv_bytes / bandwidth seconds on the link. It saves seconds_per_token less that. Divide the "
        "latency by it. If nothing is saved, no number of tokens is enough: math.inf.",
        "saved = seconds_per_token - …\nreturn … / saved if saved > 0 else …",
        body_of(break_even_tokens),
    ),
    wrong=mistakes.BREAK_EVEN,
    fallback_diagnosis=_about_break_even,
)


def _about_split(attempt: Attempt) -> str | None:
    count, kv_bytes, hidden_bytes, bandwidth, seconds_per_token = attempt.case.args
    got = attempt.got
    if not isinstance(got, int | np.integer) or isinstance(got, bool):
        return "return a whole number of tokens, an int"
    if not 0 <= got <= count:
        return f"of {count} tokens, {got} cannot be recomputed"

    def seconds(split: int) -> float:
        rest = (count - split) * kv_bytes / bandwidth
        return split * hidden_bytes / bandwidth + max(split * seconds_per_token, rest)

    if seconds(got) == seconds(attempt.expected):
        return "of splits that take equally long, the one that recomputes the fewest tokens is wanted"
    best = attempt.expected
    return f"recomputing {got} takes {seconds(got):g} s, recomputing {best} only {seconds(best):g} s"


_SPLIT = Exercise(
    name="l14.best_split",
    reference=best_split,
    cases=[
        Case("computing is as fast as the link", (12, 8, 4, 8, 1)),
        Case("a slow link: more is recomputed", (9, 8, 1, 2, 1)),
        Case("a fast link: less is recomputed", (12, 8, 4, 40, 1)),
        Case("the upper of the two whole numbers is better", (7, 8, 1, 2, 1)),
        Case("the upper one is better, although the lower is nearer", (14, 8, 0.5, 1, 1)),
        Case("two splits take equally long", (12, 8, 4, 2, 1)),
        Case("activations as large as keys and values", (12, 8, 8, 8, 1)),
        Case("activations larger than keys and values: grouped-query attention", (12, 8, 12, 8, 1)),
        Case("activations a little smaller: the lower one is better, although the upper is nearer", (4, 8, 7, 8, 0.5)),
        Case("activations much smaller than the keys alone", (12, 8, 2, 8, 1)),
        Case("computing takes next to no time", (12, 8, 4, 8, 2**-20)),
        Case("computing takes very long", (12, 8, 4, 8, 1024)),
        Case("one token", (1, 8, 4, 8, 0.25)),
        Case("many tokens", (1000, 24_576, 12_288, 1e8, 1e-4)),
    ],
    hints=(
        "While l grows, which of the two times in the maximum grows, and which falls? Where is the longer one least?",
        "If hidden_bytes ≥ kv_bytes, an activation takes at least as long to send as it saves: 0. Otherwise both times "
        "are equal at l = num_tokens · kv_bytes / (seconds_per_token · bandwidth + kv_bytes). Take the better of the "
        "two whole numbers around it. Or compute T for each l from 0 to num_tokens, and take the least.",
        "if …:\n    return 0\nbalance = …\n\ndef seconds(split):\n    rest = …\n    return … + max(…, rest)\n\n"
        "return min(math.floor(balance), math.ceil(balance), key=seconds)",
        "import math\n" + body_of(best_split),
    ),
    wrong=mistakes.SPLIT,
    fallback_diagnosis=_about_split,
)


def _about_keys(attempt: Attempt) -> str | None:
    got = attempt.got
    if not isinstance(got, Tensor) or got.shape != attempt.expected.shape:
        return None
    lengths = (attempt.case.args[0].norm(dim=-1), got.float().norm(dim=-1))
    if not torch.allclose(*lengths, rtol=1e-3, atol=1e-4):
        return "a rotation keeps the length of every key, and here lengths change"
    return about_tensor(attempt.expected, got, ("token", "head", "channel"))


def _key_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(14)
    half, quarter = math.pi / 2, math.pi / 4
    one = torch.tensor([[[1.0, 0.0]]])
    four = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])

    def keys(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    frequencies = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    return [
        Case("one pair, a quarter turn per position, one position", (one, torch.tensor([half]), 1)),
        Case("an eighth of a turn per position, two positions back", (one, torch.tensor([quarter]), -2)),
        Case("two pairs: channels 0 and 2, 1 and 3", (four, torch.tensor([half, 0.0]), 1)),
        Case("two pairs with different angles", (four, torch.tensor([half, quarter]), 3)),
        Case("not moved at all", (four, torch.tensor([half, quarter]), 0)),
        Case("three tokens, two heads of eight channels", (keys(3, 2, 8), frequencies, 5)),
        Case("the same moved back", (keys(3, 2, 8), frequencies, -7)),
        Case("far away", (keys(2, 1, 8), frequencies, 200)),
        Case("all layers at once: one more dimension", (keys(2, 3, 2, 8), frequencies, 11)),
    ]


_ROTATE = Exercise(
    name="l14.rerotate",
    reference=rerotate,
    cases=_key_cases,
    hints=(
        "A key at position p is already rotated by p · frequency. Which further angle brings it to p + delta?",
        "For each pair the angle is delta · frequency. Split the last dimension into two halves: channel i of the "
        "first belongs to channel i of the second. Rotate the pair (x, y) to (x cos - y sin, y cos + x sin).",
        "angles = …\ncos, sin = angles.cos(), angles.sin()\nfirst, second = keys.chunk(2, dim=-1)\n"
        "return torch.cat((…, …), dim=-1)",
        "import torch\n" + body_of(rerotate),
    ),
    wrong=mistakes.ROTATE,
    fallback_diagnosis=_about_keys,
)


def _about_entry(attempt: Attempt) -> str | None:
    entries, wanted = attempt.case.args
    got, expected = attempt.got, attempt.expected
    if got is None:
        return f"entry {expected[0]} can be used" if expected else None
    if not (isinstance(got, tuple) and len(got) == 3):
        return "return None, or three values: an index, a number of positions, and whether the entry is exact"
    index, shift, exact = got
    if not isinstance(index, int | np.integer) or not 0 <= index < len(entries):
        if expected is None:
            return "no entry can be used: return None"
        return f"there is no entry {index}: the entries are 0 to {len(entries) - 1}"
    entry = entries[index]
    for name in ("text", "model", "dtype", "format"):
        if getattr(entry, name) != getattr(wanted, name):
            return f"entry {index} has the {name} {getattr(entry, name)!r}; {getattr(wanted, name)!r} is wanted"
    if not isinstance(exact, bool | np.bool_):
        return "the third value is True or False: whether the entry is exact"
    if exact != (entry.before == wanted.before):
        return f"entry {index} is {'exact' if not exact else 'not exact'}: compare the tokens before it"
    if entry.start + shift != wanted.start:
        where = f"moved by {shift} it is at {entry.start + shift}, not at {wanted.start}"
        return f"entry {index} begins at {entry.start}; {where}"
    return f"entry {index} can be used, but entry {expected[0]} is to be preferred"


_ALONE = Key("read.py", NOTHING, 0, "base", "float32", 1)
_WANTED = replace(_ALONE, before="import os", start=40)
_OTHERS = {
    "text": "write.py",
    "model": "fine-tuned",
    "dtype": "int8",
    "format": 2,
}


def _entry_cases() -> list[Case]:
    there = replace(_WANTED)
    cases = [
        Case("stored at the beginning, wanted at the beginning", ([_ALONE], _ALONE)),
        Case("stored at the beginning, wanted at position 40", ([_ALONE], _WANTED)),
        Case("stored at position 40, wanted at the beginning", ([_WANTED], _ALONE)),
        Case("an empty store", ([], _WANTED)),
    ]
    for name, other in _OTHERS.items():
        entry = replace(_ALONE, **{name: other})
        cases.append(Case(f"another {name}", ([entry], _WANTED)))
        misleading = [replace(there, **{name: other}), _ALONE]
        cases.append(Case(f"another {name} in the same place, and a later entry fits", (misleading, _WANTED)))
    elsewhere = replace(_WANTED, before="import re")
    cases += [
        Case("the same position after another text of the same length", ([elsewhere], _WANTED)),
        Case("the same after another text, and exactly the same later", ([elsewhere, _ALONE, there], _WANTED)),
        Case("two exact entries", ([replace(_ALONE, text="x"), there, there], _WANTED)),
        Case(
            "two usable entries at other positions",
            ([replace(_ALONE, model="x"), replace(_WANTED, before="import sys", start=90), _ALONE], _WANTED),
        ),
        Case("the same two in the other order", ([_ALONE, replace(_WANTED, before="import sys", start=90)], _WANTED)),
        Case("a usable entry, and one in the same place after another text", ([_ALONE, elsewhere], _WANTED)),
        Case("a shift backwards", ([replace(_WANTED, before="a long text", start=300)], _WANTED)),
        Case("nothing fits", ([replace(_ALONE, **{name: other}) for name, other in _OTHERS.items()], _WANTED)),
        Case("exact, but of another model", ([replace(there, model="fine-tuned")], _WANTED)),
    ]
    return cases


_ENTRY = Exercise(
    name="l14.find_entry",
    reference=find_entry,
    cases=_entry_cases,
    hints=(
        "Which of the six fields must be equal? Which one decides whether the numbers are exactly those that the model "
        "would compute? Which one can be repaired?",
        "An entry is usable if text, model, dtype and format are equal. Of the usable ones take the first with the "
        "same `before`: shift 0, exact. If there is none, take the first: its keys move by "
        "wanted.start - entry.start, and it is not exact. If none is usable: None.",
        "same = (wanted.text, wanted.model, …)\nusable = [i for i, e in enumerate(entries) if (…) == same]\n"
        "for i in usable:\n    if …:\n        return i, 0, True\nreturn (usable[0], …, False) if usable else None",
        body_of(find_entry),
    ),
    wrong=mistakes.ENTRY,
    fallback_diagnosis=_about_entry,
    parts=("index", "shift", "exact"),
)

EXERCISES = [_BREAK_EVEN, _SPLIT, _ROTATE, _ENTRY]
