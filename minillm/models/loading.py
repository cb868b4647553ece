"""Loads and saves Hugging Face checkpoints: `config.json` and safetensors, never pickle or code from the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm import hardware
from minillm.errors import CheckpointError, ConfigError, UnsupportedError
from minillm.json_files import read_json, short_repr, validated
from minillm.models.config import ModelConfig
from minillm.models.config_json import end_tokens, llama_config, model_config
from minillm.models.config_schema import GenerationConfig
from minillm.models.decoder import Decoder, DecoderLayer
from minillm.models.empty_weights import UninitialisedParameters
from minillm.models.hub import resolve
from minillm.models.quantize import decoder_linears, empty_like
from minillm.models.quantized_checkpoint import (
    Place,
    fill_places,
    is_linear_weight,
    is_minillm_format,
    mismatched_tensors,
    quantized_places,
    scheme_of,
)
from minillm.models.shards import DTYPES, FLOATS, SINGLE, Shards
from minillm.models.staging import Staging
from minillm.models.tensor_names import EMBEDDING, UNEMBEDDING, Part, decoder_shards, stored_parts
from minillm.quantization.base import QuantizedLinear, Scheme
from minillm.quantization.schemes import make_scheme

RECOMPUTED = "rotary_emb.inv_freq"
"""Old Llama checkpoints store these frequencies. They are ignored, because they follow from the configuration."""


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json`, and from `generation_config.json` the end-of-text tokens and defaults for sampling.

    As in vLLM, the end-of-text tokens of `config.json` count only without `generation_config.json`.

    Raises `CheckpointError` if `config.json` is missing or describes a model that minillm cannot run.
    """
    try:
        stored = _read_config(folder)
        if is_minillm_format(stored.get("quantization_config")):
            stored.pop("quantization_config")
        config = model_config(stored)
        if not (stored.get("dtype") or stored.get("torch_dtype")):
            config = replace(config, dtype=_dtype_of_weights(folder))
    except CheckpointError as problem:
        raise CheckpointError(f"{folder}: {problem}") from None
    generation_config = folder / "generation_config.json"
    if not (generation_config.exists() or generation_config.is_symlink()):
        return config
    try:
        generation = validated(read_json(generation_config), GenerationConfig)
        eos_token_ids = end_tokens(generation.eos_token_id, config.vocab_size)
    except CheckpointError as problem:
        raise CheckpointError(f"{folder}, generation_config.json: {problem}") from None
    return replace(config, eos_token_ids=eos_token_ids, sampling_defaults=generation.sampling_defaults())


def _dtype_of_weights(folder: Path) -> str:
    """The dtype that holds every stored float exactly, as in vLLM; float32 for weights that cannot be read, which
    `load_model` reports."""
    try:
        shards = Shards(folder)
    except CheckpointError:
        return "float32"
    stored = {dtype for dtype, _ in map(shards.header, shards.names)} & FLOATS or {"F32"}
    return str(reduce(torch.promote_types, map(DTYPES.__getitem__, stored))).removeprefix("torch.")


def stored_scheme(folder: Path) -> Scheme | None:
    """Return the scheme of a checkpoint that minillm quantised; None for any other.

    Raises `CheckpointError` if `config.json` is missing or its `quantization_config` is invalid.
    """
    try:
        quantization = _read_config(folder).get("quantization_config")
        return scheme_of(quantization) if is_minillm_format(quantization) else None
    except CheckpointError as problem:
        raise CheckpointError(f"{folder}: {problem}") from None


def _read_config(folder: Path) -> dict[str, Any]:
    if (folder / "adapter_config.json").exists():  # first: beside an adapter there may be no config.json
        raise CheckpointError(
            "it contains an adapter (adapter_config.json), which minillm cannot apply; merge it into the "
            "model with peft's merge_and_unload() and save the result"
        )
    return read_json(folder / "config.json")


