"""Lesson 13: a small version of `bench zoo`, with its texts and functions: fewer rows and tasks, shorter prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from minillm.batch import Segment
from minillm.bench import zoo
from minillm.bench.quality import Quality, judge
from minillm.bench.zoo_cache import build, plain_bytes, read_prompt, stored_bytes
from minillm.bench.zoo_recall import Recall, recall
from minillm.bench.zoo_systems import Setting, list_systems
from minillm.bench.zoo_texts import NUM_SCORED, long_files, recall_tasks, rows_of, scored_texts, without_definition
from minillm.cache.base import KVCache
from minillm.models.calibration import CalibrationTexts
from minillm.models.causal import CausalAttention
from minillm.models.decoder import Decoder
from minillm.models.hub import resolve
from minillm.models.loading import load_config, load_model
from minillm.runtime.runner import ModelRunner
from minillm.tokenizer import Tokenizer

CPU = torch.device("cpu")


class HalfOfTheTexts(CalibrationTexts):
    """Every second of the calibration texts: enough to train codebooks, in less time and memory."""

    def rows(self) -> list[list[int]]:
        """See `CalibrationTexts.rows`."""
        return super().rows()[::2]


class Bench:
    """A model, held-out rows of `length` tokens to predict the ends of, and what the plain cache makes of them.

    All rows but their last `NUM_SCORED` tokens are the prompt, which a layout compresses. `tasks`: of recall; the
    definition stands `distance` tokens before the end. Raises `ConfigError` for a length or distance without room.
    """

    def __init__(self, name: str, length: int, rows: int, tasks: int = 0, distance: int = 0) -> None:
        folder = resolve(name)
        self.name, self.shape, self.tokenizer = name, load_config(folder), Tokenizer.from_folder(folder)
        self.prompt_len = length - NUM_SCORED
        self.model = load_model(folder, torch.float32, CPU)
        fitted, measured = long_files(self.tokenizer)
        texts = scored_texts(rows_of(measured, length, rows), self.prompt_len, self.tokenizer)
        recall = {}
        if tasks:
            recall[distance] = recall_tasks(measured, self.tokenizer, self.prompt_len, distance, tasks)
        short = CalibrationTexts(self.tokenizer)
        self.calibration_texts = HalfOfTheTexts(self.tokenizer)
        self.material = zoo.Material(self.model, texts, self.prompt_len, recall, rows_of(fitted, length, 2), short)
        self.reference = zoo.measure({}, self.material)
        self._files = measured

    @property
    def rows(self) -> list[list[int]]:
        """Token ids, each row `prompt_len + NUM_SCORED`."""
        return self.material.texts.rows

    def logprobs(self, options: Mapping[str, Any]) -> Tensor:
        """Log-probabilities of all scored tokens over a cache with these options of `LLM`: `[scored, vocab]`."""
        return zoo.measure(dict(options), replace(self.material, tasks={})).logprobs

    def quality(self, logprobs: Tensor) -> Quality:
        """How far these are from the plain cache's."""
        return judge(self.reference.logprobs, logprobs, self.material.texts)

    def share_stored(self, options: Mapping[str, Any]) -> float:
        """Bytes of a complete prompt in float16, as a share of the plain cache's; counted on a real cache."""
        stored, _ = stored_bytes(dict(options), self.model, self.prompt_len)
        return stored / plain_bytes(self.model, self.prompt_len)

    def read(self, options: Mapping[str, Any], row: int = 0) -> ModelRunner:
        """A runner whose cache has read the prompt of a row."""
        runner = build(options, self.model, len(self.rows[row]), texts=self.material.fitted)
        read_prompt(runner, self.rows[row], self.prompt_len)
        return runner

    def step(self, runner: ModelRunner, row: int = 0) -> Tensor:
        """Run the first token behind the prompt of a row that `runner` has read; its logits, `[1, vocab]`."""
        blocks = list(range(-(-len(self.rows[row]) // runner.block_size)))
        token = self.rows[row][self.prompt_len]
        return runner.run([Segment([token], self.prompt_len, blocks, 1, num_prompt_tokens=self.prompt_len)])

    def zoo(self, budgets: Mapping[float, Sequence[str]], classes: Mapping[str, type[KVCache]]) -> dict[str, Any]:
        """The techniques of each budget, as `bench zoo` returns them. `classes`: for some techniques the layout to use
        in place of their own. Speeds are not compared."""
        shape, found = self.shape, [zoo.plain_row(self.reference, self.material)]
        for budget, names in budgets.items():
            setting = Setting(budget, self.prompt_len, shape.head_dim, shape.kv_size, shape.num_layers)
            for system in list_systems(lambda _, setting=setting: setting, [budget], names):
                if system.budget is None or system.options is None:
                    continue
                options = dict(system.options)
                if system.technique in classes:
                    chosen = {**options["kv_cache_config"], "layout": classes[system.technique]}
                    options["kv_cache_config"] = chosen
                system = replace(system, options=options)
                found.append(zoo.measure_system(system, self.material, self.reference, compare_speed=False))
        facts = {
            "model": self.name,
            "scored_tokens": len(self.material.texts.targets),
            "recall_without_definition": [asdict(one) for one in self._guesses()],
        }
        return {"config": facts, "rows": [asdict(row) | {"config": {}} for row in found]}

    def _guesses(self) -> Iterator[Recall]:
        """Recall without the definition."""
        runner = build({}, self.model, self.prompt_len + NUM_SCORED)
        for distance, tasks in self.material.tasks.items():
            yield recall(runner, distance, [without_definition(task, self._files, distance) for task in tasks])


class Recorder(CausalAttention):
    """Plain attention that keeps each layer's queries and keys, as attention gets them, with RoPE."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Any = None) -> Tensor:
        """See `CausalAttention.attend`."""
        self.queries.append(q)
        self.keys.append(k)
        self.values.append(v)
        return super().attend(layer, q, k, v, batch)


def record(model: Decoder, token_ids: Sequence[int]) -> Recorder:
    """Run a text through the model; per layer `[tokens, heads, head_dim]`."""
    recorder = Recorder(len(token_ids))
    model(torch.tensor(token_ids), torch.arange(len(token_ids)), recorder)
    return recorder


def attention_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """`[num_heads, keys]` of one token: `queries`: `[num_heads, head_dim]`, `keys`: `[n, num_kv_heads, head_dim]`."""
    shared = keys.repeat_interleave(len(queries) // keys.shape[1], 1)
    return (torch.einsum("hd,nhd->hn", queries, shared) * queries.shape[1] ** -0.5).softmax(-1)
