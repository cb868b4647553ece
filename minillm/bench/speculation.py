"""Speculative decoding by method, kind of text, batch and weights, against plain decoding of the same weights.

All engines of one kind of weights and batch run in turn over the prompts of one slice (`minillm.training.slice_prompts`
says what the slices are), with plain decoding before and after every two of them. What counts are the steps in which as
many requests decode as the batch says: a request that ends makes room for another, until none is left. Prompts come
from the prefix cache, and steps with the rest of a prompt do not count. Per row:

    ratio         speed over plain decoding, the median of the rounds, and their spread                      measured
    interval      where the true median of the ratio lies with a probability of 95% or more, if rounds are
                  independent                                                                                measured
    rounds        at least `--rounds`, and more where a run is short (`--seconds`); of plain decoding its runs  counted
    tau           tokens per request and forward of the target                                               measured
    alpha         by position: the share of drafts accepted, of those whose predecessors were                measured
    c, v          seconds of a round's drafting and of the rest of it, over those of a plain step             measured
    predicted     τ over the mean cost of a step, which is c + v with drafts and 1 without                   modelled

Plain decoding has two engines, which take turns: each method runs between one and the other, because equal engines are
not equally fast, and the speed of a single one would count against all methods. It also runs once in each round in the
place of a method: how far the ratio of this row is from 1 is noise. The first run of each engine is a warm-up, of which
nothing counts. Each later run begins with a few tokens that do not count, so that no engine finds more of its weights
in the processor's caches than another.
With `adaptive` the engine decides how many drafts pay; the other rows draft always. c and v are of the rounds with
drafts of all runs that count, without the shortest and longest twentieth of them. A shape with random weights has a
draft of random weights, too, and drafts are accepted at given rates.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minillm.bench.draft_counts import Counts
from minillm.bench.harness import Counted, Row, System, compare, result, save
from minillm.bench.shapes import model_or_shape, shape_folder
from minillm.bench.systems import choose, draft_for, room_for_prompt
from minillm.engine.assembly import DEFAULT_BLOCK_SIZE
from minillm.errors import ConfigError
from minillm.speculative.trained_drafter import bundled_drafter, has_bundled_drafter

if TYPE_CHECKING:
    from rich.table import Table

    from minillm import LLM

ROUNDS, SECONDS, PROMPTS, NEW_TOKENS = 6, 3, 4, 64
"""Fewer than six rounds give no interval."""
SHORTEST_PROMPT = 16
"""The last tokens of a prompt of which a run leaves at least so many, if the completion needs the room."""
WEIGHTS = {"fp32": None, "int8": "int8", "w8a8": "w8a8"}
BATCHES = (1, 4, 16)
PLAIN, AGAIN = "plain", "plain, again"
PLAIN_TURNS = {PLAIN: (PLAIN, AGAIN), AGAIN: (AGAIN, PLAIN)}
"""By system: the engines of plain decoding, in the order in which they take turns."""
WARM_UP_TOKENS = 8
"""New tokens before each run, which do not count."""
WAVES = 2
"""Requests per seat of a run, where there are several seats."""
PLAIN_EVERY = 2
"""Plain decoding runs before and after so many others."""
TRAINED = ("heads", "prompt_tokens", "spire", "long")
"""Methods with weights that were trained for one target."""
LIKELY = {"method": "draft_model", "model": None, "min_survival": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": None},
    "likely draft_model": LIKELY,
    "draft_tree": {"method": "draft_tree", "model": None, "tree_shape": "measured"},
    "staged": {"method": "staged", "model": None},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "suffix or draft_model": {
        "method": "suffix",
        "suffix_decoding_max_cached_requests": 0,
        "fallback": LIKELY,
        "fallback_below": 3,
    },
    "self_sparse": {"method": "self_sparse"},
    "self_quant": {"method": "self_quant"},
    **{method: {"method": method} for method in TRAINED},
}
"""The options of each method; a `model` of None is the draft model, in W8A8: that is faster, and drafts need not be
exact. `TRAINED` ones run where there are weights."""
FIRST_ACCEPTED, NEXT_ACCEPTED = 0.74, 0.78
"""The shares of first drafts, and of later ones whose predecessors were all accepted, that the bundled pair accepts:
means over the kinds of text for `draft_model`, w8a8, one request, in `benchmarks/speculation.json`."""


def synthetic(drafts: int) -> dict[str, dict[str, Any]]:
    """The method for checkpoints with random weights, whose text says nothing about acceptance: drafts are accepted at
    about the rates of the bundled pair. Its tokens are not those of plain decoding."""
    rates = [FIRST_ACCEPTED * NEXT_ACCEPTED**i for i in range(drafts)]
    options = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return {"synthetic": {"method": "draft_model", "model": None, **options}}


def run(
    model: str | None = None,
    draft: str | None = None,
    shape: str | None = None,
    drafters: Path | None = None,
    methods: Sequence[str] | None = None,
    slices: Sequence[str] | None = None,
    weights: Sequence[str] | None = None,
    batches: Sequence[int] = BATCHES,
    drafts: int = 4,
    rounds: int = ROUNDS,
    seconds: int = SECONDS,
    prompts: int = PROMPTS,
    new_tokens: int = NEW_TOKENS,
    block_size: int | None = None,
    save_to: Path | None = None,
) -> dict[str, Any]:
    """Measure every method, fixed and adaptive, on every slice. Returns the result as JSON values.

    `model`, `shape`: see `model_or_shape`.
    `save_to`: the result is written there after each slice, in case the run is killed; its `unfinished` names the
    slices that are still to come.
    `drafters`: the folder that `minillm train --export-to` wrote trained drafters to; None: the bundled ones. A method
    that needs a draft model or trained weights, where this model has none, is left out, or, if it was asked for, raises
    `ConfigError`. So do fewer than two new tokens, more than the model has room for, more prompts than a slice has, and
    a run in which no step counts.
    """
    if new_tokens < 2:
        raise ConfigError(f"--new-tokens {new_tokens} must be at least 2: the first comes with the prompt")
    given = slice_prompts()
    known = METHODS if shape is None else synthetic(drafts)
    chosen = {name: known[name] for name in choose(list(known), methods, "method")}
    kinds, names = choose(list(WEIGHTS), weights, "weights"), choose(list(given), slices, "slice")
    check_prompts(prompts, [given[name] for name in names])
    if shape is not None and drafters is not None:
        raise ConfigError(f"--drafters {drafters} is not used with --shape {shape}: leave one of them out")
    model = model_or_shape(model, shape)
    if shape is None:
        draft = draft_for(model, draft)
        chosen = runnable(chosen, model, draft, drafters, must=methods or ())
        named = {"model": model, "draft": draft}
    else:
        named = {"model": shape, "draft": draft or f"{shape}-draft"}
        draft = draft or str(shape_folder(f"{shape}-draft"))
    context = room_for_prompt(model, new_tokens, SHORTEST_PROMPT) + new_tokens
    config = {
        **named,
        "methods": {name: known[name] for name in chosen},  # without the folders of trained weights
        "drafters": [f"{model}-{name}" for name in chosen if name in TRAINED and drafters is None],
        "num_speculative_tokens": drafts,
        "block_size": block_size,
        "prompts_per_slice": prompts,
        "new_tokens": new_tokens,
        "sampling": "greedy",
        "counted": "steps without prompts in which as many requests decode as the batch says",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "seconds": seconds,
    }
    rows: list[Row] = []
    unfinished = [f"{name} ({kind}, {batch} together)" for kind in kinds for batch in batches for name in names]
    for kind, batch in itertools.product(kinds, batches):
        blocks_per_prompt = -(-context // (block_size or DEFAULT_BLOCK_SIZE))
        num_blocks = max(batch, prompts) * blocks_per_prompt  # so every prompt stays cached
        options = {"max_num_seqs": batch, "block_size": block_size, "num_kv_blocks": num_blocks}
        engines = _engines(model, draft, chosen, WEIGHTS[kind], drafts, options)
        for name in names:
            run_ = SliceRun(engines, given[name][:prompts], batch, new_tokens)
            rows += run_.rows(rounds, seconds, {"weights": kind, "batch": batch, "slice": name})
            unfinished = unfinished[1:]
            outcome = result("speculation", {**config, "unfinished": unfinished}, rows)
            if save_to is not None:
                save(outcome, save_to)
    return outcome


def slice_prompts() -> dict[str, list[str]]:
    """The prompts of every slice."""
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("slice_prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["slice"], []).append(row["prompt"])
    return found


def check_prompts(count: int, slices: Sequence[Sequence[str]]) -> None:
    """Raise `ConfigError` if a slice has fewer than `count` prompts."""
    if count > (most := min(map(len, slices))):
        raise ConfigError(f"--prompts {count} is more than the {most} prompts of a slice; give at most {most}")


def runnable(
    methods: Mapping[str, Mapping[str, Any]],
    model: str,
    draft: str | None,
    drafters: Path | None = None,
    must: Sequence[str] = (),
) -> dict[str, Mapping[str, Any]]:
    """Those of `methods` (name → options) that can draft for `model`: with the folders of trained weights, without the
    methods whose draft model or weights are missing.

    Raises `ConfigError` if one of these is in `must`, or if there is no folder `drafters`.
    """
    if drafters is not None and not drafters.is_dir():
        raise ConfigError(f"--drafters {drafters}: there is no such folder")
    found: dict[str, Mapping[str, Any]] = {}
    for name, options in methods.items():
        if name in TRAINED:
            folder = drafters / f"{Path(model).name}-{name}" if drafters else bundled_drafter(name, model)
            can_run = (folder / "config.json").exists() if drafters else has_bundled_drafter(name, model)
            given = {**options, "model": str(folder)}
            missing = (
                f"there are no weights of method {name!r} in {folder}; `minillm train --stages corpus {name} --target "
                f"{model} --export-to FOLDER` makes them, and --drafters FOLDER finds them"
            )
        else:
            models = (options.get("model", ""), options.get("fallback", {}).get("model", ""))
            can_run, given = draft is not None or None not in models, options
            missing = f"method {name!r} needs a draft model, and none is bundled for {model}; give one with --draft"
        if can_run:
            found[name] = given
        elif name in must:
            raise ConfigError(missing)
    return found


def _engines(
    model: str,
    draft: str | None,
    methods: Mapping[str, Mapping[str, Any]],
    quantization: str | None,
    drafts: int,
    given: Mapping[str, Any],
) -> dict[str, LLM]:
    """Plain decoding, twice, and every method, with a fixed and with an adaptive number of drafts. `given`: options of
    each. Raises `ConfigError` if a method cannot make so many drafts."""
    from minillm import LLM

    def engine(speculative: dict[str, Any] | None) -> LLM:
        return LLM(model, device="cpu", quantization=quantization, speculative_config=speculative, **given)

    engines = {PLAIN: engine(None)}
    for place, (name, options) in enumerate(methods.items()):
        if place == len(methods) // 2:
            engines[AGAIN] = engine(None)
        options = _with_draft(options, draft)
        if "fallback_below" in options:
            options["fallback_below"] = min(options["fallback_below"], drafts)
        for adaptive in (False, True):
            label = f"{name}, adaptive" if adaptive else name
            try:
                engines[label] = engine({**options, "num_speculative_tokens": drafts, "adaptive": adaptive})
            except ConfigError as problem:
                raise ConfigError(f"--drafts {drafts}, method {name!r}: {problem}") from None
    return engines


def _with_draft(options: Mapping[str, Any], draft: str | None) -> dict[str, Any]:
    """`options` with the draft model where they ask for one."""
    found = dict(options)
    if options.get("model", "") is None:
        found |= {"model": draft, "quantization": "w8a8"}
    if "fallback" in options:
        found["fallback"] = _with_draft(options["fallback"], draft)
    return found


class SliceRun:
    """The engines on the prompts of one slice."""

    def __init__(self, engines: Mapping[str, LLM], prompts: Sequence[str], batch: int, new_tokens: int) -> None:
        from minillm import SamplingParams

        self.engines, self.batch = engines, batch
        self.plain = {system: itertools.cycle(turns) for system, turns in PLAIN_TURNS.items()}
        """The engines of plain decoding, in the order in which they run next."""
        self.params, self.warm_up = (
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in (new_tokens, min(WARM_UP_TOKENS, new_tokens))
        )
        tokenizer = engines[PLAIN].get_tokenizer()
        room = engines[PLAIN].max_model_len - new_tokens
        ids = [tokenizer.encode(prompt)[-room:] for prompt in prompts]
        size = batch * WAVES if batch > 1 else 1
        count = -(-len(ids) // size) * size
        requests = [{"prompt_token_ids": ids[i % len(ids)]} for i in range(count)]
        self.groups = [requests[i : i + size] for i in range(0, count, size)]
        """Requests that are given to the engine together."""
        self.counts: dict[str, Counts] = {}
        """By system: the counts of its runs without the warm-up."""
        self.latest: dict[str, list[Counted]] = {}
        """By system: what counts of its latest run, by group."""
        self.runs: Counter[str] = Counter()
        """By system: how often it ran, the warm-up included."""

    def rows(self, rounds: int, seconds: int, labels: Mapping[str, Any]) -> list[Row]:
        """Measure all engines in turn, `rounds` times, or more often if plain decoding runs for less than `seconds`."""
        systems = [
            System(
                name,
                lambda name=name: self._generate(name),
                None if name == PLAIN else PLAIN,
                counted=lambda name=name: self._counted(name),
            )
            for name in self.engines
        ]
        found = compare(systems, rounds, seconds=seconds, first_every=PLAIN_EVERY)
        for row in found:
            row.config["rounds"] = self.runs[row.system] - 1
        return [_with_figures(row, self.counts[row.system], self.counts[PLAIN], labels) for row in found]

    def _generate(self, name: str) -> list[list[int]]:
        llm, outputs = self.engines[next(self.plain[name]) if name in self.plain else name], []
        counts, self.latest[name] = Counts(self.batch), []
        if self.runs[name] > 0:  # the first run is a warm-up itself
            counts = self.counts.setdefault(name, counts)
            llm.generate(self.groups[0][: self.batch], self.warm_up, use_tqdm=False)
        self.runs[name] += 1
        for group in self.groups:
            with llm.trace() as trace:
                outputs += llm.generate(group, self.params, use_tqdm=False)
            self.latest[name].append(counts.count(trace.events))
        return [output.outputs[0].token_ids for output in outputs]

    def _counted(self, name: str) -> Counted:
        """What counts of the latest run of a system. Raises `ConfigError` if no step does."""
        parts = self.latest[name]
        num_tokens = sum(part.num_tokens for part in parts)
        if num_tokens == 0:
            raise ConfigError(
                f"{name}: there is no step in which {self.batch} requests decode; raise --new-tokens, or lower "
                "--batches or --block-size"
            )
        return Counted(sum(part.seconds for part in parts), num_tokens)


def _mean(seconds: Sequence[float]) -> float:
    """The mean without the shortest and longest twentieth: rounds may differ, but interruptions must not count."""
    cut = len(seconds) // 20
    return statistics.mean(sorted(seconds)[cut : len(seconds) - cut])


def _with_figures(row: Row, counts: Counts, plain: Counts, labels: Mapping[str, Any]) -> Row:
    """`row` with the counts of its runs. `plain`: those of plain decoding."""
    row.config.update(labels)
    if row.system == PLAIN:
        return row
    steps, plain_s = len(counts.verify_s) + len(counts.plain_s), _mean(plain.plain_s)
    row.config["tau"] = counts.tokens / max(1, counts.forwards)
    row.config["alpha"] = [a / n for a, n in zip(counts.accepted, counts.judged, strict=True)]
    row.config["rounds_with_drafts"] = len(counts.verify_s) / max(1, steps)
    if counts.verify_s:
        row.config["c"] = _mean(counts.draft_s) / plain_s
        row.config["v"] = _mean(counts.verify_s) / plain_s
        with_drafts = row.config["rounds_with_drafts"]
        cost = with_drafts * (row.config["c"] + row.config["v"]) + 1 - with_drafts
        row.config["predicted"] = row.config["tau"] / cost
    return row


def table(result: Mapping[str, Any]) -> Table:
    """A row for each slice and method, in sections by weights and batch."""
    from rich.table import Table

    made = Table(title=f"speculation on {result['hardware']['cpu']['name']}")
    for heading in ("slice", "method", "speed-up", "95% interval", "predicted", "τ", "c", "v"):
        made.add_column(heading, justify="left" if heading in ("slice", "method") else "right")
    section = None
    for row in result["rows"]:
        if row["baseline"] is None:
            continue
        at = row["config"]
        if section != (section := (at["weights"], at["batch"])):
            made.add_section()
            made.add_row(f"{section[0]}, {section[1]} together", style="bold")
        figures = [f"{at[key]:.2f}" if key in at else "" for key in ("predicted", "tau", "c", "v")]
        speed = f"{row['ratio']:.2f}×" if row["outputs_equal"] else f"{row['ratio']:.2f}×, other tokens"
        interval = "{:.2f} to {:.2f}".format(*row["interval"]) if row["interval"] else ""
        made.add_row(at["slice"], row["system"], speed, interval, *figures)
    return made
