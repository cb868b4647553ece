"""The latency of one completion: 24 tokens of code after a held-out prompt of 200 tokens, from the call to the text.

`cold`: the engine is warmed up, but the prompt is not in the prefix cache. `warm`: the prompt has just been run, so all
but its last few tokens are in the prefix cache, as when an editor asks again in the same file. Both include prefill,
decode and detokenising. `cold` and `warm` without an engine's name are full precision; `warm int8 + draft` is that
engine. A few tokens that do not count come before `cold`, so that both find the engine's weights in the processor's
caches. Percentiles are over completions, not over tokens. A ratio is the median over rounds, in each of which the time
of all prompts together counts: repeats of one prompt are not independent, so they would make the interval too narrow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from minillm.bench.harness import Row, common_prefix_share, median_interval, peak_memory_of, result
from minillm.bench.own_engine import options
from minillm.bench.systems import choose, draft_for, left_out, prompt_ids, room_for_prompt
from minillm.bench.tables import speed_table
from minillm.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

PROMPT_TOKENS, NEW_TOKENS = 200, 24
PROMPTS, ROUNDS = 8, 6
WARM_UP_TOKENS = 8
"""Tokens of a prompt, and new ones, that are run before each completion with an empty prefix cache."""
FEWEST = 20
"""Minimum number of completions for a percentile."""
PLAIN = "minillm fp32"
ENGINES = tuple(
    f"minillm {precision}{drafted}"
    for drafted in ("", " + draft", " + suffix")
    for precision in ("fp32", "int8", "w8a8")
)


class Engine:
    """One engine with a prefix cache, and the times and tokens of its completions."""

    def __init__(self, name: str, model: str, draft: str | None, drafts: int) -> None:
        from minillm import LLM

        self.name = name
        self.llm = LLM(model, **{**options(name, draft, drafts), "enable_prefix_caching": True})
        self.seconds: dict[str, list[float]] = {"cold": [], "warm": []}
        self.tokens: dict[str, list[list[int]]] = {"cold": [], "warm": []}
        self.cached_tokens = {"cold": 0, "warm": 0}
        """Prompt tokens that the last completion found in the cache."""

    def complete(self, prompt: list[int], new_tokens: int) -> None:
        """Complete the prompt with an empty prefix cache, then again with a warm one."""
        from minillm import SamplingParams

        params, few = (
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (new_tokens, WARM_UP_TOKENS)
        )
        self.llm.generate({"prompt_token_ids": prompt[:WARM_UP_TOKENS]}, few, use_tqdm=False)
        self.llm.reset_prefix_cache()
        for kind in ("cold", "warm"):
            began = time.perf_counter()
            [output] = self.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            self.seconds[kind].append(time.perf_counter() - began)
            self.tokens[kind].append(output.outputs[0].token_ids)
            self.cached_tokens[kind] = output.num_cached_tokens

    def forget(self) -> None:
        """Discard all measurements so far, which were the warm-up."""
        self.seconds, self.tokens = {"cold": [], "warm": []}, {"cold": [], "warm": []}


def run(
    model: str = "minicoder",
    draft: str | None = None,
    systems: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    prompts: int = PROMPTS,
    new_tokens: int = NEW_TOKENS,
    drafts: int = 4,
) -> dict[str, Any]:
    """Run every engine on every prompt, cold then warm, `rounds` times. Returns the result as JSON values.

    `systems` are engines, such as `minillm int8 + draft`. Raises `ConfigError` for an unknown one, for fewer than 20
    completions, which are too few for a percentile, and for more new tokens than there is room for.
    """
    import torch

    if rounds * prompts < FEWEST:
        raise ConfigError(
            f"{rounds} rounds of {prompts} prompts are {rounds * prompts} completions; take {FEWEST} or more"
        )
    draft = draft_for(model, draft)
    names = choose(ENGINES, systems)
    missing = left_out(names, draft)
    room_for_prompt(model, new_tokens, PROMPT_TOKENS)
    ids = prompt_ids(model, prompts, PROMPT_TOKENS, PROMPT_TOKENS)
    engines = [Engine(name, model, draft, drafts) for name in names if name not in missing]
    measure(engines, ids, rounds, new_tokens)
    rows = []
    for engine in engines:
        build = f"Engine({engine.name!r}, {model!r}, {draft!r}, {drafts})"
        peak = peak_memory_of(f"from {__name__} import Engine; {build}.complete({ids[0]!r}, {new_tokens})")
        rows += rows_of(engine, engines[0], new_tokens, rounds, peak)
    config = {
        "model": model,
        "draft": draft,
        "batch": 1,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": new_tokens,
        "prompts": prompts,
        "completions": rounds * prompts,
        "num_speculative_tokens": drafts,
        "sampling": "greedy",
        "counted": "one completion from the call to the text, prefill and detokenising in it",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "left_out": missing,
    }
    return result("latency", config, rows)


def table(outcome: dict[str, Any]) -> Table:
    """The rows for the terminal, with the 90th percentile and the number of cached prompt tokens."""
    return speed_table(outcome, {"p90_ms": "p90 ms", "cached_tokens": "cached"}, unit="completion", rate="tokens/s")


def measure(engines: Sequence[Engine], prompts: Sequence[list[int]], rounds: int, new_tokens: int) -> None:
    """Run every engine in turn on each prompt. The first round is a warm-up and is discarded."""
    with tqdm(total=(rounds + 1) * len(prompts) * len(engines), desc="measuring", unit=" completions") as bar:
        for turn in range(rounds + 1):
            for prompt in prompts:
                for engine in engines:
                    bar.set_postfix_str(engine.name)
                    engine.complete(prompt, new_tokens)
                    bar.update()
            if turn == 0:
                for engine in engines:
                    engine.forget()


def rows_of(engine: Engine, first: Engine, new_tokens: int, rounds: int, peak: int | None) -> list[Row]:
    """An engine's cold row, compared with the first engine's cold row, and its warm row, compared with its cold one."""
    others = {"cold": None if engine is first else (first, "cold"), "warm": (engine, "cold")}
    return [_row(engine, kind, other, new_tokens, rounds, peak) for kind, other in others.items()]


def system_name(kind: str, engine: str) -> str:
    """`cold` for full precision, otherwise with the engine's name, as in `cold int8 + draft`."""
    return kind if engine == PLAIN else f"{kind} {engine.removeprefix('minillm ')}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _per_round(seconds: Sequence[float], rounds: int) -> list[float]:
    """The time of all prompts together, in each round."""
    prompts = len(seconds) // rounds
    return [sum(seconds[i : i + prompts]) for i in range(0, len(seconds), prompts)]


def _row(
    engine: Engine, kind: str, other: tuple[Engine, str] | None, new_tokens: int, rounds: int, peak: int | None
) -> Row:
    seconds, tokens = engine.seconds[kind], engine.tokens[kind]
    ratios, equal, same = [], None, None
    if other is not None:
        base, base_kind = other
        pairs = zip(_per_round(base.seconds[base_kind], rounds), _per_round(seconds, rounds), strict=True)
        ratios = [b / own for b, own in pairs]
        equal = tokens == base.tokens[base_kind]
        same = common_prefix_share(tokens, base.tokens[base_kind])
    median = statistics.median(seconds)
    return Row(
        system=system_name(kind, engine.name),
        baseline=system_name(base_kind, base.name) if other else None,
        ratio=statistics.median(ratios) if ratios else None,
        ratio_min=min(ratios, default=None),
        ratio_max=max(ratios, default=None),
        tokens_per_s=new_tokens / median,
        p50_ms=1000 * median,
        peak_memory_bytes=peak,
        outputs_equal=equal,
        interval=median_interval(ratios),
        config={
            "engine": engine.name,
            "p90_ms": 1000 * percentile(seconds, 0.9),
            "cached_tokens": engine.cached_tokens[kind],
        },
        same_start=same,
    )
