"""Quantised checkpoints: a Hugging Face folder whose linears are stored as the tensors of a scheme.

`config.json` is the original file plus a `quantization_config`: `quant_method` names the scheme, `format` states that
minillm wrote it (other programs store other tensors for the same method), the rest are the scheme's options. The
safetensors file holds `model.layers.3.self_attn.qkv_proj.qweight` and so on, merged as in the decoder and named as in
vLLM. Tensors that are not quantised are stored bit for bit as in the original.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minillm.errors import CheckpointError, ConfigError
from minillm.json_files import short_repr
from minillm.models.decoder import Decoder
from minillm.models.quantize import decoder_linears
from minillm.models.shards import DTYPES, SINGLE, Shards
from minillm.models.staging import Staging
from minillm.models.tensor_names import Part, decoder_shards
from minillm.quantization.base import QuantizedLinear, Scheme, TensorSpec
from minillm.quantization.schemes import make_scheme

FORMAT, VERSION = "minillm", 1
STORED_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
BESIDE_WEIGHTS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "generation_config.json", "vocab.*")
MORE_BESIDE_WEIGHTS = ("merges.txt", "*.jinja", "additional_chat_templates/*.jinja", "*.tiktoken", "training.json")
"""The other files of a checkpoint, which are copied into one that is made from it."""


@dataclass(frozen=True)
class Place:
    """The buffer of the decoder that one stored tensor of a quantised linear fills."""

    linear: str
    """The module's name in the decoder, such as `layers.3.qkv_proj`."""
    buffer: str
    spec: TensorSpec


def is_minillm_format(quantization: Any) -> bool:
    """Whether `save_quantized` wrote this `quantization_config`."""
    return isinstance(quantization, Mapping) and quantization.get("format") == FORMAT


