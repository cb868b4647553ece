"""Batch generation: the prompts of a file, completed by the workers of a cluster, each exactly once.

    prompts.jsonl          {"prompt": "def fib(n):"}          an `id` of your own is optional; else prompts count from 0
    results/part-….jsonl   {"id": 0, "text": "…", "token_ids": […], "finish_reason": "length", "num_prompt_tokens": 5}

A prompt that cannot be run (too long, empty, or its logits are NaN) gets `{"id": …, "error": "…"}` and does not stop
the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.cluster.absolute_paths import absolute_model, with_absolute_models
from minillm.cluster.parts_folder import PartsFolder
from minillm.cluster.worker_pool import Pool
from minillm.config import EngineArgs, at_least
from minillm.errors import ConfigError, EngineDeadError, MinillmError, NonFiniteLogitsError, PromptError
from minillm.models.fingerprint import identity_of_folder
from minillm.models.hub import resolve
from minillm.sampling import SamplingParams
from minillm.speculative.config import SpeculativeConfig
from minillm.version import __version__

if TYPE_CHECKING:
    from minillm.outputs import RequestOutput

SHARD = 256
FIELDS = ("id", "prompt", "prompt_token_ids")
"""Of a line of the input."""
Item = Mapping[str, Any]
Progress = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class GenerationSettings:
    """What decides the results. Folders of models are made absolute, because workers run in another folder."""

    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of `LLM`."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Options of `SamplingParams`."""

    def __post_init__(self) -> None:
        EngineArgs.from_options(self.model, self.engine)
        params = SamplingParams(**self.sampling)
        if params.n != 1:
            raise ConfigError(f"n={params.n}: batch generation writes one completion per prompt; use n=1")
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, name)) is not None:
                raise ConfigError(f"{name}={asked}: batch generation writes no log probabilities; leave it out")
        object.__setattr__(self, "model", absolute_model(self.model))
        object.__setattr__(self, "engine", with_absolute_models(self.engine))

    def job(self, data: bytes, shard: int) -> dict[str, Any]:
        """What a folder of results belongs to. `data`: the input file."""
        return {
            "kind": "generate",
            "version": __version__,
            "input": hashlib.sha256(data).hexdigest(),
            "model": self.model,
            "weights": identity_of_folder(resolve(self.model)),
            "draft_weights": [identity_of_folder(resolve(model)) for model in self._draft_models()],
            "engine": self.engine,
            "sampling": self.sampling,
            "shard": shard,
        }

    def _draft_models(self) -> list[str]:
        """The draft models that the options name: the method's, then its fallback's."""
        given = self.engine.get("speculative_config")
        config = None if given is None else SpeculativeConfig.from_dict(given)
        found = []
        while config is not None:
            found.append(getattr(config.options, "model", None))
            config = config.fallback
        return [model for model in found if model is not None]


class GenerationWorker:
    """An engine that completes one shard of prompts after the other."""

    def __init__(self, settings: GenerationSettings) -> None:
        from minillm.llm import LLM

        self.llm = LLM(settings.model, **settings.engine)
        self.sampling, self.seed = settings.sampling, settings.engine.get("seed") or 0

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """One row per item, in order."""
        refusals = [self._refusal(item) for item in items]
        rows = iter(self._complete([item for item, said in zip(items, refusals, strict=True) if said is None]))
        results = [next(rows) if said is None else {"error": said} for said in refusals]
        return [{"id": item["id"], **result} for item, result in zip(items, results, strict=True)]

    def _complete(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """The rows of items that can be run, without ids. If the logits of one are NaN, each half runs again, until
        that one is alone and gets an error. If a rank of the engine has ended, this process ends: then the pool gives
        the shard to another worker."""
        prompts, params = [item["prompt"] for item in items], [self._params(item) for item in items]
        try:
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        except NonFiniteLogitsError as problem:
            if len(items) == 1:
                return [{"error": str(problem)}]
            half = len(items) // 2
            return [*self._complete(items[:half]), *self._complete(items[half:])]
        except EngineDeadError as problem:
            print(problem, file=sys.stderr, flush=True)
            os._exit(1)
        return [_row(output) for output in outputs]

    def _params(self, item: Item) -> SamplingParams:
        """With a temperature and no seed every prompt gets a seed of its own, so a shard done again is the same."""
        given = dict(self.sampling)
        if given.get("seed") in (None, -1):
            given["seed"] = (self.seed << 32) + item["number"]
        return SamplingParams(**given)

    def _refusal(self, item: Item) -> str | None:
        try:
            for request in self.llm.llm_engine.prepare(item["prompt"], self._params(item)):
                self.llm.engine.check_fits(request)
        except MinillmError as problem:
            return str(problem)
        return None


def _row(output: RequestOutput) -> dict[str, Any]:
    choice = output.outputs[0]
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
    }


