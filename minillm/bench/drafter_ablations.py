"""Drafters with one idea left out: which share of their drafts is accepted, by position.

`self_sparse` and `self_quant` need no training. Here they draft in the engine, always as many tokens, on the long files
of `bench speculation`: greedily, and at temperature 1. The drafters that `minillm train --ablations` trained were
measured by it, on held-out code; with its folder as `--drafters` they stand in the same table.

Acceptance is counted, so nothing here depends on the machine's speed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from minillm.bench.draft_counts import Counts
from minillm.bench.harness import describe_run
from minillm.bench.speculation import check_prompts, slice_prompts
from minillm.errors import ConfigError
from minillm.models.fingerprint import fingerprint_of_folder
from minillm.models.hub import resolve
from minillm.request import Request
from minillm.speculative.self_sparse import SelfSparseDrafter
from minillm.training.drafter_evaluation import Acceptance

if TYPE_CHECKING:
    from rich.table import Table

PROMPTS, NEW_TOKENS, DRAFTS = 8, 256, 4
TEXT = "long files"


class NewestBlocks(SelfSparseDrafter):
    """`self_sparse` without the sink: the newest blocks only."""

    def chosen_blocks(self, request: Request, newest: int) -> list[int]:
        """See `SelfSparseDrafter.chosen_blocks`."""
        return list(range(max(0, newest - self.num_blocks + 1), newest))


class AttendedBlocks(SelfSparseDrafter):
    """`self_sparse` with layout `snapkv` without its window: the blocks that the prompt attended to most."""

    def chosen_blocks(self, request: Request, newest: int) -> list[int]:
        """See `SelfSparseDrafter.chosen_blocks`."""
        ranking = [block for block in self._ranking.get(request, []) if block < newest]
        return sorted(ranking[: self.num_blocks - 1])


@dataclass(frozen=True)
class Variant:
    """A drafter in the engine."""

    speculative: Mapping[str, Any]
    """Options of `speculative_config`."""
    layout: str = "paged"
    """Of the target's cache."""


VARIANTS: dict[str, dict[str, Variant]] = {
    "self_sparse": {
        "sink and window": Variant({"method": "self_sparse"}),
        "no sink": Variant({"method": NewestBlocks}),
        "chosen by attention, and window": Variant({"method": "self_sparse", "sparse_layout": "snapkv"}),
        "chosen by attention, no window": Variant({"method": AttendedBlocks, "sparse_layout": "snapkv"}),
    },
    "self_quant": {
        "weights and cache in four bits": Variant({"method": "self_quant"}, "paged_two_level"),
        "only the cache": Variant({"method": "self_quant", "quantization": None}, "paged_two_level"),
        "only the weights": Variant({"method": "self_quant"}),
    },
}
"""Method → its variants in the engine, the whole one first."""


@dataclass(frozen=True)
class AblationRow:
    """One variant on one kind of text."""

    method: str
    variant: str
    text: str
    judged: int
    """Rounds in which the first draft was judged at temperature 0; of a trained drafter: places in the text."""
    greedy: list[float]
    """By position: accepted drafts as a share of the judged ones, at temperature 0."""
    sampled: list[float]
    """The same at temperature 1."""
    trained_tokens: int | None = None
    """None: not trained."""
    sure_drafts: int = 0
    """Drafts of each round before these, which are always accepted."""
    tokens_per_round: dict[str, float] = field(init=False)
    """`greedy` and `sampled`: what a round with all drafts gains, the target's own token included."""

    def __post_init__(self) -> None:
        rates = {"greedy": self.greedy, "sampled": self.sampled}
        gained = {name: self.sure_drafts + Acceptance.tokens_per_round(rate) for name, rate in rates.items()}
        object.__setattr__(self, "tokens_per_round", gained)


