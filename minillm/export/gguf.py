"""GGUF, llama.cpp's file format: one file with the model's shape, tokenizer and tensors.

Two things differ from a Hugging Face checkpoint. llama.cpp's `llama` rotates neighbouring channels (0, 1), (2, 3), …
where the checkpoint pairs channel i with channel i + head_dim / 2, so the rows of q and k are reordered within each
head. And RoPE scaling has its own keys; Llama 3.1's is a tensor of factors. Everything else is only renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minillm.errors import CheckpointError, ConfigError, UnsupportedError
from minillm.export.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from minillm.extras import need
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.hub import resolve
from minillm.models.loading import load_config, load_model, stored_scheme, stored_tensors
from minillm.models.rope import inverse_frequencies
from minillm.tokenizer import Tokenizer
from minillm.whole_file import replacing

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Storage type of matrices → its name in the `gguf` package. Vectors (norms, biases) are always f32."""
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
Q8_BLOCK = 32
"""Weights of a row that share a scale in Q8_0. A matrix whose row length is not a multiple is stored as f16."""
LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0, "BF16": torch.finfo(torch.bfloat16).max}
"""The largest weight of each type but F32. The scales of Q8_0 are float16."""


@dataclass(frozen=True)
class GgufExport:
    """A description of the written file."""

    file: Path
    num_bytes: int
    architecture: str
    """llama.cpp's name of the architecture: `llama`, `qwen2` or `qwen3`."""
    tokenizer: GgufTokenizer | None
    """None: the file has no tokenizer, so llama.cpp accepts only token ids."""
    end_tokens: tuple[int, ...]
    """The ids that end a text in minillm. A GGUF file names only the first; llama.cpp recognises some others by their
    text, such as `<|im_end|>`. Empty without a tokenizer."""


def export_gguf(name: str, file: Path, kind: str, progress: bool = False) -> GgufExport:
    """Write the checkpoint `name` (see `resolve`) to the new file `file`, its matrices as `kind` (see `TYPES`).

    The model is held in memory in fp32 and converted one matrix at a time. Until the file is complete its name ends in
    `.part`. Raises `ConfigError` for an unknown type or a file that exists already, `UnsupportedError` if llama.cpp
    cannot compute the same, the checkpoint names no end-of-text token, a weight is too large for `kind` or the `gguf`
    package is missing, `CheckpointError` if the checkpoint cannot be read or holds NaN or infinity.
    """
    _check_call(file, kind)
    gguf = import_gguf()
    folder = resolve(name)
    config = load_config(folder)
    architecture = architecture_of(config)
    stored = stored_scheme(folder)
    if stored is not None:
        raise UnsupportedError(f"{name} is quantised ({stored.method}); export the original checkpoint, e.g. as q8_0")
    tokenizer = _tokenizer(folder, config)
    end_tokens = () if tokenizer is None else _end_tokens(tokenizer, config)
    with replacing(file, _new_part(file)) as part:
        _check_new(file)  # another export may have ended while the checkpoint was downloaded
        model = load_model(folder, torch.float32)
        config = model.config
        with closing(gguf.GGUFWriter(part, architecture)) as writer:
            _write_shape(writer, gguf, config, Path(name).absolute().name, kind)  # a hub id's folder is a hash
            _write_tokenizer(writer, tokenizer, config, end_tokens)
            _write_tensors(writer, gguf, partial(gguf_tensors, gguf, model, architecture), kind, progress)
    return GgufExport(file, file.stat().st_size, architecture, tokenizer, end_tokens)


def import_gguf() -> Any:
    """Import the `gguf` package. Raises `UnsupportedError` if it is not installed."""
    need("peers", "gguf")
    import gguf

    return gguf


def architecture_of(config: ModelConfig) -> str:
    """llama.cpp's name for this architecture. Raises `UnsupportedError` if no llama.cpp model computes the same."""
    window = next((w for i in range(config.num_layers) if (w := config.window(i)) is not None), None)
    if window is not None and window < config.max_position_embeddings:
        raise UnsupportedError(f"a sliding window of {window} tokens cannot be exported: llama.cpp's llama has none")
    if config.rope_layers:
        raise UnsupportedError("layers without RoPE cannot be exported: llama.cpp's llama rotates in every layer")
    _check_yarn(config)
    if config.decoder is not None:
        raise UnsupportedError(f"{config.decoder.__name__} cannot be exported: llama.cpp has no such architecture here")
    biased = config.qkv_bias or config.o_bias or config.mlp_bias
    if config.qk_norm and biased:
        raise UnsupportedError("biases together with q/k norms cannot be exported: llama.cpp's qwen3 has no biases")
    architecture = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias and not config.o_bias else "llama"
    if config.rope.kind == "llama3" and architecture != "llama":
        raise UnsupportedError(f"RoPE scaling 'llama3' cannot be exported: llama.cpp's {architecture} does not read it")
    return architecture


def _check_yarn(config: ModelConfig) -> None:
    """Raise `UnsupportedError` for YaRN with numbers that a GGUF file does not state and llama.cpp sets otherwise."""
    if config.rope.kind != "yarn":
        return
    stated = {name: config.rope.parameter(name) for name in ("factor", "original_max_position_embeddings")}
    own, own_factor = inverse_frequencies(config.rope, config.head_dim)
    theirs, their_factor = inverse_frequencies(replace(config.rope, parameters=stated), config.head_dim)
    if not torch.equal(own, theirs) or own_factor != their_factor:
        custom = sorted(config.rope.parameters.keys() - stated.keys())
        raise UnsupportedError(f"YaRN with a custom {', '.join(custom)} cannot be exported, only with default values")


