"""The cost of verification: one forward over five tokens of a request, compared with one over a single token.

Speculation is faster if five tokens cost little more than one: its speed-up is τ / (γ·c + v), with
v = t(verify) / t(decode) and c = t(draft) / t(target). The two forwards run in turn on the model runner, without engine
and sampling, for the same request with 128 tokens in the cache. In the engine a round also schedules, judges and
commits, so with these c and v the speed-up may come out too high; `bench speculation` measures both in the engine.

`ratio` is t(decode 1) / t(verify 5), so that larger is better as in other benchmarks; `verify_over_decode` is v. In the
draft's row, `ratio` is t(target) / t(draft), which is 1 / c. The draft is quantised as in the other benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minillm.bench.harness import Counted, Row, System, compare, result
from minillm.bench.own_engine import DRAFT_QUANTIZATION, options
from minillm.bench.prefill import joined_prompt
from minillm.bench.shapes import model_or_shape
from minillm.bench.systems import choose, draft_for, room_for_prompt
from minillm.bench.tables import speed_table

if TYPE_CHECKING:
    from rich.table import Table

    from minillm.runtime.runner import ModelRunner

PAST = 128
"""Tokens in the cache."""
ROUNDS = 15
ROUND_S = 0.02
"""Approximate seconds of one run, which repeats the forward: one forward of a small model is too short to time."""
ENGINES = ("minillm fp32", "minillm int8", "minillm w8a8")
DRAFT = "draft decode 1"


def run(
    model: str | None = None,
    draft: str | None = None,
    shape: str | None = None,
    systems: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    drafts: int = 4,
) -> dict[str, Any]:
    """Run the two forwards in turn, `rounds` times for each precision. Returns the result as JSON values.

    `model`, `shape`: see `model_or_shape`. Raises `ConfigError` for an unknown system, and for more drafts than the
    model has room for.
    """
    import torch

    names = choose(ENGINES, systems)
    model = model_or_shape(model, shape)
    draft = draft_for(model, draft)
    room_for_prompt(model, drafts, PAST + 1, "--drafts")
    rows: list[Row] = []
    for name in names:
        rows += _rows(name, model, draft, drafts + 1, rounds)
    config = {
        "model": shape or model,
        "draft": draft,
        "draft_quantization": DRAFT_QUANTIZATION if draft else None,
        "past_tokens": PAST,
        "verified_tokens": drafts + 1,
        "counted": "forwards of the model runner, logits included",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }
    return result("verify", config, rows)


def table(outcome: dict[str, Any]) -> Table:
    """The rows for the terminal, with v and c."""
    columns = {"verify_over_decode": "v", "draft_over_target": "c"}
    return speed_table(outcome, columns, unit="forward")


def _rows(name: str, model: str, draft: str | None, width: int, rounds: int) -> list[Row]:
    from minillm import LLM

    ids = joined_prompt(model, PAST + width)
    llm_options = options(name, None, 0)
    runner = LLM(model, **llm_options).engine.runner
    decode, verify = f"{name} decode 1", f"{name} verify {width}"
    systems = [_system(decode, runner, ids, 1), _system(verify, runner, ids, width, decode)]
    if draft is not None:
        draft_runner = LLM(draft, **{**llm_options, "quantization": DRAFT_QUANTIZATION}).engine.runner
        systems.append(_system(f"{name} {DRAFT}", draft_runner, ids, 1, decode))
    rows = compare(systems, rounds)
    return [_without_tokens(_with_inverse_ratio(row)) for row in rows]


def _without_tokens(row: Row) -> Row:
    """The draft's row without a comparison of tokens: those of another model say nothing."""
    return replace(row, outputs_equal=None, same_start=None) if row.system.endswith(DRAFT) else row


def _with_inverse_ratio(row: Row) -> Row:
    if row.ratio is None:
        return row
    key = "draft_over_target" if row.system.endswith(DRAFT) else "verify_over_decode"
    return replace(row, config={**row.config, key: 1 / row.ratio})


def _system(name: str, runner: ModelRunner, ids: list[int], width: int, baseline: str | None = None) -> System:
    from minillm.batch import Segment

    blocks = list(range(-(-len(ids) // runner.block_size)))
    runner.run([Segment(ids[:PAST], 0, blocks)])
    segment = [Segment(ids[PAST : PAST + width], PAST, blocks, num_logits=width)]
    runner.run(segment)
    began = time.perf_counter()
    runner.run(segment)
    repeats = max(1, round(ROUND_S / (time.perf_counter() - began)))
    seconds = [0.0]

    def run_once() -> list[list[int]]:
        began = time.perf_counter()
        for _ in range(repeats):
            logits = runner.run(segment)
        seconds[0] = time.perf_counter() - began
        return [[int(logits[0].argmax())]]

    return System(
        name,
        run_once,
        baseline,
        lambda: {"tokens": width, "forwards_a_round": repeats},
        lambda: Counted(seconds[0], repeats),
    )