def read_items(file: Path) -> tuple[list[Item], bytes]:
    """The prompts of a file, and its bytes. Each has an `id`, a `number` (from 0) and a `prompt`: text, or
    `{"prompt_token_ids": […]}`.

    Raises `PromptError` for a line that is no prompt, or an id that was there before; `ConfigError` if there is no such
    file, or if it is a pipe or a device.
    """
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} is not a regular file; write the prompts into one")
        data = file.read_bytes()
    except OSError as problem:
        raise ConfigError(f"{file}: {problem.strerror or problem}; name a file of prompts") from None
    items: list[Item] = []
    ids: dict[str, int] = {}
    for line, text in enumerate(data.split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise PromptError(f"{file}, line {line} is not JSON ({problem}); write one object per line") from None
        if not isinstance(row, dict) or ("prompt" in row) == ("prompt_token_ids" in row):
            raise PromptError(f'{file}, line {line} must be an object with either "prompt" or "prompt_token_ids"')
        if unknown := sorted(row.keys() - FIELDS):
            raise PromptError(
                f"{file}, line {line} has {unknown[0]!r}, which is not used; a line may have {', '.join(FIELDS)}; "
                "options are those of the whole job"
            )
        name = row.get("id", len(items))
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise PromptError(f"{file}, line {line}: the id {name!r} must be text or an integer")
        if isinstance(name, str) and name != name.encode(errors="ignore").decode():
            raise PromptError(f"{file}, line {line}: the id {name!r} has half of a surrogate pair; it is not Unicode")
        if (before := ids.setdefault(json.dumps(name), line)) != line:
            raise PromptError(f"{file}, line {line}: the id {name!r} is also that of line {before}; ids must differ")
        key, kind = ("prompt", str) if "prompt" in row else ("prompt_token_ids", list)
        if not isinstance(row[key], kind):
            raise PromptError(f"{file}, line {line}: {key} must be {'text' if kind is str else 'a list of token ids'}")
        prompt = row[key] if kind is str else {key: row[key]}
        items.append({"id": name, "number": len(items), "prompt": prompt})
    if not items:
        raise PromptError(f"{file} has no prompts; write one JSON object per line")
    return items, data


def shards(num_items: int, size: int) -> list[tuple[int, int]]:
    """The ranges of the parts: `(first item, first item of the next)`. Raises `ConfigError`."""
    at_least("shard", size, 1)
    return [(begin, min(begin + size, num_items)) for begin in range(0, num_items, size)]


def generate_file(
    file: Path,
    out: Path,
    settings: GenerationSettings,
    pool: Pool,
    shard: int = SHARD,
    progress: Progress | None = None,
) -> list[Path]:
    """Complete all prompts of `file` into `out`. Returns the files of the parts, in order.

    Parts that are there already, of the same input and settings, are kept. `shard`: prompts per part. `progress`:
    called as `progress(iterable, total=…)`. Raises the errors of `read_items`, `PartsFolder.open` and the pool.
    """
    items, data = read_items(file)
    parts = shards(len(items), shard)
    with PartsFolder(out, settings.job(data, shard)).open() as folder:
        left = [part for part in parts if not folder.has(*part)]
        done = pool.map(partial(GenerationWorker, settings), [items[begin:end] for begin, end in left])
        for number, rows in progress(done, total=len(left)) if progress else done:
            folder.write(*left[number], rows)
        return [folder.path(*part) for part in parts]


def failed_rows(parts: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of prompts that could not be run, in order."""
    found: list[dict[str, Any]] = []
    for part in parts:
        with part.open(encoding="utf-8") as lines:
            found += [row for row in map(json.loads, lines) if "error" in row]
    return found