def scheme_of(quantization: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a `quantization_config` that minillm wrote. Raises `CheckpointError` if it is invalid."""
    options = {key: value for key, value in quantization.items() if key not in ("quant_method", "format", "version")}
    if quantization.get("version") != VERSION:
        raise CheckpointError(
            f"quantization_config has version {short_repr(quantization.get('version'))}, this minillm reads {VERSION}; "
            "quantise the original checkpoint again"
        )
    try:
        return make_scheme(quantization.get("quant_method"), **options)
    except (ConfigError, TypeError, ValueError) as problem:
        reason = str(problem)
        reason = reason if len(reason) < 400 else f"{reason[:200]} … {reason[-100:]}"
        raise CheckpointError(f"quantization_config cannot be read ({reason}); quantise the original again") from None


def is_linear_weight(part: Part) -> bool:
    """Whether a stored tensor is part of a weight that is quantised."""
    return part.parameter.endswith("_proj.weight")


def quantized_places(parts: Mapping[str, Part], scheme: Scheme) -> dict[str, Place]:
    """Return where the quantised tensors of the linears among `parts` go (see `stored_parts`), by stored name."""
    shapes: dict[str, tuple[int, int]] = {}
    for part in filter(is_linear_weight, parts.values()):
        linear = part.parameter.removesuffix(".weight")
        rows, columns = shapes.get(linear, (0, 0))[0] + part.shape[0], part.shape[1]
        shapes[linear] = (rows, columns)
    return {
        f"{stored_prefix(linear)}.{name}": Place(linear, name, spec)
        for linear, shape in shapes.items()
        for name, spec in scheme.tensors(*shape).items()
    }


def stored_prefix(linear: str) -> str:
    """`layers.3.qkv_proj` → `model.layers.3.self_attn.qkv_proj`."""
    layers, index, name = linear.split(".", 2)
    return f"model.{layers}.{index}.{name if name.startswith('mlp.') else f'self_attn.{name}'}"


def mismatched_tensors(places: Mapping[str, Place], shards: Shards) -> list[str]:
    """List the stored tensors whose dtype or shape differs from their place, with the stored and the right one."""
    wrong = []
    for name, place in places.items():
        found, right = shards.header(name), (STORED_DTYPES[place.spec.dtype], place.spec.shape)
        if found != right:
            wrong.append(f"{name} {found[0]} {list(found[1])} (should be {right[0]} {list(right[1])})")
    return wrong


def fill_places(model: Decoder, places: Mapping[str, Place], staging: Staging) -> None:
    """Read the tensors into the model, a piece at a time. Raises `CheckpointError` for invalid contents."""
    for name, place in places.items():
        staging.copy(name, model.get_buffer(f"{place.linear}.{place.buffer}"))
    for name, linear in decoder_linears(model):
        assert isinstance(linear, QuantizedLinear)
        try:
            linear.scheme.check(linear.tensors, linear.in_features)
        except CheckpointError as problem:
            raise CheckpointError(f"{stored_prefix(name)}: {problem}") from None


def save_quantized(model: Decoder, source: Path, folder: Path) -> None:
    """Write `model`, which `quantize_model` made from the checkpoint in `source`, to the new folder `folder`.

    A new folder appears complete or not at all; an empty one that is there is filled, `config.json` last, or stays
    empty. Raises `ConfigError` if `folder` already exists and is not empty, or the model has a linear that is not
    quantised.
    """
    check_new_folder(folder)
    folder = folder.absolute()  # `.` has no name
    tensors, scheme = _quantized_tensors(model)
    shards = decoder_shards(source, model.config)
    for name in sorted(shards.names):
        if not name.endswith("_proj.weight"):
            tensors[name] = shards.tensor(name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": scheme.method, "format": FORMAT, "version": VERSION}
    config["quantization_config"] |= asdict(scheme)
    if not (config.get("dtype") or config.get("torch_dtype")):  # the dtypes of scales do not tell that of the model
        config["torch_dtype"] = model.config.dtype
    fills = folder.exists()  # it may be a mount point, or the folder in which a shell is: not to be replaced
    with tempfile.TemporaryDirectory(dir=folder if fills else folder.parent) as temporary:
        fresh = Path(temporary) / folder.name
        fresh.mkdir()
        try:
            save_file(tensors, fresh / SINGLE, metadata={"format": "pt"})
        except SafetensorError as problem:
            raise ConfigError(f"{folder} cannot be written ({problem}); name another place") from None
        (fresh / SINGLE).chmod(0o644)
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_beside_weights(source, fresh)
        if fills:
            _fill(folder, fresh)
        else:
            fresh.rename(folder)


def copy_beside_weights(source: Path, folder: Path) -> None:
    """Copy a checkpoint's files for the tokenizer, chat templates and the like into a new one."""
    for pattern in BESIDE_WEIGHTS + MORE_BESIDE_WEIGHTS:
        for file in filter(Path.is_file, source.glob(pattern)):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def check_new_folder(folder: Path) -> None:
    """Raise `ConfigError` unless the parent of `folder` exists, and `folder` itself does not exist or is empty."""
    if not folder.parent.is_dir():
        raise ConfigError(f"{folder}: there is no folder {folder.parent}; make it first")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not empty; name a new folder")


def _fill(folder: Path, fresh: Path) -> None:
    """Move all files of `fresh`, which is in a temporary folder in `folder`, to `folder`, or none of them."""
    if [file.name for file in folder.iterdir()] != [fresh.parent.name]:
        raise ConfigError(f"{folder} is no longer empty: another process has written to it; name a new folder")
    files = sorted(fresh.iterdir(), key=lambda file: file.name == "config.json")
    try:
        for file in files:
            file.rename(folder / file.name)
    except BaseException:
        for file in files:
            if (moved := folder / file.name).is_dir():
                shutil.rmtree(moved)
            else:
                moved.unlink(missing_ok=True)
        raise


def _quantized_tensors(model: Decoder) -> tuple[dict[str, Tensor], Scheme]:
    tensors: dict[str, Tensor] = {}
    scheme: Scheme | None = None
    for name, linear in decoder_linears(model):
        if not isinstance(linear, QuantizedLinear):
            raise ConfigError(f"{name} is not quantised; call quantize_model first")
        scheme = linear.scheme
        tensors |= {f"{stored_prefix(name)}.{key}": tensor.cpu() for key, tensor in linear.tensors.items()}
    if scheme is None:
        raise ConfigError("the model has no layers, so there is nothing to quantise")
    return tensors, scheme
