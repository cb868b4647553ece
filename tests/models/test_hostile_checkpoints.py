"""Checkpoints whose files say anything at all: they run, or are refused in one line that names what is wrong.

Each of some two thousand changes is made to a checkpoint that works, which is then loaded and asked for two tokens.
Sizes that would hang or exhaust the machine if anything were allocated for them are among them. The tables are fixed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, MinillmError
from minillm.export.write_quantized import quantize_checkpoint
from minillm.models.config_schema import SWITCHES, RopeScaling, StoredConfig
from minillm.models.loading import load_model, open_full_precision
from minillm.models.quantize import quantize_model
from minillm.models.quantized_checkpoint import save_quantized
from minillm.quantization.schemes import make_scheme
from minillm.tokenizer import Tokenizer
from tests.conftest import TinyPair

pytestmark = pytest.mark.timeout(120)  # seconds: what hangs is ended

DEEP = "[" * 100_000 + "]" * 100_000
LONG_NUMBER = "1" * 6000
RAW = [DEEP, '{"a":' * 50_000 + "1" + "}" * 50_000, LONG_NUMBER, "-" + LONG_NUMBER, "1e9999", "-1e9999", '"\\ud800"']
"""JSON that Python's own encoder would not write."""
NUMBERS = [0, 1, -1, 2, 3, 7, 48, 10**6, 10**9, 10**12, 2**31, 2**63, 2**64, 10**30, -(10**30)]
FLOATS = [0.0, -0.0, 0.5, 1.5, -1.5, 1e-320, 1e308, math.nan, math.inf, -math.inf]
OTHERS = [None, True, False, "", "8", "silu", "x" * 10_000, [], [0], [None], [[]], ["a"] * 3, {}, {"a": 1}]
VALUES = [json.dumps(value) for value in (*NUMBERS, *FLOATS, *OTHERS)] + RAW


@pytest.fixture
def folder(tiny: TinyPair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.target, tmp_path / "model"))


def with_raw(stored: dict[str, Any], path: tuple[str, ...], raw: str) -> str:
    """`stored` as JSON, with the JSON text `raw` in the place that `path` names."""
    mark = "here is another value"
    changed = json.loads(json.dumps(stored))
    inner = changed
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    inner[path[-1]] = mark
    return json.dumps(changed).replace(json.dumps(mark), raw)


def outcome(folder: Path) -> str:
    """What comes of using the checkpoint: `runs`, `refused: …`, or what should not be: a raw or a long-winded error."""
    greedy = SamplingParams(temperature=0, max_tokens=2, min_tokens=2)
    try:
        llm = LLM(str(folder), device="cpu", max_num_seqs=2, enforce_eager=True)
        llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy, use_tqdm=False)
    except MinillmError as problem:
        said = str(problem)
        return "refused: " + said if len(said) < 700 and said.isprintable() else f"badly said: {said[:300]!r}"
    except Exception as problem:
        return f"raw: {type(problem).__name__}: {str(problem)[:200]}"
    return "runs"


def outcomes(folder: Path, file: str, contents: Iterable[str | bytes]) -> Iterator[tuple[str, str]]:
    """The outcome with each of these contents in the place of `file`."""
    for content in contents:
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
        yield repr(content[-150:] if len(content) > 2000 else content), outcome(folder)


def bad(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(what, came) for what, came in found if not came.startswith(("runs", "refused"))]


