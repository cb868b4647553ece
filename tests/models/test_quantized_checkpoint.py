"""Quantised checkpoints: written once, read back bit for bit, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, ConfigError, UnsupportedError
from minillm.export.write_quantized import quantize_checkpoint
from minillm.models.calibration import calibrate
from minillm.models.decoder import Decoder
from minillm.models.loading import load_config, load_model, save_llama
from minillm.models.quantize import (
    decoder_linears,
    linear_bytes,
    model_bytes,
    num_weights,
    quantize_model,
    quantize_unembedding,
)
from minillm.models.quantized_checkpoint import save_quantized
from minillm.quantization.base import QuantizedLinear, Scheme
from minillm.quantization.schemes import SCHEMES, make_scheme
from tests.conftest import TinyPair
from tests.quantization.models import log_probs, random_decoder

METHODS = list(SCHEMES)
ROWS = [[5, 9, 3, 7, 1, 12, 8, 2], [2, 2, 8, 20], [4, 6, 6, 6, 20, 21, 22]]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SHARES = {"squeezellm": {"outliers": 0.02, "sensitive": 0.01}}


def scheme_for(method: str) -> Scheme:
    return make_scheme(method, **SHARES.get(method, {}))


def quantised(source: Path, scheme: Scheme, rows: list[list[int]] = ROWS) -> Decoder:
    model = load_model(source, torch.float32)
    return quantize_model(model, scheme, calibrate(model, rows, scheme.needs) if scheme.needs else None)


def rewrite(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **changes: object) -> None:
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(stored))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_llama(random_decoder(qkv_bias=True, o_bias=True, mlp_bias=True), tmp_path / "source", torch.float16)
    return tmp_path / "source"


@pytest.fixture
def folder(source: Path) -> Path:
    """A SqueezeLLM checkpoint: it has every kind of tensor."""
    save_quantized(quantised(source, scheme_for("squeezellm")), source, source.parent / "small")
    return source.parent / "small"


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_is_read_bit_for_bit(method: str, source: Path, tmp_path: Path) -> None:
    model = quantised(source, scheme_for(method))
    save_quantized(model, source, tmp_path / "out")
    loaded = load_model(tmp_path / "out", torch.float32)
    ours, theirs = dict(decoder_linears(model)), dict(decoder_linears(loaded))
    assert list(ours) == list(theirs) and len(ours) == 8
    for name, linear in ours.items():
        assert linear.scheme == theirs[name].scheme
        for key, tensor in linear.tensors.items():
            assert torch.equal(tensor, theirs[name].tensors[key]), f"{name}.{key}"
    assert torch.equal(log_probs(model, ROWS), log_probs(loaded, ROWS))
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())


def test_the_dtype_of_weights_whose_configuration_states_none_is_kept(source: Path, tmp_path: Path) -> None:
    """The scales' own dtype is another."""
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "torch_dtype": None}))
    assert load_config(source).dtype == "float16"
    save_quantized(quantised(source, make_scheme("int8")), source, tmp_path / "out")
    assert load_config(tmp_path / "out").dtype == "float16"


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_gives_the_same_tokens_from_memory_and_from_disk(
    method: str, tiny: TinyPair, tmp_path: Path
) -> None:
    in_memory = LLM(str(tiny.target))
    model = in_memory.engine.runner.model
    scheme = scheme_for(method)
    rows = [list(range(n, 3 * n)) for n in (4, 9, 20)]
    quantize_model(model, scheme, calibrate(model, rows, scheme.needs) if scheme.needs else None)
    save_quantized(model, tiny.target, tmp_path / "out")
    if method in ("int8", "w8a8"):
        quantize_unembedding(model, make_scheme("int8"))  # as an engine does that loads such weights
    prompts = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):"]
    first, second = (
        [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        for llm in (in_memory, LLM(str(tmp_path / "out")))
    )
    assert first == second
    full = LLM(str(tiny.target)).generate(prompts, GREEDY, use_tqdm=False)
    if scheme.bits <= 4:
        assert first != [output.outputs[0].token_ids for output in full], "nothing was quantised"


@pytest.mark.parametrize("method", ["int8", "w8a8", "int4"])
def test_rounding_at_loading_is_rounding_before(method: str, source: Path) -> None:
    """q, k and v arrive one by one there and as one matrix here; rows are rounded one by one, so bitwise the same."""
    loaded, made = load_model(source, torch.float32, quantization=method), quantised(source, make_scheme(method))
    for (name, ours), (_, theirs) in zip(decoder_linears(loaded), decoder_linears(made), strict=True):
        assert isinstance(ours, QuantizedLinear)
        for key, tensor in ours.tensors.items():
            assert torch.equal(tensor, theirs.tensors[key]), f"{name}.{key}"
        assert torch.equal(ours.bias, theirs.bias)
    assert torch.equal(log_probs(loaded, ROWS), log_probs(made, ROWS))


def test_an_untied_unembedding_and_odd_dtypes_survive(tmp_path: Path) -> None:
    for tied in (True, False):
        source, out = tmp_path / f"source{tied}", tmp_path / f"out{tied}"
        save_llama(random_decoder(tie_word_embeddings=tied), source, torch.bfloat16)
        save_quantized(quantised(source, make_scheme("int4")), source, out)
        loaded = load_model(out, torch.bfloat16)
        assert torch.equal(loaded.lm_head.weight, load_model(source, torch.bfloat16).lm_head.weight)
        assert (loaded.lm_head.weight is loaded.embed_tokens.weight) is tied
        assert log_probs(loaded, ROWS).dtype == torch.bfloat16
        assert {t.dtype for _, linear in decoder_linears(loaded) for t in linear.tensors.values()} == {
            torch.uint8,
            torch.float16,
        }


def test_the_embedding_and_the_norms_are_not_touched(source: Path, tmp_path: Path) -> None:
    save_quantized(quantised(source, make_scheme("int4")), source, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    kept = [name for name in before if not name.endswith("_proj.weight")]
    assert "model.embed_tokens.weight" in kept and "model.layers.0.self_attn.k_proj.bias" in kept
    for name in kept:
        assert torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype
    assert not any(name.endswith("_proj.weight") for name in after)


def test_the_measured_facts_of_the_model_stay_with_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`minillm.complete` reads in them whether the model can fill gaps."""
    copy = tmp_path / "in"
    shutil.copytree(source, copy)
    (copy / "training.json").write_text("{}")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    save_quantized(quantised(copy, make_scheme("int4")), copy, Path())
    assert (tmp_path / "out" / "training.json").read_text() == "{}"


def test_every_chat_template_stays_with_the_model(source: Path, tmp_path: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (source / name).write_text(name)
    save_quantized(quantised(source, make_scheme("int4")), source, tmp_path / "out")
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "out" / name).read_text() == name


def test_names_without_the_prefix_and_a_folder_named_like_the_tokenizer_do_not_stop_it(tmp_path: Path) -> None:
    """The quantised checkpoint has the names with the prefix."""
    source, tied = tmp_path / "in", random_decoder(tie_word_embeddings=True)
    save_llama(tied, source, torch.float32)
    stored = {name.removeprefix("model."): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    stored["lm_head.weight"] = stored.pop("embed_tokens.weight")
    save_file(stored, source / "model.safetensors")
    (source / "tokenizer_old").mkdir()
    scheme = make_scheme("int8")
    save_quantized(quantised(source, scheme), source, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer_old").exists()
    ours, expected = load_model(tmp_path / "out", torch.float32), quantize_model(tied, scheme)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), expected.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), expected.buffers(), strict=True))


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_counted_bytes_are_the_bytes_in_the_file(method: str, source: Path, tmp_path: Path) -> None:
    model = quantised(source, scheme_for(method))
    save_quantized(model, source, tmp_path / "out")
    file = load_file(tmp_path / "out" / "model.safetensors")
    stands_for_weights = sum(
        t.nbytes for name, t in file.items() if name not in load_file(source / "model.safetensors")
    )
    assert sum(linear.num_bytes for _, linear in decoder_linears(model)) == stands_for_weights
    assert sum(linear_bytes(model).values()) == stands_for_weights
    half = load_model(tmp_path / "out", torch.float16)
    assert sum(model_bytes(half).values()) == sum(t.nbytes for t in file.values())


def test_bytes_of_a_layer_written_out() -> None:
    """An 64 × 384 matrix: codes, and everything that comes with them."""
    sizes = {
        method: {spec.part: spec.num_bytes for spec in make_scheme(method).tensors(64, 384).values()}
        for method in ("int8", "int4", "awq")
    }
    assert sizes["int8"] == {"weights": 64 * 384, "scales": 64 * 4}
    assert sizes["int4"] == {"weights": 64 * 192, "scales": 64 * 3 * 2, "zero points": 64 * 2}
    assert sizes["awq"] == {**sizes["int4"], "input scales": 384 * 4}
    sparse = make_scheme("squeezellm").tensors(64, 384)
    assert {name: spec.num_bytes for name, spec in sparse.items()} == {
        "qweight": 64 * 192,
        "codebooks": 64 * 16 * 2,
        "sparse_rows": 65 * 4,
        "sparse_columns": (110 + 12) * 2,
        "sparse_values": (110 + 12) * 2,
    }


def test_a_rounded_unembedding_is_counted_beside_the_table_it_was_tied_to() -> None:
    model = random_decoder(tie_word_embeddings=True)
    before = model_bytes(model)
    after = model_bytes(quantize_unembedding(model, make_scheme("int8")))
    codes_and_scales = model.config.vocab_size * (model.config.hidden_size + 4)
    assert "unembedding" not in before and after == {**before, "unembedding": codes_and_scales}


def test_full_precision_is_counted_too(source: Path) -> None:
    model = load_model(source, torch.float32)
    assert linear_bytes(model) == {"weights": 4 * num_weights(model)}
    counted = model_bytes(model)
    assert sum(counted.values()) == 4 * model.num_parameters
    stored = load_file(source / "model.safetensors")
    for part, ending in (("biases", ".bias"), ("norms", "norm.weight")):
        assert counted[part] == 4 * sum(t.numel() for name, t in stored.items() if name.endswith(ending)) > 0


def test_the_report_of_a_conversion_is_what_is_on_disk(source: Path, tmp_path: Path) -> None:
    done = quantize_checkpoint(str(source), make_scheme("int4"), tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert done.linears_before + done.others == sum(t.nbytes for t in before.values())
    assert sum(done.linears_after.values()) + done.others == sum(t.nbytes for t in after.values())
    assert done.bits_per_weight == 8 * sum(done.linears_after.values()) / (2 * (16 * 32 + 16 * 16 + 3 * 16 * 24))


# --- refused ---------------------------------------------------------------------------------------------------------

PREFIX = "model.layers.1.mlp.gate_up_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (f"{PREFIX}.qweight", None, f"lacks {PREFIX}.qweight$"),
        (
            f"{PREFIX}.codebooks",
            torch.ones(48, 8).half(),
            rf"{PREFIX}.codebooks F16 \[48, 8\] \(should be F16 \[48, 16\]",
        ),
        (f"{PREFIX}.codebooks", torch.ones(48, 16), r"codebooks F32 \[48, 16\] \(should be F16"),
        (f"{PREFIX}.qweight", torch.ones(48, 9, dtype=torch.uint8), r"qweight U8 \[48, 9\] \(should be U8 \[48, 8\]\)"),
        (f"{PREFIX}.qweight", torch.ones(48, 8, dtype=torch.int8), r"qweight I8 .*should be U8"),
        (f"{PREFIX}.scales", torch.ones(48), f"do not fit its config.json: {PREFIX}.scales"),
        ("model.layers.0.self_attn.q_proj.weight", torch.ones(16, 16), "do not fit its config.json: .*q_proj.weight"),
        ("model.norm.weight", torch.ones(16, dtype=torch.int8), "model.norm.weight is stored as I8"),
        (f"{PREFIX}.codebooks", torch.full((48, 16), float("nan")).half(), f"{PREFIX}: codebooks contains NaN"),
        (f"{PREFIX}.sparse_columns", torch.full((22,), 16).short(), f"{PREFIX}: sparse_columns points outside 16"),
        (f"{PREFIX}.sparse_rows", torch.zeros(49).int(), f"{PREFIX}: sparse_rows is not a partition of 22"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, name: str, tensor: Tensor | None, words: str) -> None:
    rewrite(folder, name, tensor)
    with pytest.raises(CheckpointError, match=words):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, kept: int) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "int5"}, "'int5' is not available"),
        ({"quant_method": None}, "None is not available"),
        ({"quant_method": "int8"}, "outliers=0.02: scheme 'int8' has no such option"),
        ({"version": 2}, "has version 2, this minillm reads 1"),
        ({"bits": 5}, "bits=5"),
        ({"bits": "4"}, "bits='4'"),
        ({"bits": 3}, r"qweight U8 \[32, 8\] \(should be U8 \[32, 6\]\)"),
        ({"outliers": "many"}, "outliers='many'"),
        ({"zeal": 1}, "zeal=1"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(folder: Path, changes: dict, words: str) -> None:
    reconfigure(folder, **changes)
    with pytest.raises(CheckpointError, match=words) as refused:
        load_model(folder, torch.float32)
    assert str(folder) in str(refused.value)


def test_checkpoints_quantised_by_others_are_still_refused(folder: Path) -> None:
    """AWQ checkpoints of other programs hold other tensors under the same method."""
    reconfigure(folder, quant_method="awq", format=None)
    with pytest.raises(CheckpointError, match=r"the weights are quantised \(awq\); load the original"):
        load_config(folder)


def test_a_weight_that_is_no_number_is_named_at_loading(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 3] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.1.self_attn.v_proj.weight: a weight is NaN"):
        load_model(source, torch.float32, quantization="int8")
    with pytest.raises(CheckpointError, match=r"layers.1.qkv_proj: a weight is NaN"):
        quantised(source, make_scheme("int8"))


@pytest.mark.parametrize(
    ("option", "error", "words"),
    [
        ("awq", UnsupportedError, r"needs calibration, .* `minillm quantize .*source --scheme awq --out FOLDER`"),
        ("squeezellm", UnsupportedError, "minillm quantize .* --scheme squeezellm"),
        ("gptq", UnsupportedError, "'gptq' is not available; there are: int8, w8a8, int4, awq, squeezellm"),
        (8, UnsupportedError, "quantization=8 is not available"),
    ],
)
def test_options_that_a_full_checkpoint_cannot_have(source: Path, option: str, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        load_model(source, torch.float32, quantization=option)


def test_the_option_may_say_what_the_checkpoint_is_and_nothing_else(folder: Path) -> None:
    load_model(folder, torch.float32, quantization="squeezellm")
    for other in ("int8", "awq"):
        with pytest.raises(ConfigError, match=f"{other}.* is quantised with 'squeezellm'; leave the option out"):
            load_model(folder, torch.float32, quantization=other)


def test_nothing_is_quantised_twice(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"quantised already \(squeezellm\)"):
        quantize_model(load_model(folder, torch.float32), make_scheme("int8"))
    with pytest.raises(UnsupportedError, match=r"quantised already \(squeezellm\); give the original"):
        quantize_checkpoint(str(folder), make_scheme("int8"), tmp_path / "again")


def test_only_new_folders_are_written(source: Path, tmp_path: Path) -> None:
    model = quantised(source, make_scheme("int8"))
    with pytest.raises(ConfigError, match="already exists and is not empty"):
        save_quantized(model, source, source)
    with pytest.raises(ConfigError, match="there is no folder"):
        save_quantized(model, source, tmp_path / "no" / "out")
    with pytest.raises(ConfigError, match=r"layers.0.qkv_proj is not quantised"):
        save_quantized(load_model(source, torch.float32), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    before = (tmp_path / "out").stat().st_ino
    save_quantized(model, source, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
    assert (tmp_path / "out").stat().st_ino == before  # filled, not replaced: it may be a mount point


def test_a_folder_that_is_there_is_filled_from_within_or_stays_empty(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = quantised(source, make_scheme("int8")), tmp_path / "out"
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    out.mkdir()
    real, moved = Path.rename, []

    def rename(file: Path, target: Path) -> Path:
        if file.name == "config.json":
            raise OSError("the last file fails")
        moved.append(file)
        return real(file, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the last file fails"):
        patch.setattr(Path, "rename", rename)
        save_quantized(model, source, out)
    assert len(moved) == 2, "the weights, and the folder of chat templates"
    assert out in moved[0].parents, "its parent may be another disk, or not be writable"
    assert list(out.iterdir()) == []
    save_quantized(model, source, out)
    assert (out / "config.json").exists()


def test_files_of_another_writer_are_not_mixed_with_ours(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = quantised(source, make_scheme("int8")), tmp_path / "out"
    out.mkdir()

    def save_and_be_overtaken(*args: object, **options: object) -> None:
        save_file(*args, **options)
        (out / "config.json").write_text("another's")

    monkeypatch.setattr("minillm.models.quantized_checkpoint.save_file", save_and_be_overtaken)
    with pytest.raises(ConfigError, match="no longer empty: another process"):
        save_quantized(model, source, out)
    assert [file.name for file in out.iterdir()] == ["config.json"]
    assert (out / "config.json").read_text() == "another's"


def test_an_interrupt_while_writing_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised(source, make_scheme("int8"))

    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("minillm.models.quantized_checkpoint.save_file", stop)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        save_quantized(model, source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
