"""Checkpoints on disk: read whole and once, or refused with the reason before anything is computed."""

from __future__ import annotations

import json
import mmap
import weakref
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.errors import CheckpointError
from minillm.models import empty_weights, staging
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.empty_weights import mapped_empty
from minillm.models.loading import cast_model, load_config, load_model, open_full_precision, save_llama, stored_tensors
from minillm.models.shards import Shards
from tests.models.hf_checkpoints import make

WEIGHTS = "model.safetensors"


def random_decoder(tied: bool = False) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(30, 16, 24, 2, 4, 2, 4, 32, tie_word_embeddings=tied, eos_token_ids=(0,)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(random_decoder(), tmp_path, torch.float32)
    return tmp_path


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of the checkpoint; None removes one. `__` in a name stands for a dot."""
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / WEIGHTS)


def same(ours: Decoder, theirs: Decoder) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_written_is_read(tied: bool, tmp_path: Path) -> None:
    model = random_decoder(tied)
    save_llama(model, tmp_path, torch.float32)
    loaded = load_model(tmp_path, torch.float32)
    assert same(loaded, model)
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) is tied


def test_a_checkpoint_in_many_shards_is_one_model(tmp_path: Path) -> None:
    make("qwen3, biases and window", tmp_path / "one")
    make("qwen3, biases and window", tmp_path / "many", max_shard_size="4KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 5
    assert same(load_model(tmp_path / "many", torch.float32), load_model(tmp_path / "one", torch.float32))


class Reads:
    """Watches what is read from files, and where to: stands in for `Shards.read`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes, self.largest, self.places = 0, 0, set[int]()
        monkeypatch.setattr(staging, "PIECE_BYTES", 200)
        monkeypatch.setattr(Shards, "tensor", lambda *_: pytest.fail("a whole tensor was read"))
        monkeypatch.setattr(Shards, "read", partialmethod(Reads._read, watch=self, really=Shards.read))

    @staticmethod
    def _read(shards: Shards, name: str, into: Tensor, first_row: int = 0, *, watch: Reads, really: Callable) -> None:
        assert into.device.type == "cpu"
        watch.num_bytes += into.nbytes
        watch.largest = max(watch.largest, into.nbytes)
        watch.places.add(into.data_ptr())
        really(shards, name, into, first_row)


class LargestOnCpu(TorchDispatchMode):
    """Notes the largest tensor on the CPU that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type == "cpu":
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_of_a_file_is_in_memory_at_once_than_a_piece(
    dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    assert same(load_model(folder, dtype), random_decoder().to(dtype))
    assert reads.num_bytes == sum(t.nbytes for _, t in stored_tensors(random_decoder()))
    assert reads.largest <= 200
    assert len(reads.places) <= 4  # one piece of memory, that has grown


def test_a_model_for_another_device_is_never_on_the_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device stands in for a GPU: it is not the CPU, and keeps nothing."""
    reads = Reads(monkeypatch)
    with LargestOnCpu() as largest:
        model = load_model(folder, torch.float32, "meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert reads.num_bytes == sum(t.nbytes for _, t in stored_tensors(random_decoder()))
    tables = model.rope.cos.nbytes  # made on the CPU, then moved; they come from no file
    assert largest.num_bytes <= max(200, tables) < model.embed_tokens.weight.nbytes


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_may_stay_in_the_bits_of_the_file_and_be_widened_later(
    stored: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    save_llama(random_decoder(tied), tmp_path, stored)
    model = load_model(tmp_path, torch.float32, keep_stored_dtype=True)
    assert {p.dtype for p in model.parameters() if p.ndim == 2} == {stored}
    assert {p.dtype for p in model.parameters() if p.ndim == 1} == {torch.float32}
    right = load_model(tmp_path, torch.float32)
    assert {p.dtype for p in right.parameters()} == {torch.float32}
    assert same(cast_model(model, torch.float32), right)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (model.lm_head.weight is model.embed_tokens.weight) is tied
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_only_one_kind_of_16_bit_floats_is_kept_and_only_for_float32(folder: Path) -> None:
    def kept(dtype: torch.dtype = torch.float32) -> set[torch.dtype]:
        return {parameter.dtype for parameter in load_model(folder, dtype, keep_stored_dtype=True).parameters()}

    assert kept() == {torch.float32}  # as they are stored
    save_llama(random_decoder(), folder, torch.bfloat16)
    assert kept() == {torch.float32, torch.bfloat16}
    assert kept(torch.float16) == {torch.float16}
    rewrite(folder, model__layers__1__self_attn__k_proj__weight=torch.ones(8, 16))
    assert kept() == {torch.float32}


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[mmap.mmap]:
    """The pages that were asked of the system and not given back."""
    maps = weakref.WeakSet[mmap.mmap]()

    def watched(*args: Any, **options: Any) -> mmap.mmap:
        made = really(*args, **options)
        maps.add(made)
        return made

    really = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", watched)
    return maps


def test_memory_of_a_weight_goes_back_to_the_system_with_the_weight(maps: weakref.WeakSet[mmap.mmap]) -> None:
    matrix = mapped_empty((300, 256), torch.bfloat16)
    assert [len(pages) for pages in maps] == [300 * 256 * 2]
    matrix.fill_(2)
    row = matrix[299]
    del matrix
    assert len(maps) == 1 and bool((row == 2).all())  # a view keeps it
    del row
    assert not maps
    assert mapped_empty((3, 2), torch.float64).shape == (3, 2) and not maps  # too small to be worth a page


@pytest.mark.parametrize(("quantization", "tensors"), [(None, 4), ("int8", 8)])
def test_each_weight_has_memory_of_its_own(
    quantization: str | None,
    tensors: int,
    folder: Path,
    maps: weakref.WeakSet[mmap.mmap],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(empty_weights, "MAPPED_BYTES", 1)
    model = load_model(folder, torch.float32, quantization=quantization)
    assert len(maps) == 2 + 2 * tensors  # two tables; in each of two layers as many as stand for its matrices
    model.layers[0].qkv_proj = torch.nn.Identity()
    assert len(maps) == 2 + 2 * tensors - tensors // 4


@pytest.mark.parametrize(
    ("matrices", "norms", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, "bfloat16"),
        (torch.bfloat16, torch.float32, "float32"),
        (torch.bfloat16, torch.float16, "float32"),
    ],
)
def test_a_config_without_a_dtype_has_that_of_the_weights(
    matrices: torch.dtype, norms: torch.dtype, expected: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert load_config(folder).dtype == "float32", "as the file states"
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": None}))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.to(norms if tensor.ndim == 1 else matrices) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    assert load_config(folder).dtype == expected


def test_weights_take_the_dtype_that_is_asked_for(folder: Path) -> None:
    model = load_model(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.embed_tokens.weight, random_decoder().embed_tokens.weight.bfloat16())
    assert model.rope.cos.dtype == torch.float32


def test_a_loaded_model_is_for_inference(folder: Path) -> None:
    model = load_model(folder, torch.float32)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_tied_embeddings_may_be_stored_twice(tmp_path: Path) -> None:
    model = random_decoder(tied=True)
    save_llama(model, tmp_path, torch.float32)
    rewrite(tmp_path, lm_head__weight=model.embed_tokens.weight.detach().clone())
    assert same(load_model(tmp_path, torch.float32), model)


def test_a_tied_embedding_may_be_stored_as_the_unembedding(tmp_path: Path) -> None:
    """As `safetensors.torch.save_model` leaves it."""
    model = random_decoder(tied=True)
    save_llama(model, tmp_path, torch.float32)
    rewrite(tmp_path, model__embed_tokens__weight=None, lm_head__weight=model.embed_tokens.weight.detach().clone())
    assert same(load_model(tmp_path, torch.float32), model)
    config, tensors = open_full_precision(tmp_path, "cpu")
    assert config.tie_word_embeddings and tensors.shards.names == dict(stored_tensors(model)).keys()
    save_llama(random_decoder(), tmp_path, torch.float32)
    rewrite(tmp_path, model__embed_tokens__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks model\.embed_tokens\.weight"):
        load_model(tmp_path, torch.float32)


def test_names_may_lack_the_prefix_of_the_model(folder: Path) -> None:
    stored = load_file(folder / WEIGHTS)
    save_file({name.removeprefix("model."): tensor for name, tensor in stored.items()}, folder / WEIGHTS)
    assert same(load_model(folder, torch.float32), random_decoder())
    _, tensors = open_full_precision(folder, "cpu")
    assert tensors.shards.names == stored.keys()


def test_two_different_embeddings_count_whatever_the_config_claims(tmp_path: Path) -> None:
    save_llama(random_decoder(tied=True), tmp_path, torch.float32)
    rewrite(tmp_path, lm_head__weight=torch.ones(30, 16))
    model = load_model(tmp_path, torch.float32)
    assert torch.equal(model.lm_head.weight, torch.ones(30, 16))
    assert not model.config.tie_word_embeddings


def test_embeddings_that_are_single_numbers_are_named(tmp_path: Path) -> None:
    save_llama(random_decoder(tied=True), tmp_path, torch.float32)
    rewrite(tmp_path, model__embed_tokens__weight=torch.tensor(1.0), lm_head__weight=torch.tensor(1.0))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight \[\] \(should be \[30, 16\]\)"):
        load_model(tmp_path, torch.float32)


def test_frequencies_that_old_checkpoints_store_are_passed_over(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(2))
    assert same(load_model(folder, torch.float32), random_decoder())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, "lacks model.norm.weight$"),
        ({"lm_head__weight": None}, "lacks lm_head.weight$"),
        ({"model__layers__1__self_attn__k_proj__weight": None}, "lacks model.layers.1.self_attn.k_proj.weight$"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.ones(16)}, "do not fit its config.json: .*q_proj.bias$"),
        ({"model__layers__2__mlp__up_proj__weight": torch.ones(24, 16)}, "do not fit its config.json: .*2.mlp.up_proj"),
        (
            {"model__layers__0__self_attn__v_proj__weight": torch.ones(9, 16)},
            r"shape other than its config.json implies: .*v_proj.weight \[9, 16\] \(should be \[8, 16\]\)$",
        ),
        ({"model__norm__weight": torch.ones(16, dtype=torch.int8)}, "model.norm.weight is stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(folder: Path, changes: dict, message: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, torch.float32)


def test_a_long_list_of_missing_tensors_is_cut(folder: Path) -> None:
    save_file({"x": torch.ones(1)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight, .* and 17 more$"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, kept: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated or corrupt .* fetch it again"):
        load_model(folder, torch.float32)


def test_a_corrupt_header_is_refused(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[20:60] = b"\xff" * 40
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        load_model(folder, torch.float32)


def test_pickle_is_never_opened(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"contains pytorch_model.bin, but minillm reads only safetensors"):
        load_model(folder, torch.float32)


def test_a_folder_without_weights_says_what_it_lacks(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"contains neither model.safetensors nor model.safetensors.index.json"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not a valid index"),
        ("[]", "is not a valid index"),
        ('{"weight_map": {"x": 3}}', "is not a valid index"),
        ('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}', "lacks a.safetensors, b.safetensors of its 2"),
        ('{"weight_map": {"x": "../kept.safetensors"}}', "names '../kept.safetensors', which is not a file in"),
    ],
)
def test_a_broken_index_is_refused(folder: Path, index: str, message: str) -> None:
    (folder / WEIGHTS).rename(folder.parent / "kept.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, torch.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read config.json \(No such file"),
        ("{", "config.json is not valid JSON"),
        ("[1]", "config.json is not a JSON object"),
        (
            '{"architectures": ["BertModel"]}',
            "architecture 'BertModel' is not supported; minillm supports LlamaForCausalLM",
        ),
    ],
)
def test_a_config_that_says_nothing_is_refused(folder: Path, content: str | None, message: str) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as refused:
        load_config(folder)
    assert str(folder) in str(refused.value)


def test_code_in_a_checkpoint_is_not_run(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('ran')")
    stored = json.loads((folder / "config.json").read_text())
    stored["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(stored))
    assert same(load_model(folder, torch.float32), random_decoder())