@pytest.mark.parametrize("field", [*StoredConfig.__struct_fields__, "quantization_config.quant_method", "unheard_of"])
def test_any_value_of_any_field_runs_or_is_refused(folder: Path, field: str) -> None:
    stored = json.loads((folder / "config.json").read_text())
    texts = [with_raw(stored, tuple(field.split(".")), raw) for raw in VALUES]
    assert bad(outcomes(folder, "config.json", texts)) == []


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_any_value_of_any_entry_of_rope_runs_or_is_refused(folder: Path, kind: str, spelling: str) -> None:
    stored = json.loads((folder / "config.json").read_text())
    stored.pop("rope_scaling", None)
    good = {"factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    stored[spelling] = {"rope_type": kind, **good}
    hostile = (0, -1, 1, 10**9, 10**30, 1e308, math.nan, math.inf, None, True, "2", [], {})
    values = [json.dumps(value) for value in hostile]
    texts = [with_raw(stored, (spelling, entry), raw) for entry in RopeScaling.__struct_fields__ for raw in values]
    assert bad(outcomes(folder, "config.json", texts)) == []


@pytest.mark.parametrize(
    ("field", "raw", "words"),
    [
        ("num_hidden_layers", "1000000000", "num_hidden_layers is 1000000000; .* a whole number from 1 to 1,024"),
        ("max_position_embeddings", "1" + "0" * 30, "max_position_embeddings is 10+; it must be .* to 16,777,216"),
        ("max_position_embeddings", LONG_NUMBER, "config.json is not valid JSON .*digits"),
        ("rms_norm_eps", '"small"', "rms_norm_eps is 'small'; it must be a number above 0 and up to 1"),
        ("rms_norm_eps", "NaN", "rms_norm_eps is nan; it must be a number above 0 and up to 1"),
        ("rope_theta", "Infinity", r"rope_theta is inf; it must be a number above 1 and up to 1e\+15"),
        ("rope_scaling", "[]", r"rope_scaling is \[\]; it must be an object, or null"),
        ("rope_scaling", '{"rope_type": "linear"}', "kind 'linear' needs the number 'factor'"),
        ("rope_scaling", '{"type": "linear", "factor": 1e400}', r"rope_scaling.factor is inf; .* up to 1e\+06"),
        ("rope_scaling", '{"type": "longrope", "factor": 2}', "RoPE of kind 'longrope' is not supported"),
        ("rope_scaling", '{"type": "su", "short_factor": [1.0]}', "RoPE of kind 'su' is not supported"),
        ("rope_parameters", '{"rope_type": "longrope", "long_factor": [2.0]}', "RoPE of kind 'longrope' is not supp"),
        ("rope_scaling", '{"type": "linear", "factor": 2, "mrope_section": [1]}', "unknown entry 'mrope_section'"),
        ("eos_token_id", "300", "eos_token_id has 300; ids of this model go from 0 to 299"),
        ("eos_token_id", "[0, -3]", r"eos_token_id\[1\] is -3; it must be a token's id, a list of ids, or null"),
        ("quantization_config", "[1]", r"quantization_config is \[1\]; it must be an object, or null"),
        ("layer_types", '"full_attention"', "layer_types is 'full_attention'; it must be 'full_attention' or"),
        ("architectures", '"LlamaForCausalLM"', "architectures is 'LlamaForCausalLM'; it must be a list of names"),
        ("architectures", '["Foo\\nBar"]', r"architecture 'Foo\\nBar' is not supported; minillm supports Llama"),
        ("architectures", json.dumps(["x" * 3000]), r"architecture 'x{5,40}\.\.\.x{5,40}' is not supported"),
        ("torch_dtype", '"load"', "torch_dtype is 'load'; it must be float32, float16"),
        ("final_logit_softcapping", "30.0", "final_logit_softcapping is 30.0, which .* does not support"),
        ("num_local_experts", "8", "num_local_experts is 8, which .* it must be 0 or 1 or left out"),
        ("a", DEEP, "config.json is nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_value_and_range(folder: Path, field: str, raw: str, words: str) -> None:
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(with_raw(stored, (field,), raw))
    with pytest.raises(CheckpointError, match=words):
        LLM(str(folder))


def test_no_table_is_made_that_does_not_fit_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest context that the schema lets through is refused where its tables have no room."""
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "max_position_embeddings": 2**24}))
    made = monkeypatch.setattr(torch, "outer", lambda *_: pytest.fail("the table was made"))
    from minillm.hardware import Memory

    monkeypatch.setattr("minillm.hardware.memory", lambda: Memory(total=2**33, free=2**31))
    with pytest.raises(CheckpointError, match=r"max_position_embeddings is 16777216; .* need 3.5 GiB, and 2.0 GiB are"):
        LLM(str(folder))
    assert made is None


OTHER_DECODERS = {
    "is_causal": False,
    "is_encoder_decoder": True,
    "add_cross_attention": True,
    "use_bidirectional_attention": True,
    "position_embedding_type": "absolute",
    "alibi": True,
    "parallel_attn": True,
    "use_parallel_residual": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_multiplier": 0.015625,
    "query_pre_attn_scalar": 256,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "logit_scale": 0.0625,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attention_sinks": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "num_experts": 128,
    "num_local_experts": 8,
    "n_routed_experts": 256,
    "moe_intermediate_size": 768,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "per_layer_config": {"0": {"num_key_value_heads": 1}},
}
"""Fields with which other decoders compute something else, and a value with which they do."""


def test_features_of_other_decoders_are_refused(folder: Path) -> None:
    stored = json.loads((folder / "config.json").read_text())
    for name, value in OTHER_DECODERS.items():
        (folder / "config.json").write_text(json.dumps({**stored, name: value}))
        assert outcome(folder).startswith(f"refused: {folder}: {name} is ")


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_of_another_decoder_is_refused_unless_it_is_off(folder: Path, switch: str) -> None:
    stored = json.loads((folder / "config.json").read_text())
    null_is_on = [None] if switch == "is_causal" else []
    for value in (*(() if null_is_on else (None,)), *SWITCHES[switch]):
        (folder / "config.json").write_text(json.dumps({**stored, switch: value}))
        assert outcome(folder) == "runs"
    for value in (*null_is_on, 2, 0.5, "on", [1], {"a": 1}, "x" * 10_000):
        (folder / "config.json").write_text(json.dumps({**stored, switch: value}))
        assert outcome(folder).startswith(f"refused: {folder}: {switch} is ")


def test_generation_configs_are_held_against_their_schema(folder: Path) -> None:
    texts = [with_raw({}, ("eos_token_id",), raw) for raw in VALUES]
    whole = ["", "{", "null", "[]", "7", '"a"', DEEP, "\ufeff{}", b"\xff\xfe{}", b"\x00" * 100, '{"a": NaN}']
    assert bad(outcomes(folder, "generation_config.json", [*texts, *whole])) == []


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_may_hold_anything(folder: Path, name: str) -> None:
    right = (folder / name).read_bytes() if (folder / name).exists() else b'{"eos_token_id": 3}'
    cut = [right[: len(right) * i // 8] for i in range(8)]
    flipped = [right[:i] + bytes([right[i] ^ 255]) + right[i + 1 :] for i in range(0, min(len(right), 400), 9)]
    whole = ["", "{}", "[]", "null", "7", DEEP, "{" * 1000, b"\xff" * 64, b"\x00" * 64, right + b"x", b"\xef\xbb\xbf"]
    assert bad(outcomes(folder, name, [*cut, *flipped, *whole])) == []


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "endless"])
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(folder / name if kind == "loop" else "/dev/zero")
    assert outcome(folder).startswith("refused: ")


MODEL_PREFIX = "continuing_subword_prefix"
REFUSING_TOKENIZERS: dict[str, dict[str, Any]] = {
    "merges without the prefix": {"model": {MODEL_PREFIX: "x"}},
    "merges without a long prefix": {"model": {MODEL_PREFIX: "##é"}},
    "a normaliser with an empty prefix": {"normalizer": {"type": "Prepend", "prepend": ""}},
    "a template of tokens that there are not": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "an expression that never ends": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
}
"""On these, tokenizers panics or even ends the process: when it reads them, or at the first prompt."""


@pytest.mark.parametrize("changes", REFUSING_TOKENIZERS.values(), ids=REFUSING_TOKENIZERS)
def test_a_tokenizer_that_panics_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    model = {**stored["model"], **changes.get("model", {})}
    (folder / "tokenizer.json").write_text(json.dumps({**stored, **changes, "model": model}))
    with pytest.raises(MinillmError, match=r"is truncated or corrupt \(|fails on this prompt \("):
        LLM(str(folder), device="cpu", enforce_eager=True).generate("a" * 40 + "b", use_tqdm=False)


def test_a_subword_prefix_that_the_merges_have_is_read(folder: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "##b": 1, "ab": 2}, "merges": ["a ##b"], MODEL_PREFIX: "##"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    assert Tokenizer.from_folder(folder).encode("ab") == [2]


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def framed(header: str, data: bytes, length: int | None = None) -> bytes:
    text = header.encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_headers_of_weights_may_say_anything(folder: Path) -> None:
    header, data = header_of(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    entry = header[name]
    start, end = entry["data_offsets"]
    places = [[0, 0], [end, start], [-1, end], [start, 10**18], [start], [], None, "0", [start, 2**63], [start, 2**64]]
    places += [[0, end], [start - 4, end - 4], [start + 4, end + 4], [0.5, 1]]
    shapes = [[], [0], [-1, 2], [10**9, 10**9], [2**63], [2**32, 2**32], [True], "x", None, [96.0, 48], [48, 96]]
    shapes += [[96, 48, 1], [1] * 2000]
    dtypes = ["F64", "F16", "BF16", "I8", "F8_E4M3", "Q4", "", None, 3, [], "F4", "BOOL", "C64"]
    entries: list[Any] = [{}, None, [], "tensor", 7, {**entry, "more": 1}, {"dtype": "F32"}]
    entries += [{**entry, "data_offsets": place} for place in places]
    entries += [{**entry, "shape": shape} for shape in shapes] + [{**entry, "dtype": dtype} for dtype in dtypes]
    texts = [json.dumps({**header, name: changed}) for changed in entries]
    texts += [json.dumps({**header, "__metadata__": meta}) for meta in (None, [], "a", {"a": 1}, {"a": {}}, {"a": "b"})]
    texts += [json.dumps({**header, extra: entry}) for extra in ("", "x" * 10_000, "\n", "lm_head.weight2", name + " ")]
    once = json.dumps(header)
    texts += [once[:-1] + f', "{name}": {json.dumps(entry)}}}', once + " " * 99, once + "x", DEEP, '{"a":' * 9999, "{}"]
    contents = [framed(text, data) for text in texts]
    lengths = (0, 1, 7, len(once) - 1, len(once) + 1, 2**31, 2**63, 2**64 - 1)
    contents += [framed(once, data, length) for length in lengths]
    contents += [framed(once, b""), framed(once, data[:-1]), framed(once, data + b"x"), b"", b"\x00" * 7]
    assert bad(outcomes(folder, "model.safetensors", contents)) == []


def test_the_index_leads_nowhere_else(folder: Path) -> None:
    right = (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder.parent / "out.safetensors").write_bytes(right.read_bytes())
    (folder / "sub").mkdir()
    (folder / "sub" / "in.safetensors").write_bytes(right.read_bytes())
    index = "model.safetensors.index.json"
    names = ["../out.safetensors", str(folder.parent / "out.safetensors"), "sub/in.safetensors", "./a.safetensors"]
    names += ["..", ".", "", "/", "a\0b", "a\\b", "~", "x" * 5000]
    for name in names:
        (folder / index).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert outcome(folder).startswith("refused: "), name
    maps = [raw for raw in VALUES if raw != "{}"] + ["{}", '{"x": 3}', '{"x": null}', '{"x": ["a.safetensors"]}']
    texts = [with_raw({}, ("weight_map",), raw) for raw in maps] + ["", "[]", "{}", DEEP, "null"]
    assert {came[:7] for _, came in outcomes(folder, index, texts)} == {"refused"}
    (folder / index).write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}}))
    assert outcome(folder) == "runs"


def test_a_tensor_that_two_files_have_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] * 2}, folder / "b.safetensors")
    index = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert "model.norm.weight is stored twice, in a.safetensors and in b.safetensors" in outcome(folder)


def test_an_adapter_is_not_passed_over(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "contains an adapter (adapter_config.json)" in outcome(folder)
    (folder / "config.json").unlink()  # as peft saves it: the adapter alone
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    assert "contains an adapter (adapter_config.json)" in outcome(folder)
    with pytest.raises(CheckpointError, match="contains an adapter"):
        open_full_precision(folder, "cpu")
    with pytest.raises(CheckpointError, match="contains an adapter"):
        quantize_checkpoint(str(folder), make_scheme("int8"), folder.parent / "out")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=f"{re.escape(str(folder))}: cannot read config.json"):
        open_full_precision(folder, "cpu")


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_what_quantisation_says_of_itself_may_be_anything(tiny: TinyPair, tmp_path: Path, method: str) -> None:
    model = load_model(tiny.target, torch.float32)
    quantize_model(model, make_scheme(method), None)
    folder = tmp_path / "quantised"
    save_quantized(model, tiny.target, folder)
    assert outcome(folder) == "runs"
    stored = json.loads((folder / "config.json").read_text())
    entries = ("quant_method", "format", "version", "bits", "group_size", "outliers", "method", "unheard_of")
    texts = [with_raw(stored, ("quantization_config", entry), raw) for entry in entries for raw in VALUES]
    assert bad(outcomes(folder, "config.json", texts)) == []


@pytest.mark.parametrize("content", ["", "[]", "7", "{", DEEP])
def test_a_tokenizer_config_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json is (not valid JSON|not a JSON object|nested too deeply)"
    ):
        LLM(str(folder), device="cpu", enforce_eager=True)


@pytest.mark.parametrize(
    "content",
    [
        '{"added_tokens_decoder": 3}',
        '{"added_tokens_decoder": {"x": "<a>"}}',
        '{"added_tokens_decoder": {"0": {"content": 5}}}',
        '{"additional_special_tokens": "<a>"}',
        '{"additional_special_tokens": [7]}',
    ],
)
def test_an_invalid_added_token_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"a token in \S*tokenizer_config\.json is invalid \(.*\); fetch it again"
    ):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("content", ['{"tokenizer_class": 7}', '{"eos_token": 5}'])
def test_what_only_transformers_reads_of_a_tokenizer_config_does_not_stop_the_engine(
    folder: Path, content: str
) -> None:
    """`get_tokenizer` hands out what transformers makes of all the files, or says that it makes nothing of them."""
    (folder / "tokenizer_config.json").write_text(content)
    assert outcome(folder) == "runs"
    ask: Callable[[], Any] = LLM(str(folder), device="cpu", enforce_eager=True).get_tokenizer
    try:
        ask()
    except CheckpointError as problem:
        assert "transformers cannot read the tokenizer" in str(problem)
