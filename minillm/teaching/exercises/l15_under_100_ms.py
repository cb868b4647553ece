"""Lesson 15, the capstone: the parts of a completion's time, the least time of a step, a product kernel, and γ."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.simd import LANES, fma, load, splat, store
from minillm.teaching.compare import close
from minillm.teaching.drives.l15 import product_with
from minillm.teaching.exercise import Attempt, Case, Exercise, WrongVersion
from minillm.teaching.exercises import _l15_slips
from minillm.teaching.exercises._facts import about_tensor
from minillm.teaching.latency import Marks
from minillm.teaching.source import edited, wrong_versions

PARTS = ("tokenise", "queue", "prefill", "draft", "target", "python", "detokenise")

# ---------------------------------------------------------------------------------------------------------- attribute


def attribute(marks: Marks) -> dict[str, float]:
    """Seconds of each of `PARTS`; they sum to the time from the first mark to the last.

    The time between two marks belongs to the part of the second mark. The first mark may have any name.
    """
    part_of = {
        "RequestAdded": "tokenise",
        "StepStarted": "queue",
        "StepRan prefill": "prefill",
        "DraftProposed": "draft",
        "StepRan decode": "target",
        "StepRan verify": "target",
        "Detokenised": "detokenise",
    }
    parts = dict.fromkeys(PARTS, 0.0)
    for (began, _), (ended, name) in itertools.pairwise(marks):
        parts[part_of.get(name, "python")] += ended - began
    return parts


def _marks(*steps: tuple[float, str], start: float = 0.0) -> Marks:
    """Marks from the reading of the clock at the start, and (seconds since the previous mark, name)."""
    began, *ends = itertools.accumulate((seconds for seconds, _ in steps), initial=start)
    return [(began, "Start"), *((end, name) for end, (_, name) in zip(ends, steps, strict=True))]


_CALL = ((1.0, "RequestAdded"), (0.5, "StepStarted"))
_TOKEN = ((0.25, "Committing"), (0.125, "Detokenised"), (0.25, "TokensCommitted"), (0.25, "StepFinished"))


def _about_parts(attempt: Attempt) -> str | None:
    """Which parts have too much or too little, and whether the parts sum to the whole."""
    wanted, got, marks = attempt.expected, attempt.got, attempt.case.args[0]
    if set(wanted) != set(got):
        return f"the parts must be {', '.join(wanted)}; return all of them, also those that are 0.0"
    less = [part for part in wanted if got[part] < wanted[part] - 1e-9]
    more = [part for part in wanted if got[part] > wanted[part] + 1e-9]
    facts = [f"too little for {', '.join(less)}"] if less else []
    facts += [f"too much for {', '.join(more)}"] if more else []
    whole, summed = marks[-1][0] - marks[0][0], sum(got.values())
    facts += [f"the parts sum to {summed:g} s of {whole:g}"] if abs(summed - whole) > 1e-9 else []
    return "; ".join(facts) or None


_ATTRIBUTE = Exercise(
    name="l15.attribute",
    reference=attribute,
    cases=[
        Case("one step: the prompt, and a first token", (_marks(*_CALL, (8.0, "StepRan prefill"), *_TOKEN),)),
        Case(
            "a prompt in two chunks, then a token is decoded",
            (
                _marks(
                    *_CALL,
                    (8.0, "StepRan prefill"),
                    (0.25, "StepFinished"),
                    (0.125, "StepStarted"),
                    (4.0, "StepRan prefill"),
                    *_TOKEN,
                    (0.125, "StepStarted"),
                    (2.0, "StepRan decode"),
                    *_TOKEN,
                    (0.5, "RequestFinished"),
                    (0.25, "End"),
                    start=5.0,
                ),
            ),
        ),
        Case(
            "two rounds with drafts",
            (
                _marks(
                    *_CALL,
                    (0.5, "BlocksAllocated"),
                    (8.0, "StepRan prefill"),
                    *_TOKEN,
                    (0.125, "StepStarted"),
                    (1.0, "DraftProposed"),
                    (3.0, "StepRan verify"),
                    *_TOKEN,
                    (0.125, "StepStarted"),
                    (0.5, "DraftProposed"),
                    (3.0, "StepRan verify"),
                    *_TOKEN,
                    (0.25, "End"),
                ),
            ),
        ),
        Case("only a start", ([(5.0, "Start")],)),
        Case(
            "the clock starts after the prompt",
            ([(3.0, "StepRan prefill"), (3.25, "Committing"), (3.375, "Detokenised"), (3.5, "TokensCommitted")],),
        ),
    ],
    hints=(
        "Look at two consecutive marks. Which of the two says what the time between them was used for?",
        "The time before `StepRan decode` is the time of that forward. So for each pair of consecutive marks, add the "
        "time between them to the part of the second mark. Names that are not in the table belong to python.",
        "The shape of it:\n"
        'parts = dict.fromkeys(["tokenise", "queue", "prefill", "draft", "target", "python", "detokenise"], 0.0)\n'
        "for (began, _), (ended, name) in itertools.pairwise(marks):\n"
        "    parts[…] += …\n"
        "return parts",
        "The whole of it:\n"
        'parts = dict.fromkeys(["tokenise", "queue", "prefill", "draft", "target", "python", "detokenise"], 0.0)\n'
        "for (began, _), (ended, name) in itertools.pairwise(marks):\n"
        '    parts[PART_OF.get(name, "python")] += ended - began\n'
        "return parts",
    ),
    wrong=wrong_versions(attribute, _l15_slips.ATTRIBUTE),
    fallback_diagnosis=_about_parts,
)

# ------------------------------------------------------------------------------------------------------- step_seconds


def step_seconds(
    num_bytes: float, operations: float, calls: int, bandwidth: float, rate: float, seconds_per_call: float
) -> float:
    """The least time of a step: that of its calls, plus the slower of moving bytes and computing.

    With `calls` = 0 it is the floor of the roofline (Williams et al. 2009). On a CPU the thread that makes a call is
    the thread that does the work, so the times add up; on a GPU they overlap.
    """
    return calls * seconds_per_call + max(num_bytes / bandwidth, operations / rate)


def _about_step(attempt: Attempt) -> str | None:
    """What the time is too short for, or that it exceeds the sum of calls, bytes and operations."""
    num_bytes, operations, calls, bandwidth, rate, seconds_per_call = attempt.case.args
    alone = {
        "the calls": calls * seconds_per_call,
        "the bytes": num_bytes / bandwidth,
        "the operations": operations / rate,
    }
    short = [what for what, seconds in alone.items() if attempt.got < seconds - 1e-9]
    if short:
        return f"{attempt.got:g} s is too short for {' and '.join(short)} alone"
    if attempt.got > sum(alone.values()) + 1e-9:
        return f"{attempt.got:g} s is longer than the sum of calls, bytes and operations"
    way = "shorter" if attempt.got < attempt.expected else "longer"
    return f"{attempt.got:g} s is {way} than the calls plus the slower of bytes and operations"


_STEP = Exercise(
    name="l15.step_seconds",
    reference=step_seconds,
    cases=[
        Case("60 bytes at 20 per second, 10 operations at 10 per second, no calls", (60.0, 10.0, 0, 20.0, 10.0, 0.5)),
        Case("the same with four calls of half a second", (60.0, 10.0, 4, 20.0, 10.0, 0.5)),
        Case("many operations on few bytes: a prompt", (60.0, 100.0, 4, 20.0, 10.0, 0.5)),
        Case("a tiny model: the calls take most of the time", (1.0, 1.0, 100, 20.0, 10.0, 0.5)),
        Case("another machine: slower memory, faster arithmetic, short calls", (60.0, 100.0, 3, 5.0, 80.0, 0.25)),
        Case("a third machine: fast memory, slow arithmetic, long calls", (60.0, 100.0, 3, 40.0, 2.0, 4.0)),
    ],
    hints=(
        "There are three times: for the bytes, the operations and the calls. Which of them overlap?",
        "The processor loads the next weights while it multiplies the current ones: the slower of bytes and operations "
        "counts (`max`). The same thread makes the calls and does the work, so the time of the calls is added.",
        "return … * seconds_per_call + max(num_bytes / …, operations / …)",
        "return calls * seconds_per_call + max(num_bytes / bandwidth, operations / rate)",
    ),
    wrong=wrong_versions(step_seconds, _l15_slips.STEP),
    fallback_diagnosis=_about_step,
)

# ------------------------------------------------------------------------------------------------------ panel_product

ZERO = np.float32(0)


@njit(**OPTIONS)
def panel_product(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Write W x to `y`. `panels`: W `[out, columns]` in the layout of `minillm.ops.cpu.panels.pack`, flat; `x`:
    `[columns]`; `y`: `[out, padded to a multiple of sixteen]`, overwritten; all float32.

    One load fetches one weight for each of sixteen outputs; one element of x multiplies all of them.
    """
    columns = len(x)
    for panel in range(len(y) // LANES):
        sums = splat(ZERO)
        for k in range(columns):
            sums = fma(load(panels, (panel * columns + k) * LANES), splat(x[k]), sums)
        store(y, panel * LANES, sums)


def _panel_with(edit: tuple[str, str]) -> Callable[..., Any]:
    """`panel_product` with one edit of its source, not compiled."""
    return edited(panel_product.py_func, edit).py_func


def _product_cases() -> list[Case]:
    def numbers(*shape: int) -> Tensor:
        """Small integers: every order of summing gives the same result, and a counterexample can be checked by hand."""
        return torch.arange(1, 1 + int(np.prod(shape))).float().reshape(shape) % 7 - 2

    draw = torch.Generator().manual_seed(0)
    return [
        Case("two outputs, one input", (numbers(2, 1), torch.tensor([[3.0]]))),
        Case("sixteen outputs, three inputs: one panel", (numbers(16, 3), numbers(1, 3))),
        Case("twenty outputs: the second panel is partly filled", (numbers(20, 5), numbers(1, 5))),
        Case("two rows of x, one after the other", (numbers(33, 17), numbers(2, 17))),
        Case(
            "131 outputs, 97 inputs, random",
            (torch.randn(131, 97, generator=draw), torch.randn(1, 97, generator=draw)),
        ),
        Case("every array ends where its memory ends", (numbers(20, 5), numbers(1, 5), True)),
    ]


_PRODUCT = Exercise(
    name="l15.panel_product",
    reference=panel_product,
    cases=_product_cases,
    hints=(
        "A panel holds the weights of sixteen outputs. What must you add to their sums for each element of x, and "
        "where does column k of panel p begin?",
        "Column k of panel p begins at (p * columns + k) * LANES. Start each panel with sums = splat(ZERO), add "
        "load(panels, …) times splat(x[k]) with fma for every k, and store the sums at p * LANES.",
        "The shape of it. There are len(y) // LANES panels:\n"
        "columns = len(x)\n"
        "for panel in range(…):\n"
        "    sums = splat(ZERO)\n"
        "    for k in range(columns):\n"
        "        sums = fma(load(panels, …), splat(…), sums)\n"
        "    store(y, …, sums)",
        "The whole of it:\n"
        "columns = len(x)\n"
        "for panel in range(len(y) // LANES):\n"
        "    sums = splat(ZERO)\n"
        "    for k in range(columns):\n"
        "        sums = fma(load(panels, (panel * columns + k) * LANES), splat(x[k]), sums)\n"
        "    store(y, panel * LANES, sums)",
    ),
    wrong=(
        *(WrongVersion(mistake, _panel_with(edit)) for mistake, edit in _l15_slips.PANEL.items()),
        WrongVersion(
            "loops over one panel per output; a panel has sixteen outputs",
            _panel_with(_l15_slips.PANEL_PER_OUTPUT),
            expected_message="outside of y",
        ),
    ),
    compare=close(1e-4, 1e-3),
    fallback_diagnosis=lambda attempt: about_tensor(attempt.expected, attempt.got, ("row of x", "output")),
    run_case=product_with,
)

# ------------------------------------------------------------------------------------------------------- choose_gamma


def choose_gamma(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    """The number of draft tokens per round that makes decoding fastest, the smallest of equals; 0: do not draft.

    `acceptance` (a): probability that a draft token is accepted if those before it were. `draft_cost` (c): seconds per
    draft token, divided by those of a plain step. `verify_costs[g]` (v): seconds of a step that verifies g draft
    tokens, divided by those of a plain step; the first is 1. A round of g draft tokens gains 1 + a + … + aᵍ tokens and
    takes g·c + v plain steps (Leviathan et al. 2023, theorem 3.8, with v instead of 1).
    """

    def speed_up(gamma: int) -> float:
        tokens = sum(acceptance**i for i in range(gamma + 1))
        return tokens / (gamma * draft_cost + verify_costs[gamma])

    return max(range(len(verify_costs)), key=speed_up)


def _about_gamma(attempt: Attempt) -> str | None:
    """The speed of the chosen number of draft tokens and that of the best."""
    acceptance, draft_cost, verify_costs = attempt.case.args
    if not 0 <= attempt.got < len(verify_costs):
        return f"{attempt.got} draft tokens: verify_costs has the costs of 0 to {len(verify_costs) - 1}"
    speeds = [sum(acceptance**i for i in range(g + 1)) / (g * draft_cost + cost) for g, cost in enumerate(verify_costs)]
    mine, best = speeds[attempt.got], speeds[attempt.expected]
    return f"{attempt.got} draft tokens give {mine:.3g} tokens per plain step, {attempt.expected} give {best:.3g}"


_FREE = [1.0] * 9
_GAMMA = Exercise(
    name="l15.choose_gamma",
    reference=choose_gamma,
    cases=[
        Case("cheap draft tokens, often accepted; verifying is free", (0.8, 0.05, _FREE)),
        Case("the same, but every verified token makes the step longer", (0.8, 0.05, [1 + 0.2 * g for g in range(9)])),
        Case("half of the draft tokens are accepted", (0.5, 0.1, _FREE)),
        Case("a draft token costs a quarter of a step", (0.8, 0.25, _FREE)),
        Case("a draft token costs as much as a step of the target", (0.9, 1.0, _FREE)),
        Case("cheap draft tokens, but verifying one doubles the step", (0.6, 0.1, [1.0, 2.0, 2.2, 2.4, 2.6])),
        Case("verifying four takes as long as verifying one", (0.6, 0.1, [1.0, 1.5, 1.5, 1.5, 1.5])),
        Case("nothing can be verified", (0.9, 0.1, [1.0])),
        Case("draft tokens are never accepted and cost nothing: all numbers are equal", (0.0, 0.0, _FREE)),
        Case("draft tokens are always accepted", (1.0, 0.05, _FREE)),
        Case("draft tokens cost nothing, and verifying two is faster than verifying one", (0.1, 0.0, [1.0, 1.5, 1.1])),
        Case("verifying takes far longer with every draft token", (0.9, 0.0, [1.0, 8.0, 27.0, 64.0])),
        Case("verifying six takes as long as verifying five", (0.85, 0.05, [1.0, 1.1, 1.2, 1.3, 1.4, 1.8, 1.8])),
    ],
    hints=(
        "How many tokens does a round of g draft tokens gain on average, and how many plain steps does it take?",
        "Tokens: 1 + a + a² + … + a^g, because draft token i counts only if all before it were accepted, and the "
        "target always adds one token. Time: g·c + v[g]. Compare tokens / time for every g from 0.",
        "The shape of it (`max` keeps the first of equals):\n"
        "def speed_up(gamma):\n"
        "    tokens = sum(… for i in range(gamma + 1))\n"
        "    return tokens / (…)\n"
        "return max(range(len(verify_costs)), key=speed_up)",
        "The whole of it:\n"
        "def speed_up(gamma):\n"
        "    tokens = sum(acceptance**i for i in range(gamma + 1))\n"
        "    return tokens / (gamma * draft_cost + verify_costs[gamma])\n"
        "return max(range(len(verify_costs)), key=speed_up)",
    ),
    wrong=wrong_versions(choose_gamma, _l15_slips.GAMMA),
    fallback_diagnosis=_about_gamma,
)

EXERCISES = [_ATTRIBUTE, _STEP, _PRODUCT, _GAMMA]