def interleave(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows (`[num_heads · head_dim, …]`) of each head from halves to neighbours: 0, d/2, 1, d/2 + 1, …"""
    split = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape)


def gguf_tensors(gguf: Any, model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """The fp32 tensors of `model` with llama.cpp's names and channel order."""
    config: ModelConfig = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for stored, tensor in stored_tensors(model):
        projection = stored.split(".")[-2]
        if architecture == "llama" and projection in heads:  # llama.cpp's qwen models pair channels as the checkpoint
            tensor = interleave(tensor, heads[projection])
        yield names.get_name(stored, try_suffixes=(".weight", ".bias")), tensor
    if config.rope.kind == "llama3":
        plain, _ = inverse_frequencies(RopeConfig(config.rope.theta), config.head_dim)
        scaled, _ = inverse_frequencies(config.rope, config.head_dim)
        yield "rope_freqs.weight", plain / scaled


def _check_call(file: Path, kind: str) -> None:
    if kind not in TYPES:
        raise ConfigError(f"GGUF type {kind!r} is not available; there are: {', '.join(TYPES)}")
    _check_new(file)
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}; create it first")


def _check_new(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"{file} exists already; give a new file, or remove it first")


def _new_part(file: Path) -> Path:
    """Create the empty file that becomes `file`. No other export can create it as long as it is there."""
    part = file.with_name(file.name + ".part")
    try:
        part.touch(exist_ok=False)
    except FileExistsError:
        raise ConfigError(
            f"{part} exists: another export to {file.name} is running or was killed; wait for it, or remove that file"
        ) from None
    return part


def _tokenizer(folder: Path, config: ModelConfig) -> GgufTokenizer | None:
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except CheckpointError:
        if (folder / "tokenizer.json").is_file():
            raise
        return None  # without a tokenizer llama.cpp reads and returns token ids
    return gguf_tokenizer(tokenizer, config.vocab_size)


def _write_shape(writer: Any, gguf: Any, config: ModelConfig, name: str, kind: str) -> None:
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    if config.rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[config.rope.kind.upper()])
        writer.add_rope_scaling_factor(config.rope.parameter("factor"))
    if config.rope.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(config.rope.parameter("original_max_position_embeddings")))


def _end_tokens(tokenizer: GgufTokenizer, config: ModelConfig) -> tuple[int, ...]:
    """See `GgufExport.end_tokens`. Raises `UnsupportedError` if there are none: llama.cpp would then take token 11."""
    named = (*config.eos_token_ids, tokenizer.eos)
    if not (found := tuple(dict.fromkeys(token for token in named if token is not None))):
        raise UnsupportedError(
            "the checkpoint names no end-of-text token, and llama.cpp would then end at token 11; name one as "
            "eos_token in tokenizer_config.json"
        )
    return found


def _write_tokenizer(
    writer: Any, tokenizer: GgufTokenizer | None, config: ModelConfig, end_tokens: tuple[int, ...]
) -> None:
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    writer.add_add_bos_token(tokenizer.bos is not None)
    bos = config.bos_token_id if tokenizer.bos is None else tokenizer.bos
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_eos_token_id(end_tokens[0])
    if tokenizer.chat_templates:
        writer.add_chat_template([{"name": n, "template": text} for n, text in tokenizer.chat_templates.items()])


def _write_tensors(
    writer: Any, gguf: Any, tensors: Callable[[], Iterator[tuple[str, Tensor]]], kind: str, progress: bool
) -> None:
    """Write the headers of all tensors, as the format requires, then the data of one tensor at a time. `tensors` makes
    them anew each time, so that reordered copies of all are never in memory together."""
    kinds = []
    for name, tensor in tensors():
        kinds.append(stored_as := _kind(gguf, tensor, kind))
        _check_weights(name, tensor, stored_as.name)
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, stored_as)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pairs = zip(tensors(), kinds, strict=True)
    for (_, tensor), stored_as in tqdm(pairs, "writing", len(kinds), unit=" tensors", disable=not progress):
        writer.write_tensor_data(gguf.quants.quantize(tensor.contiguous().numpy(), stored_as))


def _check_weights(name: str, tensor: Tensor, stored_as: str) -> None:
    """Raise for weights that llama.cpp would read as NaN or infinity. `stored_as`: a value of `TYPES`."""
    low, high = tensor.aminmax()
    largest = max(-low, high).item()
    if not isfinite(largest):
        raise CheckpointError(f"{name} contains NaN or infinity; fetch the checkpoint again")
    if largest > (limit := LARGEST.get(stored_as, inf)):
        larger = "bf16 or f32" if largest <= LARGEST["BF16"] else "f32"
        raise UnsupportedError(
            f"{name} holds a weight of size {largest:.3g}, and {stored_as} ends at {limit:,.7g}; export as {larger}"
        )


def _kind(gguf: Any, tensor: Tensor, kind: str) -> Any:
    if tensor.ndim == 1:
        kind = "f32"
    elif kind == "q8_0" and tensor.shape[-1] % Q8_BLOCK:
        kind = "f16"
    return gguf.GGMLQuantizationType[TYPES[kind]]
