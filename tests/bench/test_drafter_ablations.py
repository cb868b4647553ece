"""`minillm bench ablations`: each variant lacks what its name says, and what was trained stands beside the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minillm import LLM
from minillm.bench import drafter_ablations as ablations
from minillm.bench.drafter_ablations import VARIANTS, AblationRow, run, table
from minillm.errors import ConfigError
from minillm.models.fingerprint import fingerprint_of_folder
from minillm.request import Request
from minillm.sampling.params import SamplingParams
from tests.conftest import TinyPair

SMALL: dict[str, Any] = {"prompts": 1, "new_tokens": 24, "drafts": 3}


def test_every_variant_is_measured_by_position(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ablations.VARIANTS, "self_sparse", with_budget(VARIANTS["self_sparse"], 33))
    result = run(str(tiny.target), **SMALL)
    names = [(row["method"], row["variant"]) for row in result["rows"]]
    assert names == [(method, name) for method, variants in VARIANTS.items() for name in variants]
    for row in result["rows"]:
        for kind in ("greedy", "sampled"):
            rates = row[kind]
            assert 1 <= len(rates) <= 3 and all(0 <= rate <= 1 for rate in rates)
            assert 1 <= row["tokens_per_round"][kind] <= 4
        assert row["judged"] >= 24 / 4 - 1
    shown = Console(width=200, record=True)
    shown.print(table(result))
    text = shown.export_text()
    assert all(name in text for _, name in names)


def with_budget(variants: dict[str, ablations.Variant], budget: int) -> dict[str, ablations.Variant]:
    return {name: ablations.Variant({**v.speculative, "budget": budget}, v.layout) for name, v in variants.items()}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("sink and window", [0, 6, 7]),
        ("no sink", [5, 6, 7]),
        ("chosen by attention, and window", [2, 4, 7]),
        ("chosen by attention, no window", [2, 4, 6]),
    ],
)
def test_a_variant_reads_the_blocks_of_its_name(tiny: TinyPair, variant: str, expected: list[int]) -> None:
    """Three of eight blocks. The prompt attended to blocks 4, 2, 6 and then 0 most."""
    options = VARIANTS["self_sparse"][variant].speculative
    llm = LLM(str(tiny.target), speculative_config={**options, "budget": 64, "num_speculative_tokens": 2})
    drafter: Any = llm.engine.drafter
    request = Request("a", "", [1], 1, SamplingParams(), 100, seed=0)
    drafter._ranking[request] = [4, 2, 6, 0, 1, 3, 5, 7]
    assert drafter.chosen_blocks(request, 8) == expected
    assert drafter.chosen_blocks(request, 3) == [0, 1, 2]


def test_what_is_not_quantised_is_the_targets_own(tiny: TinyPair) -> None:
    variants = VARIANTS["self_quant"]
    lossless = ablations.Variant({"method": "self_quant", "quantization": None})
    row = ablations._measured(str(tiny.target), "self_quant", "", lossless, 3, ["def f(x):"], 24)
    assert row.greedy == row.sampled == [1.0, 1.0, 1.0]
    assert variants["only the cache"].speculative["quantization"] is None
    assert {name: variants[name].layout for name in variants} == {
        "weights and cache in four bits": "paged_two_level",
        "only the cache": "paged_two_level",
        "only the weights": "paged",
    }


def trained(folder: Path, target: Path, **changes: Any) -> None:
    acceptance = {"roots": 9, "greedy": [0.5, 0.5], "sampled": [0.25, 0.0]}
    row = {"variant": "prompt tokens alone", "text": "held-out code", "tokens": 7, "acceptance": acceptance}
    made = {"method": "prompt_tokens", "target": target.name, "fingerprint": fingerprint_of_folder(target)}
    values = {**made, "sure_drafts": 1, "rows": [row], **changes}
    (folder / f"ablations-prompt_tokens-{target.name}.json").write_text(json.dumps(values))


def test_trained_drafters_stand_in_the_same_table(tiny: TinyPair, tmp_path: Path) -> None:
    trained(tmp_path, tiny.target)
    result = run(str(tiny.target), methods=["prompt_tokens"], drafters=tmp_path, **SMALL)
    [row] = result["rows"]
    assert (row["judged"], row["trained_tokens"], row["sure_drafts"]) == (9, 7, 1)
    assert row["tokens_per_round"] == {"greedy": 2 + 0.5 + 0.25, "sampled": 2 + 0.25}
    shown = Console(width=200, record=True)
    shown.print(table(result))
    assert "sure" in shown.export_text()


def test_runs_without_a_judged_draft_are_refused(tiny: TinyPair) -> None:
    with pytest.raises(ConfigError, match="--new-tokens 2 must be at least 3"):
        run(str(tiny.target), **{**SMALL, "new_tokens": 2})
    with pytest.raises(ConfigError, match="--prompts 50 is more than the 8 prompts of a slice"):
        run(str(tiny.target), **{**SMALL, "prompts": 50})


def test_results_of_other_weights_are_refused(tiny: TinyPair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no ablations of .* in it; `minillm train --stages corpus`, then"):
        run(str(tiny.target), drafters=tmp_path, **SMALL)
    trained(tmp_path, tiny.target, fingerprint="other")
    with pytest.raises(ConfigError, match="its weights differ"):
        run(str(tiny.target), drafters=tmp_path, **SMALL)
    with pytest.raises(ConfigError, match="no ablations of 'spire' here; there are those of self_sparse, self_quant"):
        run(str(tiny.target), methods=["spire"], **SMALL)


def test_a_round_gains_the_drafts_that_survive_and_one() -> None:
    row = AblationRow("m", "v", "t", 1, [0.5, 1.0], [0.0, 1.0])
    assert row.tokens_per_round == {"greedy": 1 + 0.5 + 0.5, "sampled": 1.0}