def run(
    model: str = "minicoder",
    methods: Sequence[str] | None = None,
    drafters: Path | None = None,
    drafts: int = DRAFTS,
    prompts: int = PROMPTS,
    new_tokens: int = NEW_TOKENS,
) -> dict[str, Any]:
    """Measure the variants of `methods` (default: all). Returns the result as JSON values.

    `drafters`: the folder in which `minillm train --ablations` has written its results for this model; None: only what
    needs no training. Raises `ConfigError` for an unknown method, for results of another model, for more prompts than
    there are, and for fewer than three new tokens: the first comes with the prompt, and the last needs no draft.
    """
    if new_tokens < 3:
        raise ConfigError(f"--new-tokens {new_tokens} must be at least 3, so that a round has a draft")
    check_prompts(prompts, [slice_prompts()[TEXT]])
    trained = _trained(drafters, model) if drafters else {}
    known = [*VARIANTS, *trained]
    for name in methods or ():
        if name not in known:
            raise ConfigError(f"there are no ablations of {name!r} here; there are those of {', '.join(known)}")
    chosen = [name for name in known if not methods or name in methods]
    texts, found = slice_prompts()[TEXT][:prompts], list[AblationRow]()
    todo = [(name, *variant) for name in chosen for variant in VARIANTS.get(name, {}).items()]
    for name, variant, options in tqdm(todo, desc="measuring", unit=" variants"):
        found.append(_measured(model, name, variant, options, drafts, texts, new_tokens))
    for name in chosen:
        found += trained.get(name, [])
    config = {
        "model": model,
        "num_speculative_tokens": drafts,
        "prompts": len(texts),
        "new_tokens": new_tokens,
        "device": "cpu",
        "dtype": "float32",
    }
    return {**describe_run("ablations", config), "config": config, "rows": [vars(row) for row in found]}


def _trained(folder: Path, model: str) -> dict[str, list[AblationRow]]:
    """Method → the rows that `minillm train --ablations` wrote."""
    files = sorted(folder.glob(f"ablations-*-{Path(model).name}.json"))
    if not files:
        raise ConfigError(
            f"--drafters {folder}: there are no ablations of {model} in it; `minillm train --stages corpus`, then "
            f"`minillm train --ablations spire long prompt_tokens --target {model}` trains them, in its --folder"
        )
    fingerprint, found = fingerprint_of_folder(resolve(model)), {}
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        if result["fingerprint"] != fingerprint:
            raise ConfigError(
                f"{file} was measured with another {model}: its weights differ; remove it, and train again"
            )
        found[result["method"]] = [_row_of(result, row) for row in result["rows"]]
    return found


def _row_of(result: Mapping[str, Any], row: Mapping[str, Any]) -> AblationRow:
    accepted = row["acceptance"]
    return AblationRow(
        result["method"],
        row["variant"],
        row["text"],
        accepted["roots"],
        accepted["greedy"],
        accepted["sampled"],
        row["tokens"],
        result["sure_drafts"],
    )


def _measured(
    model: str, method: str, variant: str, options: Variant, drafts: int, prompts: Sequence[str], new_tokens: int
) -> AblationRow:
    """Generate with one variant, and count."""
    from minillm import LLM, SamplingParams

    speculative = {**options.speculative, "num_speculative_tokens": drafts, "adaptive": False}
    cache = {"layout": options.layout}
    llm = LLM(model, device="cpu", max_num_seqs=1, speculative_config=speculative, kv_cache_config=cache)
    tokenizer, room = llm.get_tokenizer(), llm.max_model_len - new_tokens
    rates, judged = [], []
    for temperature in (0.0, 1.0):
        counts = Counts()
        for prompt in prompts:
            params = SamplingParams(temperature=temperature, max_tokens=new_tokens, ignore_eos=True)
            with llm.trace() as trace:
                llm.generate([{"prompt_token_ids": tokenizer.encode(prompt)[-room:]}], params, use_tqdm=False)
            counts.count(trace.events)
        rates.append([a / n for a, n in zip(counts.accepted, counts.judged, strict=True)])
        judged.append(counts.judged[0])
    return AblationRow(method, variant, TEXT, judged[0], *rates)


def table(result: Mapping[str, Any]) -> Table:
    """A row for each variant, in sections by method."""
    from rich.table import Table

    made = Table(title="drafters with one idea left out: acceptance by position at temperature 0, tokens per round")
    drafts = max(row["sure_drafts"] + len(row["greedy"]) for row in result["rows"])
    for heading in ("variant", "text", *(f"draft {i + 1}" for i in range(drafts)), "T = 0", "T = 1"):
        made.add_column(heading, justify="left" if heading in ("variant", "text") else "right")
    method = None
    for row in result["rows"]:
        if method != (method := row["method"]):
            made.add_section()
            made.add_row(method, style="bold")
        rates = ["sure"] * row["sure_drafts"] + [f"{rate:.1%}" for rate in row["greedy"]]
        rates += [""] * (drafts - len(rates))
        gained = [f"{row['tokens_per_round'][name]:.2f}" for name in ("greedy", "sampled")]
        made.add_row(row["variant"], row["text"], *rates, *gained)
    return made
