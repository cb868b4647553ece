"""Sweeps over a cluster: `minillm bench speculation` for every combination of method, drafts per round and block size.

Each point runs plain decoding and the method in turn in one worker, so a ratio compares two runs on the same machine.
Points run on different machines, and several at a time on one: compare their counts, their ratios with care, and their
times only if each worker had its processors to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.bench import speculation
from minillm.bench.systems import draft_for, room_for_prompt
from minillm.cluster.absolute_paths import absolute_model
from minillm.cluster.parts_folder import PartsFolder
from minillm.cluster.worker_pool import Pool
from minillm.config import at_least
from minillm.engine.compatibility import check_drafters
from minillm.errors import ConfigError
from minillm.models.fingerprint import identity_of_folder
from minillm.models.hub import resolve
from minillm.models.loading import load_config
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.drafter import TargetInfo
from minillm.tokenizer import Tokenizer
from minillm.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

Progress = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class Point:
    """One combination."""

    method: str
    drafts: int
    block_size: int


@dataclass(frozen=True)
class SweepSettings:
    """What is measured at every point; see `minillm.bench.speculation.run`. Folders of models are made absolute,
    because workers run in another folder."""

    model: str = "minicoder"
    draft: str | None = None
    methods: tuple[str, ...] = ("draft_model", "ngram", "suffix")
    drafts: tuple[int, ...] = (2, 4, 8)
    block_sizes: tuple[int, ...] = (16,)
    slices: tuple[str, ...] = ()
    """Kinds of text; none: all."""
    weights: str = "fp32"
    batch: int = 1
    rounds: int = 3
    prompts: int = speculation.PROMPTS
    new_tokens: int = speculation.NEW_TOKENS

    def __post_init__(self) -> None:
        slices = speculation.slice_prompts()
        for what, given, known in (
            ("method", self.methods, speculation.METHODS),
            ("slice", self.slices, slices),
            ("kind of weights", (self.weights,), speculation.WEIGHTS),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"there is no {what} {name!r}; there are: {', '.join(known)}")
        for name in ("methods", "drafts", "block_sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{name} {values} must be one or more values, each once")
        for name in ("drafts", "block_sizes"):
            for value in getattr(self, name):
                at_least(name, value, 1)
        for name in ("batch", "rounds", "prompts"):
            at_least(name, getattr(self, name), 1)
        at_least("new_tokens", self.new_tokens, 2)  # the first comes with the prompt
        speculation.check_prompts(self.prompts, [slices[name] for name in self.slices or slices])
        room_for_prompt(self.model, self.new_tokens, speculation.SHORTEST_PROMPT)
        methods = {name: speculation.METHODS[name] for name in self.methods}
        draft = draft_for(self.model, self.draft)
        self._check_drafts(speculation.runnable(methods, self.model, draft, must=self.methods), draft)
        object.__setattr__(self, "model", absolute_model(self.model))
        object.__setattr__(self, "draft", absolute_model(self.draft))

    def _check_drafts(self, methods: Mapping[str, Mapping[str, Any]], draft: str | None) -> None:
        """Raise `ConfigError` for a method that cannot make the most drafts, or not with the largest blocks."""
        folder, drafts = resolve(self.model), max(self.drafts)
        config, tokenizer = load_config(folder), Tokenizer.from_folder(folder)
        target = TargetInfo(self.model, config, tokenizer, max(self.block_sizes), config.max_position_embeddings)
        for name, given in methods.items():
            # A fallback has a number of its own.
            options = {key: value for key, value in given.items() if not key.startswith("fallback")}
            if options.get("model", "") is None:
                options["model"] = draft
            try:
                check_drafters(target, SpeculativeConfig.from_dict({**options, "num_speculative_tokens": drafts}))
            except ConfigError as problem:
                raise ConfigError(f"drafts={drafts}, method {name!r}: {problem}") from None

    @property
    def points(self) -> list[Point]:
        """All combinations."""
        return [Point(*values) for values in product(self.methods, self.drafts, self.block_sizes)]

    def job(self) -> dict[str, Any]:
        """What a folder of results belongs to."""
        models = [model for model in (self.model, draft_for(self.model, self.draft)) if model is not None]
        identities = [identity_of_folder(resolve(model)) for model in models]
        return {"kind": "sweep", "version": __version__, "identities": identities, **asdict(self)}


class SweepWorker:
    """Measures points."""

    def __init__(self, settings: SweepSettings) -> None:
        self.settings = settings

    def run(self, point: Point) -> list[dict[str, Any]]:
        """The rows of one point, one per slice, with the machine that measured them."""
        own = self.settings
        found = speculation.run(
            own.model,
            own.draft,
            methods=[point.method],
            slices=own.slices or None,
            weights=[own.weights],
            batches=[own.batch],
            drafts=point.drafts,
            rounds=own.rounds,
            seconds=0,
            prompts=own.prompts,
            new_tokens=own.new_tokens,
            block_size=point.block_size,
        )
        rows = [row for row in found["rows"] if row["system"] == point.method]
        return [{**asdict(point), **row, "hardware": found["hardware"]["cpu"]["name"]} for row in rows]


def sweep(out: Path, settings: SweepSettings, pool: Pool, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Measure all points. Returns their rows. Points that are in `out` already are not measured again.

    `progress`: called as `progress(iterable, total=…)`. Raises the errors of `PartsFolder.open` and the pool.
    """
    points = settings.points
    parts = [(number, number + 1) for number in range(len(points))]
    with PartsFolder(out, settings.job()).open() as folder:
        left = [part for part in parts if not folder.has(*part)]
        done = pool.map(partial(SweepWorker, settings), [points[begin] for begin, _ in left])
        for number, rows in progress(done, total=len(left)) if progress else done:
            folder.write(*left[number], rows)
        return list(folder.read(parts))


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row per point and slice, the best tokens per forward first within a slice."""
    from rich.table import Table

    made = Table(title="speculation; τ is counted, the speed-up measured")
    for heading in ("slice", "method", "drafts", "block", "τ", "speed-up", "spread", "same text"):
        made.add_column(heading, justify="left" if heading in ("slice", "method") else "right")
    for row in sorted(rows, key=lambda row: (row["config"]["slice"], -row["config"]["tau"])):
        spread = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
        point = row["config"]["slice"], row["method"], str(row["drafts"]), str(row["block_size"])
        same = "yes" if row["outputs_equal"] else "no"
        made.add_row(*point, f"{row['config']['tau']:.2f}", f"{row['ratio']:.2f}×", spread, same)
    return made
