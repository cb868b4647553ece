"""The folder of a drafter that was trained for one target: `config.json`, `model.safetensors` and a card.

The weights only mean something to the target that they were trained for. A target of another size or vocabulary is
refused. For one of the same shape with other weights, drafts would be accepted less often, so there is a warning if its
norms differ (a merged LoRA leaves them as they are): the output is the target's in any case.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec import Meta
from safetensors.torch import save_file
from torch import nn

from minillm.errors import CheckpointError, ConfigError, TokenizerMismatchError
from minillm.json_files import read_json, short_repr, validated
from minillm.models import bundled
from minillm.models.config import ModelConfig
from minillm.models.fingerprint import fingerprint_of_folder
from minillm.models.hub import resolve
from minillm.models.shards import SINGLE, Shards
from minillm.speculative.chain_drafter import check_sample_method
from minillm.speculative.drafter import DraftContext, TargetInfo

Module = TypeVar("Module", bound=nn.Module)
Shape = TypeVar("Shape")


@dataclass(frozen=True)
class TrainedOptions:
    """The options that all trained drafters have, minillm's own."""

    model: str | None = None
    """The folder of the trained weights; None: those bundled for a bundled target."""
    draft_sample_method: str = "probabilistic"
    """`probabilistic` samples drafts from the drafter's distributions, `greedy` takes their argmax."""

    def __post_init__(self) -> None:
        check_sample_method(self.draft_sample_method)


class DrafterConfig(msgspec.Struct):
    """What `config.json` says."""

    method: Annotated[str, Meta(description="the name of a speculative method")]
    target: Annotated[str, Meta(description="the name of the target")]
    target_fingerprint: Annotated[str, Meta(description="the fingerprint of the target's norms")]
    vocab_size: Annotated[Annotated[int, Meta(ge=1, le=2**24)], Meta(description="a whole number up to 16,777,216")]
    shape: Annotated[dict[str, Any], Meta(description="an object with the sizes of the network")]


