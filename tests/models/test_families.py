"""Every family computes what transformers computes, at once and token by token."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from minillm.errors import CheckpointError, UnsupportedError
from minillm.models.causal import CausalAttention
from minillm.models.config_json import llama_config, model_config
from minillm.models.loading import load_config, load_model, save_llama
from minillm.models.rope import inverse_frequencies
from tests.models.hf_checkpoints import CASES, LLAMA3, SHAPE, HfCheckpoint, make, respelled, rope_options
from tests.models.naive_attention import NaiveAttention

TOLERANCE = 1e-5
"""Relative to the largest logit, in fp32: the order of sums differs, nothing else."""


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HfCheckpoint:
    return make(request.param, tmp_path_factory.mktemp("checkpoint"))


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"relative error {error:.1e}"


def test_logits_of_a_whole_prompt_are_those_of_transformers(checkpoint: HfCheckpoint) -> None:
    model = load_model(checkpoint.folder, torch.float32)
    windowed = any(model.config.window(layer) for layer in range(model.config.num_layers))
    attention = NaiveAttention(model.config) if windowed else CausalAttention(24)
    assert_close(model.logits(model(checkpoint.token_ids, torch.arange(24), attention)), checkpoint.logits)


def test_logits_token_by_token_are_those_of_transformers(checkpoint: HfCheckpoint) -> None:
    model = load_model(checkpoint.folder, torch.float32)
    attention = NaiveAttention(model.config)
    bounds = [0, 7, 11, *range(12, 25)]
    rows = [
        model.logits(model(checkpoint.token_ids[start:stop], torch.arange(start, stop), attention))
        for start, stop in pairwise(bounds)
    ]
    assert_close(torch.cat(rows), checkpoint.logits)


def test_both_spellings_of_a_config_mean_the_same(checkpoint: HfCheckpoint) -> None:
    """transformers before 5 wrote `rope_theta` beside `rope_scaling`, earlier still with `type`, and `torch_dtype`."""
    stored = json.loads((checkpoint.folder / "config.json").read_text())
    assert model_config(respelled(stored)) == load_config(checkpoint.folder)


def test_the_families_are_told_apart_only_by_their_config(tmp_path: Path) -> None:
    windows = {}
    for case in ("mistral, window", "qwen2, window in the upper layers", "smollm3, listed layers and window"):
        config = load_config(make(case, tmp_path / case).folder)
        windows[case] = [config.window(layer) for layer in range(3)]
    assert list(windows.values()) == [[5, 5, 5], [None, 6, 6], [5, None, 5]]


def test_a_mistral_with_listed_layers_has_windows_in_these(tmp_path: Path) -> None:
    """transformers' auto classes, too, go by the list, not by the name."""
    from transformers import AutoModelForCausalLM

    checkpoint = make("mistral, window in listed layers", tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    named = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps({**stored, **named}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        assert_close(theirs(checkpoint.token_ids[None]).logits[0], checkpoint.logits)
    model = load_model(tmp_path, torch.float32)
    attention = NaiveAttention(model.config)
    assert_close(model.logits(model(checkpoint.token_ids, torch.arange(24), attention)), checkpoint.logits)


MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; minillm supports LlamaForCausalLM, ",
        ),
        ({"architectures": ["Own"], "auto_map": {"AutoModel": "own.Own"}}, r"\(auto_map\) is never run"),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba'"),
        ({"architectures": None}, "model_type None"),
        ({"hidden_size": None}, "hidden_size is missing or null"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "8"}, "vocab_size is '8'"),
        ({"num_key_value_heads": 3}, "2 query heads over 3 KV heads"),
        ({"head_dim": 5}, "number of channels must be even"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu' or 'swish'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised \\(gptq\\)"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "from layer to layer"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 1, "no_rope_layers": [1]},
            "no_rope_layers lists 1 layers",
        ),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused(changes: dict[str, object], message: str) -> None:
    model_config(MINIMAL)
    with pytest.raises(CheckpointError, match=message):
        model_config({**MINIMAL, **changes})


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, [None, None]),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, [None, 9]),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": None}, [None, None]),
        ("MistralForCausalLM", {}, [4096, 4096]),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0]}, [None, 9]),
        ("LlamaForCausalLM", {"use_sliding_window": True, "sliding_window": 9}, [None, None]),
    ],
)
def test_windows_as_checkpoints_of_before_spell_them(
    architecture: str, changes: dict[str, object], windows: list[int | None]
) -> None:
    """Without `layer_types`, which transformers now fills in when it saves."""
    config = model_config({**MINIMAL, "architectures": [architecture], "num_key_value_heads": 1, **changes})
    assert [config.window(layer) for layer in range(2)] == windows


