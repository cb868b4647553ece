"""`spire` and `long` as a user gets them: from a folder of weights, with every option, in all circumstances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, ConfigError
from minillm.models import bundled
from minillm.models.fingerprint import fingerprint_of_folder
from minillm.models.loading import load_model
from minillm.speculative.trained_drafter import TrainedOptions, drafter_config, save_drafter
from minillm.trace import DraftProposed
from minillm.training.trained_drafters import TRAINED
from tests.conftest import TinyPair
from tests.speculative.reading import long, spire, target_of
from tests.speculative.self_drafting import (
    an_interrupt_after_drafting_leaves_nothing_behind,
    stops_completions_aborts_and_later_requests_are_plain,
    survives_preemption_prefix_sharing_and_chunks,
    tokens,
)

METHODS = ["spire", "long"]


def saved(target: Path, method: str, folder: Path) -> Path:
    """A folder of untrained weights for this target: copies of its last blocks."""
    model = load_model(target, torch.float32)
    module = TRAINED[method].new_module(model)
    config = drafter_config(method, "tiny", fingerprint_of_folder(target), model.config.vocab_size, module.shape)
    save_drafter(folder, config, module)
    return folder


@pytest.fixture(scope="module", params=METHODS)
def folder(tiny: TinyPair, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny.target, request.param, tmp_path_factory.mktemp(request.param) / request.param)


def options_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {"method": folder.name, "model": str(folder), **more}


@pytest.mark.parametrize("kind", ["probabilistic", "greedy"])
def test_weights_from_a_folder_draft_and_the_text_is_the_plain_one(tiny: TinyPair, folder: Path, kind: str) -> None:
    llm = LLM(str(tiny.target), speculative_config=options_of(folder, draft_sample_method=kind), block_size=4)
    params = SamplingParams(temperature=0.7, top_k=1, seed=4, max_tokens=12, ignore_eos=True)
    with llm.trace() as trace:
        assert tokens(llm, params) == tokens(LLM(str(tiny.target), block_size=4), params)
    assert trace.of(DraftProposed)
    assert llm.engine.drafter.greedy == (kind == "greedy")


def test_the_stored_draft_is_the_one_that_was_saved(tiny: TinyPair, folder: Path) -> None:
    """Weights are stored in 16 bits; nothing else is lost, and what the target owns is not stored."""
    llm = LLM(str(tiny.target), speculative_config=options_of(folder))
    again = TRAINED[folder.name].new_module(load_model(tiny.target, torch.float32)).state_dict()
    loaded = llm.engine.drafter.model.state_dict()
    assert loaded.keys() == again.keys() == load_file(folder / "model.safetensors").keys()
    assert all(torch.equal(loaded[name], tensor.to(torch.bfloat16).float()) for name, tensor in again.items())
    assert not any("embed" in name or "lm_head" in name for name in loaded)


@pytest.mark.parametrize("quantization", ["int8", "w8a8", "int4"])
def test_a_quantised_target_can_be_drafted_for(tiny: TinyPair, folder: Path, quantization: str) -> None:
    options: dict[str, Any] = {"quantization": quantization, "enforce_eager": True}
    llm = LLM(str(tiny.target), speculative_config=options_of(folder), **options)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert tokens(llm, params) == tokens(LLM(str(tiny.target), **options), params)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("method", METHODS)
def test_beside_the_compiled_step(tmp_path: Path, method: str, quantization: str | None) -> None:
    """The executor takes the target's weights away; the draft keeps what it needs of them."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    folder = saved(bundled.path("minicoder"), method, tmp_path / method)
    llm = LLM("minicoder", speculative_config=options_of(folder), quantization=quantization)
    assert llm.engine.runner.executor is not None
    with llm.trace() as trace:
        assert tokens(llm, params) == tokens(LLM("minicoder", quantization=quantization), params)
    assert trace.of(DraftProposed)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("method", [spire(window=8), long(window=8)], ids=METHODS)
def test_with_preemption_prefix_sharing_and_chunks(tiny: TinyPair, method: Any, sampled: bool) -> None:
    survives_preemption_prefix_sharing_and_chunks(tiny, {"method": method}, sampled)


@pytest.mark.parametrize("method", [spire(window=8), long(window=8)], ids=METHODS)
def test_stops_completions_aborts_and_requests_that_come_later(tiny: TinyPair, method: Any) -> None:
    stops_completions_aborts_and_later_requests_are_plain(tiny, {"method": method})


@pytest.mark.parametrize("method", [spire(window=8), long(window=8)], ids=METHODS)
def test_an_interrupt_after_drafting_leaves_nothing_behind(tiny: TinyPair, method: Any) -> None:
    an_interrupt_after_drafting_leaves_nothing_behind(tiny, {"method": method})


def test_as_a_fallback_and_with_an_adaptive_number_of_drafts(tiny: TinyPair, folder: Path) -> None:
    config = {"method": "ngram", "prompt_lookup_min": 2, "fallback": options_of(folder), "adaptive": True}
    llm = LLM(str(tiny.target), speculative_config=config, block_size=4)
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(str(tiny.target), block_size=4))
    assert trace.of(DraftProposed)


# -------------------------------------------------------------------------------------------------- what is refused


def test_a_folder_for_another_target_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="trained for a target with hidden size 48, this target has 384"):
        LLM("minicoder", speculative_config=options_of(folder))


def test_other_weights_of_the_same_shape_bring_a_warning(folder: Path, tmp_path: Path) -> None:
    other = target_of(tmp_path, 2)
    target = load_file(Path(other) / "model.safetensors")
    norms = {name: 1.5 * tensor if "norm" in name else tensor for name, tensor in target.items()}
    save_file(norms, Path(other) / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="few drafts may be accepted"):
        LLM(other, speculative_config=options_of(folder))


def test_no_folder_where_nothing_is_bundled_is_refused(tiny: TinyPair, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"{folder.name!r} needs 'model'"):
        LLM(str(tiny.target), speculative_config={"method": folder.name})


@pytest.mark.parametrize(
    ("method", "changed", "message"),
    [
        ("spire", {"window": 0}, "window=0 must be an integer of at least 1"),
        ("spire", {"num_layers": 9}, "num_layers=9 is more than the 2 blocks"),
        ("spire", {"num_layers": 1}, "do not fit its config.json"),
        ("spire", {"feedback": "x"}, "feedback"),
        ("long", {"cross_attention": False}, "do not fit its config.json"),
        ("long", {"intermediate_size": 7}, "its config.json implies"),
        ("long", {"window": None}, "window"),
    ],
    ids=str,
)
def test_a_folder_with_a_wrong_shape_is_refused(
    tiny: TinyPair, tmp_path: Path, method: str, changed: dict[str, Any], message: str
) -> None:
    folder = saved(tiny.target, method, tmp_path / method)
    config = json.loads((folder / "config.json").read_text())
    config["shape"].update(changed)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        LLM(str(tiny.target), speculative_config=options_of(folder))


def test_an_unknown_way_to_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_sample_method='best'"):
        TrainedOptions(draft_sample_method="best")