def save_drafter(folder: Path, config: DrafterConfig, module: nn.Module) -> None:
    """Write `config.json` and the weights in bfloat16, like those of the bundled models."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(msgspec.to_builtins(config), indent=2) + "\n", encoding="utf-8")
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in module.state_dict().items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / SINGLE).chmod(0o644)


def drafter_config(method: str, target: str, fingerprint: str, vocab_size: int, shape: Any) -> DrafterConfig:
    """The content of `config.json` for a network of this `shape`, a dataclass."""
    return DrafterConfig(method, target, fingerprint, vocab_size, asdict(shape))


def bundled_drafter(method: str, target: str) -> Path:
    """Where the weights of `method` are bundled for this target, if they are."""
    at = resolve(target)
    return at.with_name(f"{at.name}-{method}")


def has_bundled_drafter(method: str, target: str) -> bool:
    """Whether weights of `method` are bundled for this target."""
    return resolve(target).parent == bundled.WEIGHTS and (bundled_drafter(method, target) / "config.json").exists()


def _drafter_folder(method: str, model: str | None, target: str) -> Path:
    """The folder of the option `model`; without one, that of the bundled target.

    Raises `ConfigError` if nothing is bundled for this target, `CheckpointError` if there is no such folder.
    """
    if model is not None:
        try:
            folder = Path(model).expanduser()
            is_folder = folder.is_dir()
        except (TypeError, ValueError, RuntimeError, OSError):  # not text, an unknown home folder, a name too long
            is_folder = False
        if not is_folder:
            raise CheckpointError(
                f"model={short_repr(model)} of speculative method {method!r} is not a folder; give the folder that "
                f"`minillm train --stages {method}` wrote"
            )
        return folder
    if not has_bundled_drafter(method, target):
        raise ConfigError(
            f"speculative method {method!r} needs 'model', a folder of weights that were trained for {target!r}; "
            f"`minillm train --stages corpus {method} --target {target}` makes it, "
            f"runs/models/{resolve(target).name}-{method}, for a tokenizer of at most 65,536 tokens with <|endoftext|> "
            "as token 0"
        )
    return bundled_drafter(method, target)


def read_shape(method: str, model: str | None, target: TargetInfo, shape_class: type[Shape]) -> Shape:
    """The sizes of the network in the folder `model`; None: of the one that is bundled for the target.

    Raises `CheckpointError` if there is no such folder, or its `config.json` cannot be read or is for another method;
    `ConfigError` if nothing is bundled; `ConfigError` or `TokenizerMismatchError` if the network does not fit the
    target.
    """
    return _read_config(_drafter_folder(method, model, target.name), method, target.config, shape_class)[1]


def _read_config(
    folder: Path, method: str, target: ModelConfig, shape_class: type[Shape]
) -> tuple[DrafterConfig, Shape]:
    try:
        config = validated(read_json(folder / "config.json"), DrafterConfig)
        shape = validated(config.shape, shape_class)
        _check_target(config, shape, method, target)
    except (CheckpointError, ConfigError) as problem:
        raise type(problem)(f"{folder}: {problem}") from None
    return config, shape


def load_drafter(
    method: str, context: DraftContext, shape_class: type[Shape], build: Callable[[Shape], Module]
) -> Module:
    """Load the network of the option `model` in float32, for inference.

    Raises what `read_shape` raises, and `CheckpointError` if the weights cannot be read. Warns if the target has other
    norms than the one it was trained for.
    """
    target_name = context.target_name
    folder = _drafter_folder(method, context.options.model, target_name)
    config, shape = _read_config(folder, method, context.target.model.config, shape_class)
    try:
        with torch.device("meta"):  # nothing is allocated before the tensors are known to fit
            module = build(shape)
        _load(module, Shards(folder))
    except (CheckpointError, ConfigError) as problem:
        raise type(problem)(f"{folder}: {problem}") from None
    if (found := fingerprint_of_folder(resolve(target_name))) != config.target_fingerprint:
        warnings.warn(
            f"{folder} was trained for {config.target} with norms {config.target_fingerprint}, but the target "
            f"{target_name} has norms {found}: the output stays exact, but few drafts may be accepted; train again "
            f"with `minillm train --stages corpus {method} --target {target_name}`",
            stacklevel=2,
        )
    return module.requires_grad_(False).eval()


def _check_target(config: DrafterConfig, shape: Any, method: str, target: ModelConfig) -> None:
    if config.method != method:
        raise CheckpointError(
            f"its weights are for speculative method {short_repr(config.method)}, not {method!r}; give another folder"
        )
    if shape.hidden_size != target.hidden_size:
        raise ConfigError(
            f"it was trained for a target with hidden size {shape.hidden_size}, this target has {target.hidden_size}; "
            "train it for this target"
        )
    if config.vocab_size != target.vocab_size:
        raise TokenizerMismatchError(
            f"it was trained for a vocabulary of {config.vocab_size} tokens, the target has {target.vocab_size}; train "
            "it for this target"
        )


def _load(module: nn.Module, shards: Shards) -> None:
    """Fill the module. Raises `CheckpointError` for missing, unexpected, misshapen or non-finite tensors."""
    state = module.state_dict()
    if missing := sorted(state.keys() - shards.names):
        raise CheckpointError(f"it lacks {', '.join(missing[:4])}; fetch it again")
    if extra := sorted(shards.names - state.keys()):
        names = ", ".join(map(short_repr, extra[:4]))
        raise CheckpointError(f"it has tensors that do not fit its config.json: {names}; fetch it again")
    for name, tensor in state.items():
        if (found := shards.shape(name)) != tuple(tensor.shape):
            raise CheckpointError(f"{name} is {list(found)}, its config.json implies {list(tensor.shape)}")
    stored = {name: shards.tensor(name).float() for name in state}
    for name, tensor in stored.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name} has NaN or infinite numbers; train it again")
    module.load_state_dict(stored, assign=True)
