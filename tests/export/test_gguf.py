"""A GGUF holds the checkpoint: every tensor comes back, and llama.cpp computes what transformers computes."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import tokenizers
import torch
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from minillm import LLM, SamplingParams, cli
from minillm.bench.llama_cpp import SETTINGS, LlamaCpp
from minillm.bench.systems import prompt_ids
from minillm.commands import export as command
from minillm.errors import CheckpointError, ConfigError, UnsupportedError
from minillm.export import gguf as exporter
from minillm.export.gguf import TYPES, architecture_of, export_gguf, interleave
from minillm.export.gguf_tokenizer import SPLITS, fitting_split, gguf_tokenizer
from minillm.models.config import RopeConfig
from minillm.models.held_out import held_out_prompts
from minillm.models.hub import resolve
from minillm.models.loading import load_config, load_model, save_llama, stored_tensors
from minillm.tokenizer import BYTE_OF, Tokenizer
from tests.conftest import TinyPair
from tests.models.hf_checkpoints import CASES, make

llama_cpp_only = pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="llama-cpp-python is missing")

REFUSED = {
    "llama, yarn rope with its own numbers": "YaRN with a custom",
    "llama, yarn rope with mscale": "YaRN with a custom",
    "mistral, window": "a sliding window of 5 tokens",
    "mistral, window in listed layers": "a sliding window of 5 tokens",
    "qwen2, window in the upper layers": "a sliding window of 6 tokens",
    "qwen2, window in listed layers": "a sliding window of 4 tokens",
    "qwen3, biases and window": "a sliding window of 6 tokens",
    "smollm3": "layers without RoPE",
    "smollm3, listed layers and window": "a sliding window of 5 tokens",
    "smollm3, window in listed layers although it is switched off": "a sliding window of 5 tokens",
}
ARCHITECTURES = {"qwen2": "qwen2", "qwen2, window switched off": "qwen2", "qwen3": "qwen3"}


def halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo `interleave` channel by channel: neighbours 2i and 2i + 1 of a head were i and i + head_dim / 2."""
    back = torch.empty_like(rows)
    head_dim = rows.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(head_dim):
            back[head * head_dim + i // 2 + (i % 2) * head_dim // 2] = rows[head * head_dim + i]
    return back


@pytest.fixture(scope="module")
def tiny_file(tiny: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    export_gguf(str(tiny.target), file, "f32")
    return file


# --- what the file holds ---------------------------------------------------------------------------------------------


def test_every_tensor_comes_back_in_its_own_order(tiny: TinyPair, tiny_file: Path) -> None:
    model = load_model(tiny.target, torch.float32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_layers)
    found = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(tiny_file).tensors}
    for name, tensor in stored_tensors(model):
        own = found.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        if ".q_proj." in name:
            assert not torch.equal(own, tensor)
            own = halves(own, model.config.num_heads)
        elif ".k_proj." in name:
            own = halves(own, model.config.num_kv_heads)
        assert torch.equal(own, tensor), name
    assert not found


@pytest.mark.parametrize("name", ["owner/some-model", "some-model", "elsewhere/some-model/"])
def test_the_name_is_the_models_and_not_that_of_the_hubs_folder(
    name: str, tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots" / "0a1b2c3d"
    shutil.copytree(tiny.target, snapshot)
    monkeypatch.setattr("minillm.export.gguf.resolve", lambda _: snapshot)
    export_gguf(name, tmp_path / "model.gguf", "f32")
    field = gguf.GGUFReader(tmp_path / "model.gguf").get_field("general.name")
    assert field.contents() == "some-model"


def test_interleaving_takes_the_rows_of_each_head_apart() -> None:
    assert interleave(torch.arange(12), 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    bias = torch.randn(24)
    assert torch.equal(halves(interleave(bias, 3), 3), bias)


def test_numbers_of_the_shape_are_those_of_the_config(tiny: TinyPair, tiny_file: Path) -> None:
    config = load_config(tiny.target)
    fields = gguf.GGUFReader(tiny_file).fields
    found = {name: field.contents() for name, field in fields.items() if not name.startswith("tokenizer.ggml.t")}
    assert found["general.architecture"] == "llama"
    expected = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    assert {key: found[f"llama.{key}"] for key in expected} == expected
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config.rms_norm_eps)
    assert found["llama.rope.freq_base"] == config.rope.theta
    assert found["tokenizer.ggml.eos_token_id"] == 0 and found["tokenizer.ggml.add_bos_token"] is False


def test_tokens_and_merges_are_the_tokenizers(tiny: TinyPair, tiny_file: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny.target)
    backend = tokenizer.backend
    fields = gguf.GGUFReader(tiny_file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens == [backend.id_to_token(i) for i in range(300)]
    types = fields["tokenizer.ggml.token_type"].contents()
    assert {i for i, kind in enumerate(types) if kind == 3} == tokenizer.special_ids  # control tokens
    assert set(types) == {1, 3}
    merges = fields["tokenizer.ggml.merges"].contents()
    assert len(merges) == 300 - 256 - len(tokenizer.special_ids)
    assert all(merge.replace(" ", "") in tokens for merge in merges)


def with_template(source: Path, folder: Path, template: str, config_bos: int | None) -> Path:
    """Copy a checkpoint; its tokenizer puts special tokens around a text, and `config.json` names `config_bos`."""
    shutil.copytree(source, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(token.content, token_id) for token_id, token in backend.get_added_tokens_decoder().items()]
    pieces = template.format(*(text for text, _ in special)).split()
    backend.post_processor = TemplateProcessing(single=pieces, special_tokens=special)
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": config_bos}))
    return folder


@pytest.mark.parametrize("config_bos", [None, 0, 1])
def test_the_file_names_the_token_that_the_tokenizer_puts_before_a_text(
    tiny: TinyPair, tmp_path: Path, config_bos: int | None
) -> None:
    folder = with_template(tiny.target, tmp_path / "model", "{1} $A", config_bos)
    expected = Tokenizer.from_folder(folder).encode("a")[0]
    export = export_gguf(str(folder), tmp_path / "out.gguf", "f32")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.ggml.bos_token_id"].contents() == expected
    assert export.tokenizer.agreement == gguf_tokenizer(Tokenizer.from_folder(tiny.target), 300).agreement > 0


@pytest.mark.parametrize("template", ["$A {1}", "{1} $A {0}", "{0} {1} $A"])
def test_tokens_around_a_text_that_the_file_cannot_state_are_no_agreement(
    tiny: TinyPair, tmp_path: Path, template: str
) -> None:
    folder = with_template(tiny.target, tmp_path / "model", template, None)
    assert gguf_tokenizer(Tokenizer.from_folder(folder), 300).agreement == 0


def test_a_normalizer_that_llama_cpp_does_not_have_lowers_the_agreement(tiny: TinyPair) -> None:
    backend = Tokenizer.from_folder(tiny.target).backend
    _, plain = fitting_split(backend)
    backend.normalizer = normalizers.Lowercase()
    assert fitting_split(backend)[1] < plain


def test_words_that_no_merges_make_lower_the_agreement_where_llama_cpp_does_not_take_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocabulary = {token: i for i, token in enumerate([*BYTE_OF, "Ġreturn"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS["qwen2"]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    assert fitting_split(backend) == ("llama-bpe", 1.0)
    others = {name: split for name, split in SPLITS.items() if name != "llama-bpe"}
    monkeypatch.setattr("minillm.export.gguf_tokenizer.SPLITS", others)
    name, agreement = fitting_split(backend)
    assert name == "qwen2" and agreement < 1


def edit(folder: Path, name: str, **values: object) -> None:
    """Set entries of one of the checkpoint's JSON files; without a file it begins empty."""
    file = folder / name
    stored = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**stored, **values}))


@pytest.mark.parametrize(
    ("of_config", "of_tokenizer", "expected", "left_out"),
    [
        (0, "<|endoftext|>", (0,), None),
        (None, "<|endoftext|>", (0,), None),
        ([7, 0], "<|endoftext|>", (7, 0), "0 (<|endoftext|>)"),
        ([7, 9], "<|endoftext|>", (7, 9, 0), "9 ("),
        (7, None, (7,), None),
    ],
)
def test_the_file_names_one_end_of_text_and_the_summary_the_others(
    tiny: TinyPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    of_config: object,
    of_tokenizer: str | None,
    expected: tuple[int, ...],
    left_out: str | None,
) -> None:
    folder = shutil.copytree(tiny.target, tmp_path / "model")
    edit(folder, "config.json", eos_token_id=of_config)
    edit(folder, "tokenizer_config.json", eos_token=of_tokenizer)
    export = export_gguf(str(folder), tmp_path / "out.gguf", "f32")
    assert export.end_tokens == expected
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == expected[0]
    cli.main(["export", str(folder), "--gguf", str(tmp_path / "again.gguf")])
    printed = capsys.readouterr().out
    assert f"The file cannot name {left_out}" in printed if left_out else "cannot name" not in printed


def test_a_checkpoint_without_an_end_of_text_is_refused_before_it_is_loaded(
    tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny.target, tmp_path / "model")
    edit(folder, "config.json", eos_token_id=None)
    edit(folder, "tokenizer_config.json", eos_token=None)
    monkeypatch.setattr(exporter, "load_model", lambda *_: pytest.fail("loaded first"))
    with pytest.raises(UnsupportedError, match=r"names no end-of-text token.*; name one as eos_token in tokenizer_con"):
        export_gguf(str(folder), tmp_path / "out.gguf", "f32")
    assert list(tmp_path.iterdir()) == [folder]


def test_chat_templates_are_written_or_missed(
    tiny: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny.target, tmp_path / "model")
    cli.main(["export", str(folder), "--gguf", str(tmp_path / "none.gguf")])
    assert "No chat template" in capsys.readouterr().out
    assert "tokenizer.chat_template" not in gguf.GGUFReader(tmp_path / "none.gguf").fields
    edit(folder, "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    cli.main(["export", str(folder), "--gguf", str(tmp_path / "one.gguf")])
    assert "No chat template" not in capsys.readouterr().out
    fields = gguf.GGUFReader(tmp_path / "one.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages[0].content }}"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    export_gguf(str(folder), tmp_path / "two.gguf", "f32")
    fields = gguf.GGUFReader(tmp_path / "two.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert fields["tokenizer.chat_template.tool_use"].contents() == "{{ tools }}"


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_smaller_types_round_to_nearest_and_leave_vectors_alone(tiny: TinyPair, tmp_path: Path, kind: str) -> None:
    """Rows of 48 have no whole number of Q8_0's blocks of 32, so they are f16; `down` has rows of 96."""
    export_gguf(str(tiny.target), tmp_path / "out.gguf", kind)
    model = load_model(tiny.target, torch.float32)
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert all(t.tensor_type.name == "F32" for t in found.values() if len(t.shape) == 1)
    own = found["blk.1.ffn_down.weight"]
    assert own.tensor_type.name == TYPES[kind]
    assert found["blk.1.ffn_up.weight"].tensor_type.name == ("F16" if kind == "q8_0" else TYPES[kind])
    down = dict(stored_tensors(model))["model.layers.1.mlp.down_proj.weight"]
    error = (torch.tensor(gguf.quants.dequantize(own.data, own.tensor_type)) - down).abs()
    if kind == "q8_0":
        step = down.view(-1, 32).abs().amax(1) / 127
        assert (error.view(-1, 32) <= 0.57 * step[:, None]).all()  # half a step, and 127 times what f16 takes of it
    else:
        assert (error <= down.abs() * (2**-11 if kind == "f16" else 2**-8) + 1e-7).all()


def with_weight(source: Path, folder: Path, value: float) -> Path:
    """Save the model of `source` with `value` as the first weight of a matrix."""
    model = load_model(source, torch.float32)
    model.layers[1].mlp.down_proj.weight[0, 0] = value
    save_llama(model, folder, torch.float32)
    return folder


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_a_weight_beyond_float16_is_written_by_a_type_that_holds_it(tiny: TinyPair, tmp_path: Path, kind: str) -> None:
    export_gguf(str(with_weight(tiny.target, tmp_path / "model", 1e6)), tmp_path / "out.gguf", kind)
    [own] = [t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors if t.name == "blk.1.ffn_down.weight"]
    assert gguf.quants.dequantize(own.data, own.tensor_type)[0, 0] == pytest.approx(1e6, rel=2**-8)


@pytest.mark.parametrize(
    ("value", "kind", "problem", "words"),
    [
        (1e6, "f16", UnsupportedError, r"holds a weight of size 1e\+06, and F16 ends at 65,504; export as bf16 or f32"),
        (-1e7, "q8_0", UnsupportedError, r"holds a weight of size 1e\+07, and Q8_0 ends at 8,319,008; export as"),
        (3.4e38, "bf16", UnsupportedError, r"holds .*, and BF16 ends at 3\.389531e\+38; export as f32$"),
        (3.4e38, "f16", UnsupportedError, r"holds .*, and F16 ends at 65,504; export as f32$"),
        (float("nan"), "f32", CheckpointError, "contains NaN or infinity"),
        (float("-inf"), "bf16", CheckpointError, "contains NaN or infinity"),
    ],
)
def test_a_weight_that_the_type_cannot_hold_is_refused(
    tiny: TinyPair, tmp_path: Path, value: float, kind: str, problem: type[Exception], words: str
) -> None:
    folder = with_weight(tiny.target, tmp_path / "model", value)
    with pytest.raises(problem, match=r"^blk\.1\.ffn_down\.weight " + words):
        export_gguf(str(folder), tmp_path / "out.gguf", kind)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    folder = make(case, tmp_path / "model").folder
    with pytest.raises(UnsupportedError, match=REFUSED[case]):
        export_gguf(str(folder), tmp_path / "out.gguf", "f32")
    assert not (tmp_path / "out.gguf").exists()


# --- what llama.cpp makes of it --------------------------------------------------------------------------------------


@llama_cpp_only
@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_llama_cpp_computes_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    """Every number of these checkpoints is random: a wrong order, base, scaling or bias would show."""
    checkpoint = make(case, tmp_path / "model")
    export = export_gguf(str(checkpoint.folder), tmp_path / "out.gguf", "f32")
    assert export.tokenizer is None and export.architecture == ARCHITECTURES.get(case, "llama")
    peer = LlamaCpp(tmp_path / "out.gguf", 64, 1, SETTINGS[1])
    expected = checkpoint.logits[-1]
    logits = torch.tensor(peer.logits(checkpoint.token_ids.tolist()))
    peer.close()
    error = (logits - expected).norm() / expected.norm()
    assert error < 1e-4, f"relative error {error:.1e}"


@llama_cpp_only
def test_llama_cpp_gives_minillms_greedy_tokens(tmp_path: Path) -> None:
    export_gguf("minicoder", tmp_path / "out.gguf", "f32")
    prompts = prompt_ids("minicoder", 4, 20, 120)
    peer = LlamaCpp(tmp_path / "out.gguf", 160, 1, SETTINGS[1])
    found = [peer.complete(ids, 32) for ids in prompts]
    tokenizer = Tokenizer.from_folder(resolve("minicoder"))
    texts = [prompt.prompt for prompt in held_out_prompts()] + ["x = 'ümläut'\n\t<|endoftext|>12345.6e7 'twas"]
    assert [peer.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    peer.close()
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = LLM("minicoder", dtype="float32").generate(
        [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
    )
    assert [completion.token_ids for completion in found] == [output.outputs[0].token_ids for output in outputs]
    assert all(completion.num_decoded == 31 and completion.decode_s > 0 for completion in found)


@llama_cpp_only
def test_a_file_that_llama_cpp_does_not_take_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF no more")
    with pytest.raises(UnsupportedError, match=r"does not accept .*bad\.gguf"):
        LlamaCpp(tmp_path / "bad.gguf", 8, 1)


# --- trouble ---------------------------------------------------------------------------------------------------------


def test_an_export_that_fails_leaves_nothing_behind(
    tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf.quants, "quantize", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))  # mid-file
    with pytest.raises(KeyboardInterrupt):
        export_gguf(str(tiny.target), tmp_path / "out.gguf", "f32")
    assert not list(tmp_path.iterdir())


def test_the_unfinished_file_of_another_export_is_left_alone(
    tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "load_model", lambda *_: pytest.fail("loaded first"))
    part = tmp_path / "out.gguf.part"
    part.write_text("begun")
    with pytest.raises(ConfigError, match=r"out\.gguf\.part exists: another export to out\.gguf is running"):
        export_gguf(str(tiny.target), tmp_path / "out.gguf", "f32")
    assert part.read_text() == "begun"


def test_the_file_of_an_export_that_ended_meanwhile_is_left_alone(
    tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.gguf"

    def download(name: str) -> Path:
        file.write_text("complete")
        return Path(name)

    monkeypatch.setattr(exporter, "resolve", download)
    with pytest.raises(ConfigError, match=r"out\.gguf exists already"):
        export_gguf(str(tiny.target), file, "f32")
    assert file.read_text() == "complete" and list(tmp_path.iterdir()) == [file]


def test_mistakes_are_told_before_anything_is_loaded(
    tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "load_model", lambda *_: pytest.fail("loaded first"))
    (tmp_path / "taken.gguf").touch()
    for file, kind, words in (
        (tmp_path / "out.gguf", "q4", "'q4' is not available; there are: f32, f16, bf16, q8_0"),
        (tmp_path / "taken.gguf", "f32", "exists already"),
        (tmp_path / "no" / "out.gguf", "f32", "there is no folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            export_gguf(str(tiny.target), file, kind)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError, match=r'pip install "minillm-lessons\[peers\]"'):
        export_gguf(str(tiny.target), tmp_path / "out.gguf", "f32")


def test_a_quantised_checkpoint_is_not_rounded_twice(tiny: TinyPair, tmp_path: Path) -> None:
    cli.main(["quantize", str(tiny.target), "--scheme", "int8", "--out", str(tmp_path / "small")])
    with pytest.raises(UnsupportedError, match=r"is quantised \(int8\); export the original"):
        export_gguf(str(tmp_path / "small"), tmp_path / "out.gguf", "f32")


def test_a_broken_tokenizer_is_not_taken_for_none(tiny: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny.target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is truncated"):
        export_gguf(str(folder), tmp_path / "out.gguf", "f32")


def test_the_command_says_what_it_wrote(tiny: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.gguf"
    assert cli.main(["export", str(tiny.target), "--gguf", str(file), "--type", "q8_0"]) == 0
    printed = capsys.readouterr()
    assert f"{file}: {file.stat().st_size:,} bytes, architecture llama, q8_0" in printed.out
    assert "300 tokens, split as 'llama-bpe'" in printed.out and "writing: 100%" in printed.err
    assert cli.main(["export", str(tiny.target), "--gguf", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert set(command.TYPES) == set(TYPES)


def test_the_family_is_told_by_the_shape() -> None:
    assert architecture_of(load_config(resolve("minicoder"))) == "llama"


def test_yarn_with_default_numbers_is_exported_whether_they_are_stated_or_not() -> None:
    config = load_config(resolve("minicoder"))
    plain = {"factor": 4.0, "original_max_position_embeddings": 512}
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": 0.1 * math.log(4) + 1}
    for stated in ({}, usual):
        assert architecture_of(replace(config, rope=RopeConfig(1e4, "yarn", {**plain, **stated}))) == "llama"
    for stated in ({"beta_fast": 8.0}, {"beta_slow": 3.0}, {"truncate": False}, {"attention_factor": 1.0}):
        with pytest.raises(UnsupportedError, match=f"YaRN with a custom {next(iter(stated))} cannot be exported"):
            architecture_of(replace(config, rope=RopeConfig(1e4, "yarn", {**plain, **stated})))


def test_scaling_that_llama_cpp_reads_only_in_a_llama_is_refused() -> None:
    config = load_config(resolve("minicoder"))
    scaled = replace(config, rope=replace(config.rope, kind="llama3"))
    assert architecture_of(scaled) == "llama"
    with pytest.raises(UnsupportedError, match=r"'llama3' cannot be exported: llama\.cpp's qwen2"):
        architecture_of(replace(scaled, qkv_bias=True))
