"""Lesson 15, the capstone: where the time of a completion goes, what it must take, a kernel of one's own, which γ."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.core.errors import NumbaError
from torch import Tensor

from minillm.errors import LessonError
from minillm.llm import LLM
from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.panels import pack
from minillm.ops.cpu.simd import LANES, fma, load, splat, store
from minillm.outputs import RequestOutput
from minillm.sampling import SamplingParams
from minillm.teaching.exercise import Case, Exercise, WrongVersion
from minillm.trace import Event, StepRan

Marks = list[tuple[float, str]]
PARTS = ("tokenise", "queue", "prefill", "draft", "target", "python", "detokenise")

# ------------------------------------------------------------------------------------------------- recording a request


class _Watched:
    """A detokenizer that says when it begins and when it is done."""

    def __init__(self, inner: Any, mark: Callable[[str], None]) -> None:
        self._inner, self._mark = inner, mark

    def append(self, token_id: int) -> str:
        """See `minillm.tokenizer.Detokenizer.append`."""
        self._mark("Committing")
        text: str = self._inner.append(token_id)
        self._mark("Detokenised")
        return text

    def flush(self) -> str:
        """See `minillm.tokenizer.Detokenizer.flush`."""
        self._mark("Committing")
        text: str = self._inner.flush()
        self._mark("Detokenised")
        return text


def record(
    llm: LLM, prompt: str, params: SamplingParams, clock: Callable[[], float] = time.perf_counter
) -> tuple[Marks, RequestOutput]:
    """Complete one prompt and note what the clock said at each event of the engine.

    A mark is (seconds, what had just happened): `Start`; the names of the engine's events, of `StepRan` with the kind
    of its work (`StepRan prefill`, `StepRan decode`, `StepRan verify`); `Committing` and `Detokenised` around each
    token that becomes text; `End`. Raises `LessonError` for `n` above 1, whose steps belong to several completions.
    """
    if params.n != 1:
        raise LessonError(f"n={params.n} completions share their steps, whose time cannot be told apart; use n=1")
    marks: Marks = []

    def mark(name: str) -> None:
        marks.append((clock(), name))

    def note(event: Event) -> None:
        mark(f"StepRan {event.work[0].kind}" if isinstance(event, StepRan) else type(event).__name__)

    llm.engine.listeners.append(note)
    try:
        mark("Start")
        [request] = llm.submit(prompt, params)
        if request.detokenizer is not None:
            request.detokenizer = _Watched(request.detokenizer, mark)
        while not request.finished:
            llm.engine.step()
        output = llm.llm_engine.output([request])
        mark("End")
    finally:
        llm.engine.listeners.remove(note)
    return marks, output


# ---------------------------------------------------------------------------------------------------------- attribute


def attribute(marks: Marks) -> dict[str, float]:
    """Seconds of each of `PARTS`; together they are the time from the first mark to the last.

    The time between two marks belongs to what the second one says has happened.
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


def _by_what_came_before(marks: Marks) -> dict[str, float]:
    shifted = [(now, before) for (now, _), (_, before) in zip(marks[1:], marks, strict=False)]
    return attribute([marks[0], *shifted])


def _drops_the_rest(marks: Marks) -> dict[str, float]:
    return {**attribute(marks), "python": 0.0}


def _first_forward_only(marks: Marks) -> dict[str, float]:
    first = next((i for i, (_, name) in enumerate(marks) if name.startswith("StepRan")), 0)
    changed = [
        (at, name.split()[0] + (" prefill" if i == first else " decode") if name.startswith("StepRan") else name)
        for i, (at, name) in enumerate(marks)
    ]
    return attribute(changed)


def _last_wins(marks: Marks) -> dict[str, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    for one, other in itertools.pairwise(marks):
        parts |= {part: seconds for part, seconds in attribute([one, other]).items() if seconds}
    return parts


def _draft_is_target(marks: Marks) -> dict[str, float]:
    parts = attribute(marks)
    return {**parts, "target": parts["target"] + parts["draft"], "draft": 0.0}


def _marks(*steps: tuple[float, str]) -> Marks:
    """Marks from the seconds that each took."""
    ends = itertools.accumulate(seconds for seconds, _ in steps)
    return [(0.0, "Start"), *((end, name) for end, (_, name) in zip(ends, steps, strict=True))]


_CALL = ((1.0, "RequestAdded"), (0.5, "StepStarted"))
_TOKEN = ((0.25, "Committing"), (0.125, "Detokenised"), (0.25, "TokensCommitted"), (0.25, "StepFinished"))

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
        Case("nothing but a start", ([(5.0, "Start")],)),
    ],
    hints=(
        "Look at two marks that follow each other. Which of the two says what the time between them was used for?",
        "The time before `StepRan decode` is the time of that forward. So: for each neighbouring pair, add (second "
        "minus first) to the part of the second's name. Names that are not in the table are python.",
        "for (began, _), (ended, name) in itertools.pairwise(marks): "
        'parts[PART_OF.get(name, "python")] += ended - began',
    ),
    wrong=(
        WrongVersion(
            "credits the time to the mark that it begins with, not to the one it ends with", _by_what_came_before
        ),
        WrongVersion("leaves out what is not in the table, so that the parts do not sum to the whole", _drops_the_rest),
        WrongVersion("takes the first forward for the whole prompt, which may come in chunks", _first_forward_only),
        WrongVersion("keeps the last time of each part instead of adding them up", _last_wins),
        WrongVersion("counts drafting as part of the target", _draft_is_target),
    ),
)