def load_model(
    name_or_folder: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
    keep_stored_dtype: bool = False,
) -> Decoder:
    """Load the model of that name or folder (see `resolve`) to `device`, for inference: parameters need no gradient.

    A quantised checkpoint (see `minillm quantize`) loads as it is. A `quantization` of `int8`, `w8a8` or `int4`
    quantises a full-precision checkpoint while it loads; for a quantised one it must match the stored scheme.

    `keep_stored_dtype` keeps matrices in the dtype of the file, for a CPU executor that packs them in that dtype. It
    takes effect if `dtype` is float32 and all matrices are stored in the same 16-bit float dtype. Norms and biases
    still have `dtype`. PyTorch cannot run such a model until `cast_model` has cast it.

    Tensors are copied from the file to their rows of the model a megabyte at a time, on the CPU or to a GPU, so the
    memory needed beside the model does not grow with it (see `staging`). Raises `CheckpointError`, before memory for
    the model is taken, if a tensor is missing, unexpected or of a shape other than `config.json` implies; `ConfigError`
    if `quantization` contradicts the stored scheme; `UnsupportedError` if the scheme is unknown or cannot be applied
    while loading.
    """
    folder = resolve(str(name_or_folder))
    config = load_config(folder)
    shards = decoder_shards(folder, config)
    staging = Staging(shards, device)
    config = _untie_if_stored_apart(config, shards)
    stored = stored_scheme(folder)
    scheme = choose_scheme(str(name_or_folder), quantization, stored)
    parts = stored_parts(config)
    places = quantized_places(parts, stored) if stored else {}
    if stored:
        parts = {name: part for name, part in parts.items() if not is_linear_weight(part)}
    _check(folder, parts, places, shards, spare={UNEMBEDDING} if config.tie_word_embeddings else set())
    _check_rope_memory(folder, config)
    narrow = _dtype_of_matrices(parts, shards) if keep_stored_dtype and dtype == torch.float32 else None
    model = _uninitialised_model(config, UninitialisedParameters(device, dtype, narrow or dtype), scheme)
    with torch.no_grad():
        for name, part in parts.items():
            _load_tensor(model, part, name, staging)
        if stored:
            fill_places(model, places, staging)
    return model.requires_grad_(False).eval()


def open_full_precision(folder: Path, device: torch.device | str) -> tuple[ModelConfig, Staging]:
    """The configuration of a checkpoint, and its tensors, for a caller that loads a part of them.

    Raises `CheckpointError` as `load_model` does, `UnsupportedError` for a quantised checkpoint.
    """
    if (stored := stored_scheme(folder)) is not None:
        raise UnsupportedError(
            f"{folder} is quantised with {stored.method!r}, and only full-precision checkpoints load in parts; use the "
            "original checkpoint"
        )
    config = load_config(folder)
    shards = decoder_shards(folder, config)
    config = _untie_if_stored_apart(config, shards)
    spare = {UNEMBEDDING} if config.tie_word_embeddings else set()
    _check(folder, stored_parts(config), {}, shards, spare)
    _check_rope_memory(folder, config)
    return config, Staging(shards, device)


def cast_model(model: Decoder, dtype: torch.dtype) -> Decoder:
    """Cast every parameter to `dtype`, in place and one at a time, after `load_model(…, keep_stored_dtype=True)`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def choose_scheme(name: str, wanted: str | None, stored: Scheme | None) -> Scheme | None:
    """Return the scheme for loading the checkpoint `name`, given the option and the stored one; None: full precision.

    Raises `ConfigError` if the two contradict each other, `UnsupportedError` if the scheme needs calibration first.
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
            f"quantization={wanted!r} needs calibration, so it cannot be applied while {name} loads; make a quantised "
            f"checkpoint with `minillm quantize {name} --scheme {wanted} --out FOLDER` and load FOLDER"
        )
    return stored or scheme


def save_llama(model: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Write `model` as a Llama checkpoint that transformers' `AutoModelForCausalLM` loads.

    Raises `UnsupportedError` if the Llama architecture cannot represent it.
    """
    stored_config = llama_config(model.config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in stored_tensors(model)}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(stored_config, indent=2) + "\n", encoding="utf-8")


def stored_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors by checkpoint name, with q, k and v separate, and gate and up separate."""
    for name, part in stored_parts(model.config).items():
        yield name, part.of(model)


def _untie_if_stored_apart(config: ModelConfig, shards: Shards) -> ModelConfig:
    """Untie the embeddings if the checkpoint claims to tie them but stores two different matrices (as transformers)."""
    if not config.tie_word_embeddings or not {EMBEDDING, UNEMBEDDING} <= shards.names:
        return config
    if not shards.shape(EMBEDDING):  # a single number: `_check` says what shape it should have
        return config
    return replace(config, tie_word_embeddings=Staging(shards).same(EMBEDDING, UNEMBEDDING))


def _dtype_of_matrices(parts: dict[str, Part], shards: Shards) -> torch.dtype | None:
    """Return the 16-bit dtype in which all matrices are stored; None if it is not the same or not 16 bits."""
    dtypes = {shards.dtype(name) for name, part in parts.items() if len(part.shape) == 2}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16} else None