@pytest.mark.parametrize("model_type", ["llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True, "num_hidden_layers": 30}])
def test_missing_fields_have_the_values_that_transformers_assumes(model_type: str, changes: dict[str, object]) -> None:
    """`to_dict` states every field."""
    from transformers import AutoConfig

    heads = {"hidden_size": 64, "num_attention_heads": 32}  # a multiple of every default of the KV heads
    shape = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"} | heads | changes
    theirs = AutoConfig.for_model(model_type, **shape).to_dict()
    assert model_config({**shape, "model_type": model_type}) == model_config({**theirs, "architectures": None})


@pytest.mark.skipif(int(version("transformers").split(".")[0]) < 5, reason="reads `rope_parameters` since version 5")
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
        {"rope_scaling": {**LLAMA3, "type": "llama3"}, "original_max_position_embeddings": 16},
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        },
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ],
)
def test_of_two_places_for_a_number_of_rope_the_one_that_transformers_reads_counts(changes: dict[str, object]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = model_config({**SHAPE, "model_type": "llama", **changes}).rope
    expected = ROPE_INIT_FUNCTIONS[rope.kind](LlamaConfig(**{**SHAPE, **json.loads(json.dumps(changes))}), "cpu")
    torch.testing.assert_close(inverse_frequencies(rope, 8), expected)


def test_whether_rope_was_finetuned_changes_nothing() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    expected = model_config({**MINIMAL, "rope_scaling": scaling})
    assert model_config({**MINIMAL, "rope_scaling": {**scaling, "finetuned": True}}) == expected


def test_a_factor_that_transformers_does_not_know_changes_nothing() -> None:
    """DeepSeek-R1-0528-Qwen3-8B."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = {"factor": 4.0, "original_max_position_embeddings": 16, "attn_factor": 0.8782488562869419}
    stored = {**SHAPE, "model_type": "llama", **rope_options("yarn", **yarn)}
    expected, expected_scale = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**json.loads(json.dumps(stored))), "cpu")
    frequencies, scale = inverse_frequencies(model_config(stored).rope, 8)
    torch.testing.assert_close(frequencies, expected)
    assert scale == expected_scale == 0.1 * math.log(4) + 1


def test_model_type_stands_in_for_a_missing_architecture() -> None:
    config = model_config({**MINIMAL, "architectures": None, "model_type": "qwen3", "num_key_value_heads": 1})
    assert config.qk_norm
    assert config.head_dim == 128, "what transformers assumes for Qwen3"


def test_yarn_added_afterwards_widens_the_context() -> None:
    """As Qwen's model cards advise: only `rope_scaling` is added, the stated context stays that of before."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert model_config({**MINIMAL, "rope_scaling": scaling}).max_position_embeddings == 128
    longer = {**MINIMAL, "rope_scaling": scaling, "max_position_embeddings": 256}
    assert model_config(longer).max_position_embeddings == 256, "what is stated is not shortened"


def test_end_tokens_are_those_of_the_generation_config_if_there_is_one(tmp_path: Path) -> None:
    """As in vLLM."""
    (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, "eos_token_id": [3, 4]}))
    assert load_config(tmp_path).eos_token_ids == (3, 4)
    for named, expected in (([5, 3, 5], (5, 3)), (6, (6,)), (None, ())):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert load_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("llama")])
def test_a_llama_survives_being_written_and_read(case: str, tmp_path: Path) -> None:
    checkpoint = make(case, tmp_path / "theirs")
    model = load_model(checkpoint.folder, torch.float32)
    save_llama(model, tmp_path / "ours", torch.float32)
    assert load_config(tmp_path / "ours") == model.config
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        assert_close(theirs(checkpoint.token_ids[None]).logits[0], checkpoint.logits)


def test_what_is_no_llama_is_not_written_as_one(tmp_path: Path) -> None:
    config = load_config(make("qwen3", tmp_path).folder)
    with pytest.raises(UnsupportedError, match="only the Llama family"):
        llama_config(config, torch.float32)