# ------------------------------------------------------------------------------------------------------- step_seconds


def step_seconds(
    num_bytes: float, operations: float, calls: int, bandwidth: float, rate: float, seconds_per_call: float
) -> float:
    """What a step must take: its calls one by one, and beside them the slower of moving bytes and computing.

    With `calls` = 0 it is the floor of the roofline (Williams et al. 2009). On a CPU the thread that makes a call is
    the thread that does the work, so calls add to it; on a GPU they overlap.
    """
    return calls * seconds_per_call + max(num_bytes / bandwidth, operations / rate)


def _no_calls(
    num_bytes: float, operations: float, calls: int, bandwidth: float, rate: float, seconds_per_call: float
) -> float:
    return max(num_bytes / bandwidth, operations / rate)


def _adds_all(
    num_bytes: float, operations: float, calls: int, bandwidth: float, rate: float, seconds_per_call: float
) -> float:
    return calls * seconds_per_call + num_bytes / bandwidth + operations / rate


def _calls_overlap(
    num_bytes: float, operations: float, calls: int, bandwidth: float, rate: float, seconds_per_call: float
) -> float:
    return max(calls * seconds_per_call, num_bytes / bandwidth, operations / rate)


def _faster_of_both(
    num_bytes: float, operations: float, calls: int, bandwidth: float, rate: float, seconds_per_call: float
) -> float:
    return calls * seconds_per_call + min(num_bytes / bandwidth, operations / rate)


def _bytes_only(
    num_bytes: float, operations: float, calls: int, bandwidth: float, rate: float, seconds_per_call: float
) -> float:
    return calls * seconds_per_call + num_bytes / bandwidth


_STEP = Exercise(
    name="l15.step_seconds",
    reference=step_seconds,
    cases=[
        Case("60 bytes at 20 a second, 10 operations at 10 a second, no calls", (60.0, 10.0, 0, 20.0, 10.0, 0.5)),
        Case("the same in four calls of half a second", (60.0, 10.0, 4, 20.0, 10.0, 0.5)),
        Case("many operations on few bytes: a prompt", (60.0, 100.0, 4, 20.0, 10.0, 0.5)),
        Case("a tiny model: the calls are most of it", (1.0, 1.0, 100, 20.0, 10.0, 0.5)),
    ],
    hints=(
        "Three times: for the bytes, for the operations, for the calls. Which of them happen at the same time?",
        "The processor fetches the next weights while it multiplies these: of bytes and operations the slower one "
        "counts. A call is work of the same thread before it begins, so the calls come on top.",
        "return calls * seconds_per_call + max(num_bytes / bandwidth, operations / rate)",
    ),
    wrong=(
        WrongVersion("forgets that every call costs something", _no_calls),
        WrongVersion("adds moving and computing, which overlap", _adds_all),
        WrongVersion("lets calls overlap with the work, as on a GPU; here one thread does both", _calls_overlap),
        WrongVersion("takes the faster of bytes and operations; the slower one decides", _faster_of_both),
        WrongVersion("looks at bytes only, though a prompt is short of arithmetic", _bytes_only),
    ),
)

# ------------------------------------------------------------------------------------------------------ panel_product

ZERO = np.float32(0)