def _check(folder: Path, parts: dict[str, Part], places: dict[str, Place], shards: Shards, spare: set[str]) -> None:
    found = {name for name in shards.names if not name.endswith(RECOMPUTED)}
    wanted = parts.keys() | places.keys()
    _raise_if_any(folder, "lacks", sorted(wanted - found))
    _raise_if_any(folder, "has tensors that do not fit its config.json:", sorted(found - wanted - spare))
    shapes = ((name, shards.shape(name), part.shape) for name, part in parts.items())
    wrong = [f"{name} {list(found)} (should be {list(right)})" for name, found, right in shapes if found != right]
    wrong += mismatched_tensors(places, shards)
    _raise_if_any(folder, "has tensors of a shape other than its config.json implies:", wrong)


def _check_rope_memory(folder: Path, config: ModelConfig) -> None:
    """Raise `CheckpointError` if the RoPE tables and their temporaries do not fit in free memory.

    No stored tensor bounds their size, unlike that of every other allocation.
    """
    needed, free = 14 * config.max_position_embeddings * config.head_dim, hardware.memory().free
    if needed > free:
        raise CheckpointError(
            f"{folder}: max_position_embeddings is {config.max_position_embeddings}; the RoPE tables for it need "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; lower it in config.json"
        )


def _load_tensor(model: Decoder, part: Part, name: str, staging: Staging) -> None:
    """Copy one stored tensor to its rows of the model, and quantise it if the model's layer is quantised."""
    linear = model.get_submodule(part.parameter.rpartition(".")[0])
    if not (is_linear_weight(part) and isinstance(linear, QuantizedLinear)):
        staging.copy(name, part.of(model))
        return
    try:
        for row, piece in staging.pieces(name):
            linear.fill(linear.scheme.quantize(piece), part.first_row + row)
    except CheckpointError as problem:
        raise CheckpointError(f"{name}: {problem}") from None


def _uninitialised_model(config: ModelConfig, parameters: UninitialisedParameters, scheme: Scheme | None) -> Decoder:
    """Build the model with uninitialised parameters; with a `scheme`, only one layer at a time is in full precision.

    Raises `UnsupportedError` for a `scheme` and a family whose decoder builds its layers itself."""
    if scheme is not None and config.decoder is not None and config.decoder.__init__ is not Decoder.__init__:
        raise UnsupportedError(
            f"{config.decoder.__name__} builds its layers itself, so they cannot be quantised one by one as they load; "
            "leave out quantization"
        )
    with parameters:
        model = (config.decoder or Decoder)(config if scheme is None else replace(config, num_layers=0))
    model.config = config
    for i in range(config.num_layers if scheme else 0):
        with parameters:
            model.layers.append(DecoderLayer(config, i))
        _replace_linears(model, scheme)
    return model.to(parameters.device)


def _replace_linears(model: Decoder, scheme: Scheme) -> None:
    """Replace and free the linears that are not quantised yet; their quantised replacements are not filled."""
    for name, linear in list(decoder_linears(model)):
        if not isinstance(linear, QuantizedLinear):
            with UninitialisedParameters(linear.weight.device):
                model.set_submodule(name, empty_like(linear, scheme))


def _raise_if_any(folder: Path, what: str, tensors: list[str]) -> None:
    """Raise `CheckpointError` unless `tensors` is empty. `what`: the words between folder and tensors."""
    if tensors:
        more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
        named = [name if name.isprintable() and 0 < len(name) < 150 else short_repr(name) for name in tensors[:4]]
        raise CheckpointError(f"{folder} {what} {', '.join(named)}{more}")
