"""`minillm bench speculation`: its counts, its rows, and that no method changes a token."""

from __future__ import annotations

import pytest
from rich.console import Console

from minillm.bench.speculation import PLAIN, Counts, run, slice_prompts, table
from minillm.errors import ConfigError
from minillm.trace import StepFinished, StepRan, TokensCommitted, Work
from minillm.training.slice_prompts import SLICES
from tests.conftest import TinyPair


def test_every_slice_has_prompts() -> None:
    found = slice_prompts()
    assert list(found) == list(SLICES)
    assert all(len(prompts) >= 4 and len(set(prompts)) == len(prompts) for prompts in found.values())


def test_each_method_is_compared_with_plain_decoding_and_gives_its_tokens(tiny: TinyPair) -> None:
    given = {"methods": ["ngram", "draft_model"], "slices": ["edits", "long files"], "weights": ["int8"]}
    result = run(str(tiny.target), str(tiny.draft), batches=[2], rounds=1, prompts=2, new_tokens=12, drafts=3, **given)
    rows = [row for row in result["rows"] if row["baseline"] is not None]
    assert [row["system"] for row in rows[:4]] == ["draft_model", "draft_model, adaptive", "ngram", "ngram, adaptive"]
    assert {row["config"]["slice"] for row in rows} == {"edits", "long files"} and len(rows) == 8
    assert all(row["baseline"] == PLAIN and row["outputs_equal"] for row in rows)
    drafted = rows[0]["config"]
    assert 1 <= drafted["tau"] <= 4 and len(drafted["alpha"]) <= 3 and drafted["c"] > 0 and drafted["v"] > 0
    shown = Console(width=160, record=True)
    shown.print(table(result))
    assert "int8, 2 together" in shown.export_text()


def test_counts_are_those_of_the_trace() -> None:
    """Two steps with drafts, one without; the prefill does not count."""

    def step(number: int, kind: str, tokens: int, drafts: int, accepted: int) -> list[object]:
        committed = TokensCommitted("a", [1] * tokens, [""] * tokens, [], drafts, accepted, 0)
        work = Work("a", kind, 0, drafts + 1)  # type: ignore[arg-type]
        return [StepRan(number, [work]), committed, StepFinished(number, 1.0, 0.25 * drafts, 2.0, 0)]

    events = [*step(1, "prefill", 1, 0, 0), *step(2, "verify", 3, 3, 2), *step(3, "verify", 1, 2, 0)]
    counts = Counts.of([*events, *step(4, "decode", 1, 0, 0)])  # type: ignore[list-item]
    assert (counts.tokens, counts.forwards) == (5, 3)
    assert (counts.judged, counts.accepted) == ([2, 1, 1], [1, 1, 0])
    assert (counts.draft_s, counts.verify_s, counts.plain_s) == ([0.75, 0.5], [2.0, 2.0], [2.0])


def test_an_unknown_name_is_refused_before_a_model_is_loaded() -> None:
    for wrong in ({"methods": ["guess"]}, {"weights": ["int3"]}):
        with pytest.raises(ConfigError, match="there are:"):
            run("no such model", "no such draft", **wrong)  # type: ignore[arg-type]
