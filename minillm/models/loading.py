"""Checkpoints in Hugging Face format, in and out: `config.json` and safetensors, never pickle, never their own code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm import hardware
from minillm.errors import CheckpointError, ConfigError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.models.config_json import end_tokens, llama_config, model_config
from minillm.models.config_schema import GenerationConfig
from minillm.models.decoder import Decoder, DecoderLayer
from minillm.models.hub import resolve
from minillm.models.json_files import checked, read_json, shown
from minillm.models.names import EMBEDDING, UNEMBEDDING, Part, stored_parts
from minillm.models.shards import SINGLE, Shards
from minillm.models.staging import Staging
from minillm.models.unfilled import Unfilled
from minillm.quantization.base import QuantizedLinear, Scheme
from minillm.quantization.checkpoint import (
    Place,
    fill_places,
    is_linear_weight,
    is_ours,
    misfits,
    quantized_places,
    scheme_of,
)
from minillm.quantization.model import decoder_linears, empty_like
from minillm.quantization.schemes import make_scheme

__all__ = ["llama_config", "load_config", "load_model", "resolve", "save_llama", "stored_tensors", "widen"]

RECOMPUTED = "rotary_emb.inv_freq"
"""Old Llama checkpoints store these frequencies; they follow from the configuration."""


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json`, and from `generation_config.json` the further tokens that end a text.

    Raises `CheckpointError` if there is none, or it describes a model that minillm cannot run.
    """
    try:
        stored = read_json(folder / "config.json")
        if is_ours(stored.get("quantization_config")):
            stored.pop("quantization_config")
        config = model_config(stored)
    except CheckpointError as problem:
        raise CheckpointError(f"{folder}: {problem}") from None
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder} holds an adapter (adapter_config.json), whose weights minillm does not add; merge it into the "
            "model with peft's merge_and_unload() and save that"
        )
    generation_config = folder / "generation_config.json"
    if not (generation_config.exists() or generation_config.is_symlink()):
        return config
    try:
        generation = checked(read_json(generation_config), GenerationConfig)
        further = end_tokens(generation.eos_token_id, config.vocab_size)
    except CheckpointError as problem:
        raise CheckpointError(f"{folder}, generation_config.json: {problem}") from None
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *further))))


def stored_scheme(folder: Path) -> Scheme | None:
    """How the weights in `folder` are quantised; None: not at all. Raises `CheckpointError` if it cannot be told."""
    quantization = read_json(folder / "config.json").get("quantization_config")
    try:
        return scheme_of(quantization) if is_ours(quantization) else None
    except CheckpointError as problem:
        raise CheckpointError(f"{folder}: {problem}") from None


def load_model(
    name_or_folder: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
    keep_stored: bool = False,
) -> Decoder:
    """The model of that name or folder (see `resolve`), on `device`, for inference: no parameter asks for a gradient.

    A quantised checkpoint (see `minillm quantize`) loads as what it is. `quantization` of `int8`, `w8a8` or `int4`
    rounds a full-precision one while it loads; for a quantised one it may only say what that is.

    `keep_stored` is for someone who takes the weights over in the bits that the file has, as an executor on a CPU does:
    if `dtype` is float32 and all matrices are stored in one kind of 16-bit floats, they stay in it. Norms and biases
    have `dtype` all the same. Such a model is not to be run in PyTorch; `widen` makes it one that is.

    Tensors go a megabyte at a time from the file to their rows of the model, on the CPU or on a GPU, so beside
    the model itself there is no memory that grows with it (see `staging`). Raises `CheckpointError`, before any weight
    is read, if a tensor is missing, is one too many or has another shape than `config.json` implies; `ConfigError` if
    `quantization` is not what the checkpoint is; `UnsupportedError` if there is no such scheme, or it cannot be done
    while a model loads.
    """
    folder = resolve(str(name_or_folder))
    shards = Shards(folder)
    staging = Staging(shards, device)
    config = _untie_if_stored_apart(load_config(folder), shards)
    stored = stored_scheme(folder)
    scheme = choose_scheme(str(name_or_folder), quantization, stored)
    parts = stored_parts(config)
    places = quantized_places(parts, stored) if stored else {}
    if stored:
        parts = {name: part for name, part in parts.items() if not is_linear_weight(part)}
    _check(folder, parts, places, shards, spare={UNEMBEDDING} if config.tie_word_embeddings else set())
    _check_tables(folder, config)
    narrow = _dtype_of_matrices(parts, shards) if keep_stored and dtype == torch.float32 else None
    model = _unfilled_model(config, Unfilled(device, dtype, narrow or dtype), scheme)
    with torch.no_grad():
        for name, part in parts.items():
            _fill(model, part, name, staging)
        if stored:
            fill_places(model, places, staging)
    return model.requires_grad_(False).eval()