@njit(**OPTIONS)
def panel_product(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """y = W x. `panels`: W `[out, columns]` as `minillm.ops.cpu.panels.pack` lays it, flat; `x`: `[columns]`;
    `y`: `[out padded to sixteen]`, overwritten; all float32.

    One load brings a weight each of sixteen outputs; one number of x multiplies all of them.
    """
    columns = len(x)
    for panel in range(len(y) // LANES):
        sums = splat(ZERO)
        for k in range(columns):
            sums = fma(load(panels, (panel * columns + k) * LANES), splat(x[k]), sums)
        store(y, panel * LANES, sums)


def _rows_of_the_matrix(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    columns = len(x)
    for panel in range(len(y) // LANES):
        sums = splat(ZERO)
        for k in range(columns):
            sums = fma(load(panels, panel * columns * LANES + k), splat(x[k]), sums)
        store(y, panel * LANES, sums)


def _last_column(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    columns = len(x)
    for panel in range(len(y) // LANES):
        sums = splat(ZERO)
        for k in range(columns):
            sums = load(panels, (panel * columns + k) * LANES) * splat(x[k])
        store(y, panel * LANES, sums)


def _goes_on(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    columns = len(x)
    sums = splat(ZERO)
    for panel in range(len(y) // LANES):
        for k in range(columns):
            sums = fma(load(panels, (panel * columns + k) * LANES), splat(x[k]), sums)
        store(y, panel * LANES, sums)


def _first_panel_again(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    for panel in range(len(y) // LANES):
        sums = splat(ZERO)
        for k in range(len(x)):
            sums = fma(load(panels, k * LANES), splat(x[k]), sums)
        store(y, panel * LANES, sums)


def _whole_vectors_only(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    columns = len(x)
    for panel in range(len(y) // LANES):
        sums = splat(ZERO)
        for k in range(columns // LANES * LANES):
            sums = fma(load(panels, (panel * columns + k) * LANES), splat(x[k]), sums)
        store(y, panel * LANES, sums)


def _adds_to_y(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    columns = len(x)
    for panel in range(len(y) // LANES):
        sums = load(y, panel * LANES)
        for k in range(columns):
            sums = fma(load(panels, (panel * columns + k) * LANES), splat(x[k]), sums)
        store(y, panel * LANES, sums)


GUARD = 4096
"""Numbers around each array that belong to nobody: compiled code does not look where an array ends."""


@lru_cache(maxsize=32)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return function if hasattr(function, "py_func") else njit(**OPTIONS)(function)


def product_with(function: Callable[..., Any], weight: Tensor, x: Tensor) -> Tensor:
    """`x` Wᵀ by `function(panels, x, y)`: `weight` `[out, in]`, `x` `[rows, in]` → `[rows, out]`, float32.

    Every array lies between guards, and what `y` held before is NaN. Raises `LessonError` if numba cannot compile the
    function, and if it wrote beside `y`.
    """
    plain = getattr(function, "py_func", function)
    if "NotImplementedError" in getattr(getattr(plain, "__code__", None), "co_names", ()):
        return plain(None, None, None)  # a stub; Python raises what it raises
    out, columns = weight.shape
    padded = -(-out // LANES) * LANES
    panels, row, y = (_guarded(size) for size in (padded * columns, columns, padded))
    panels[GUARD:-GUARD] = pack(weight.numpy())
    rows = []
    for i in range(len(x)):
        row[GUARD:-GUARD] = x[i].numpy()
        y[:] = np.nan
        try:
            _compiled(function)(*(a[GUARD:-GUARD] for a in (panels, row, y)))
        except NumbaError as problem:
            told = [line for line in str(problem).splitlines() if line.strip()][:4]
            raise LessonError("numba cannot compile this: " + " ".join(told)) from None
        if not (np.isnan(y[:GUARD]).all() and np.isnan(y[-GUARD:]).all()):
            raise LessonError(f"it wrote outside of y, which holds {padded} numbers; look at what you give to store")
        rows.append(torch.from_numpy(y[GUARD : GUARD + out].copy()))
    return torch.stack(rows)


def _guarded(size: int) -> np.ndarray:
    return np.full(size + 2 * GUARD, np.nan, np.float32)


def _product_cases() -> list[Case]:
    def numbers(*shape: int) -> Tensor:
        """Small whole numbers, so that every order of summing gives the same and a counterexample can be redone."""
        return torch.arange(1, 1 + int(np.prod(shape))).float().reshape(shape) % 7 - 2

    draw = torch.Generator().manual_seed(0)
    return [
        Case("two outputs, one number in", (numbers(2, 1), torch.tensor([[3.0]]))),
        Case("sixteen outputs, three numbers in: one panel", (numbers(16, 3), numbers(1, 3))),
        Case("twenty outputs, the second panel filled in part", (numbers(20, 5), numbers(1, 5))),
        Case("two rows after each other", (numbers(33, 17), numbers(2, 17))),
        Case(
            "a matrix of minicoder's size, random",
            (torch.randn(515, 389, generator=draw), torch.randn(1, 389, generator=draw)),
        ),
    ]


def _by_linear(expected: object, got: object) -> str | None:
    from minillm.teaching.compare import values_match

    return values_match(expected, got, rtol=1e-4, atol=1e-3)


_PRODUCT = Exercise(
    name="l15.panel_product",
    reference=panel_product,
    cases=_product_cases,
    hints=(
        "A panel is sixteen outputs. What is added up for them, number of x by number of x, and where does the column "
        "k of panel p begin?",
        "Column k of panel p begins at (p * columns + k) * LANES. Start each panel with sums = splat(ZERO), add "
        "load(panels, …) times splat(x[k]) with fma for every k, and store the sums at p * LANES.",
        "sums = fma(load(panels, (panel * columns + k) * LANES), splat(x[k]), sums); after the loop over k: "
        "store(y, panel * LANES, sums)",
    ),
    wrong=(
        WrongVersion("steps by one number from column to column; a column of a panel is sixteen", _rows_of_the_matrix),
        WrongVersion("keeps the last column's product instead of the sum", _last_column),
        WrongVersion("does not start again from zero for the next panel", _goes_on),
        WrongVersion("reads the first panel for every output", _first_panel_again),
        WrongVersion("leaves out the last columns when their number is no multiple of sixteen", _whole_vectors_only),
        WrongVersion("adds to what y held before", _adds_to_y),
    ),
    compare=_by_linear,
    drive=product_with,
)

# ------------------------------------------------------------------------------------------------------- choose_gamma


def choose_gamma(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    """The number of drafts a round that is fastest; 0: do not draft.

    `acceptance`: chance that a draft is right if those before it were. `draft_cost` (c): seconds of one draft over
    those of one plain step. `verify_costs[g]` (v): seconds of a step that judges g drafts over those of a plain step;
    the first is 1. A round of g drafts gains 1 + a + … + aᵍ tokens and takes g·c + v (Leviathan et al. 2023, theorem
    3.8, with v in place of 1). Among equals the smallest.
    """

    def speed_up(gamma: int) -> float:
        tokens = sum(acceptance**i for i in range(gamma + 1))
        return tokens / (gamma * draft_cost + verify_costs[gamma])

    return max(range(len(verify_costs)), key=speed_up)


def _no_bonus(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    def speed_up(gamma: int) -> float:
        tokens = sum(acceptance**i for i in range(1, gamma + 1)) if gamma else 1.0
        return tokens / (gamma * draft_cost + verify_costs[gamma])

    return max(range(len(verify_costs)), key=speed_up)


def _linear_tokens(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    return max(
        range(len(verify_costs)), key=lambda g: (1 + g * acceptance) / (g * draft_cost + verify_costs[g])
    )  # fmt: skip


def _free_verification(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    return choose_gamma(acceptance, draft_cost, [1.0] * len(verify_costs))


def _free_drafts(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    return choose_gamma(acceptance, 0.0, verify_costs)


def _always_drafts(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    def speed_up(gamma: int) -> float:
        return sum(acceptance**i for i in range(gamma + 1)) / (gamma * draft_cost + verify_costs[gamma])

    return max(range(1, len(verify_costs)), key=speed_up) if len(verify_costs) > 1 else 0


def _most_tokens(acceptance: float, draft_cost: float, verify_costs: list[float]) -> int:
    return len(verify_costs) - 1


_FREE = [1.0] * 9
_GAMMA = Exercise(
    name="l15.choose_gamma",
    reference=choose_gamma,
    cases=[
        Case("cheap drafts, often right, verifying is free", (0.8, 0.05, _FREE)),
        Case(
            "the same drafts, and each one judged makes the step longer", (0.8, 0.05, [1 + 0.2 * g for g in range(9)])
        ),
        Case("drafts that are right half of the time", (0.5, 0.1, _FREE)),
        Case("drafts that cost a quarter of a step", (0.8, 0.25, _FREE)),
        Case("drafts as dear as the target", (0.9, 1.0, _FREE)),
        Case("good drafts, but judging one doubles the step", (0.6, 0.1, [1.0, 2.0, 2.2, 2.4, 2.6])),
        Case("nothing can be verified", (0.9, 0.1, [1.0])),
    ],
    hints=(
        "How many tokens does a round of g drafts gain on average, and how long does it take, in plain steps?",
        "Tokens: 1 + a + a² + … + a^g, for draft i counts only if all before it were right, and the target always "
        "adds one. Time: g·c + v[g]. Compare tokens / time for every g from 0.",
        "max(range(len(verify_costs)), key=lambda g: sum(acceptance**i for i in range(g + 1)) / (g * draft_cost + "
        "verify_costs[g]))",
    ),
    wrong=(
        WrongVersion("forgets the token that the target adds to every round", _no_bonus),
        WrongVersion("counts 1 + γ·acceptance tokens a round, as if a wrong draft did not end it", _linear_tokens),
        WrongVersion("takes verification for free", _free_verification),
        WrongVersion("takes drafts for free", _free_drafts),
        WrongVersion("drafts even where not drafting is faster", _always_drafts),
        WrongVersion("takes as many drafts as it can", _most_tokens),
    ),
)

EXERCISES = [_ATTRIBUTE, _STEP, _PRODUCT, _GAMMA]