def widen(model: Decoder, dtype: torch.dtype) -> Decoder:
    """Bring every parameter to `dtype`, in place and one at a time, after `load_model(…, keep_stored=True)`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def choose_scheme(name: str, wanted: str | None, stored: Scheme | None) -> Scheme | None:
    """The scheme to load the checkpoint `name` with, given the option and how it is stored; None: full precision.

    Raises `ConfigError` if the two contradict each other, `UnsupportedError` for what cannot be done at loading.
    """
    if wanted is None:
        return stored
    scheme = make_scheme(wanted)
    if stored is not None and stored.method != wanted:
        raise ConfigError(
            f"quantization={wanted!r}, but {name} is quantised with {stored.method!r}; leave the option out, or load "
            "the original checkpoint"
        )
    if stored is None and scheme.needs:
        raise UnsupportedError(
            f"quantization={wanted!r} needs calibration and so cannot be done while {name} loads; make a quantised "
            f"checkpoint with `minillm quantize {name} --scheme {wanted} --out FOLDER` and load FOLDER"
        )
    return stored or scheme


def save_llama(model: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Write `model` as a Llama checkpoint that transformers' `AutoModelForCausalLM` loads.

    Raises `UnsupportedError` if a Llama cannot be like that.
    """
    stored_config = llama_config(model.config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in stored_tensors(model)}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(stored_config, indent=2) + "\n", encoding="utf-8")


def stored_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors under the names a checkpoint gives them: q, k, v apart, gate and up apart."""
    for name, part in stored_parts(model.config).items():
        yield name, part.of(model)


def _untie_if_stored_apart(config: ModelConfig, shards: Shards) -> ModelConfig:
    """Some checkpoints claim tied embeddings but bring two different ones; those count (as in transformers)."""
    if not config.tie_word_embeddings or not {EMBEDDING, UNEMBEDDING} <= shards.names:
        return config
    return replace(config, tie_word_embeddings=Staging(shards).same(EMBEDDING, UNEMBEDDING))


def _dtype_of_matrices(parts: dict[str, Part], shards: Shards) -> torch.dtype | None:
    """The 16-bit dtype that all matrices are stored in; None if there is no such."""
    dtypes = {shards.dtype(name) for name, part in parts.items() if len(part.shape) == 2}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16} else None


def _check(folder: Path, parts: dict[str, Part], places: dict[str, Place], shards: Shards, spare: set[str]) -> None:
    found = {name for name in shards.names if not name.endswith(RECOMPUTED)}
    wanted = parts.keys() | places.keys()
    _complain(folder, "lacks", sorted(wanted - found))
    _complain(folder, "has tensors that its config.json leaves no place for:", sorted(found - wanted - spare))
    shapes = ((name, shards.shape(name), part.shape) for name, part in parts.items())
    wrong = [f"{name} {list(found)} (should be {list(right)})" for name, found, right in shapes if found != right]
    wrong += misfits(places, shards)
    _complain(folder, "has tensors of another shape than its config.json says:", wrong)


def _check_tables(folder: Path, config: ModelConfig) -> None:
    """The one allocation that no file vouches for: the cosines and sines of all positions, and what makes them."""
    needed, free = 14 * config.max_position_embeddings * config.head_dim, hardware.memory().free
    if needed > free:
        raise CheckpointError(
            f"{folder}: max_position_embeddings is {config.max_position_embeddings}; the tables of so many positions "
            f"need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; lower it in config.json"
        )


def _fill(model: Decoder, part: Part, name: str, staging: Staging) -> None:
    """Copy one stored tensor to its rows of the model, quantised on the way if that is how the model keeps them."""
    linear = model.get_submodule(part.parameter.rpartition(".")[0])
    if not (is_linear_weight(part) and isinstance(linear, QuantizedLinear)):
        staging.copy(name, part.of(model))
        return
    try:
        for row, piece in staging.pieces(name):
            linear.fill(linear.scheme.quantize(piece), part.first_row + row)
    except CheckpointError as problem:
        raise CheckpointError(f"{name}: {problem}") from None


def _unfilled_model(config: ModelConfig, parameters: Unfilled, scheme: Scheme | None) -> Decoder:
    """The model with its memory allocated and not filled; to be quantised, one layer in full precision at a time."""
    with parameters:
        model = Decoder(config if scheme is None else replace(config, num_layers=0))
    model.config = config
    for i in range(config.num_layers if scheme else 0):
        with parameters:
            model.layers.append(DecoderLayer(config, i))
        _shrink_linears(model, scheme)
    return model.to(parameters.device)


def _shrink_linears(model: Decoder, scheme: Scheme | None) -> None:
    """Replace the linears that are not quantised yet by empty quantised ones, and let go of them."""
    for name, linear in list(decoder_linears(model)):
        if scheme is not None and not isinstance(linear, QuantizedLinear):
            with Unfilled(linear.weight.device):
                model.set_submodule(name, empty_like(linear, scheme))


def _complain(folder: Path, what: str, tensors: list[str]) -> None:
    if tensors:
        more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
        named = [name if name.isprintable() and 0 < len(name) < 150 else shown(name) for name in tensors[:4]]
        raise CheckpointError(f"{folder} {what} {', '.join(named)}{more}")
