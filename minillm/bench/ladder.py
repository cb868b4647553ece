"""The speed-ups that one article claims for a ladder of techniques, measured again with every setting declared.

The article ("Mastering KV Cache Compression and Speculative Decoding") claims: INT8 KV cache 1.0 times the speed with
three quarters of the memory, speculation (γ = 5) 2.3 times, PagedAttention 3.7 times, all together 4.3 times. It
states no model, no batch size, no context, no GPU, and not whether each rung includes the ones below. Its memory
figures suggest that it does, but then the last rung would be the same as the one before. Nor are they those of the 70B
models in its examples: in FP16 the weights of one take more than the 110 to 125 GB of these rungs.

Here a rung is one technique added to `plain`, and `all` is all three. PagedAttention needs an interpretation, because a
single request gains nothing from the placement of its cache. Paging allows many concurrent requests without reserving
memory for the longest. So *paged batching* runs 16 requests at a time in one pool, while `plain` runs the same 16
requests one after the other. Speed is new tokens of all requests per second of the whole run, prefill included.
`transformers fp32` is the article's baseline: `generate` with its default cache, one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minillm.bench.harness import System, compare, peak_memory_of, result
from minillm.bench.own_engine import options
from minillm.bench.systems import choose, draft_for, prompt_ids, room_for_prompt
from minillm.bench.tables import same_tokens
from minillm.bench.transformers_peers import Transformers
from minillm.models.hub import resolve
from minillm.outputs import tokens_per_forward

if TYPE_CHECKING:
    from rich.table import Table

    from minillm import LLM

HF = "transformers fp32"
RUNGS: dict[str, frozenset[str]] = {
    HF: frozenset(),
    "plain": frozenset(),
    "INT8 KV": frozenset({"INT8 KV"}),
    "speculation": frozenset({"speculation"}),
    "paged batching": frozenset({"paged batching"}),
    "all": frozenset({"INT8 KV", "speculation", "paged batching"}),
}
"""Rung → its techniques."""
CLAIMED: dict[str, tuple[float, int]] = {
    HF: (1.0, 160),
    "INT8 KV": (1.0, 120),
    "speculation": (2.3, 125),
    "paged batching": (3.7, 110),
    "all": (4.3, 110),
}
"""The article's speed over its baseline, as it prints it, and its memory in GB."""
REQUESTS, NEW_TOKENS, DRAFTS, ROUNDS = 16, 64, 5, 5
SHORTEST_PROMPT, LONGEST_PROMPT = 65, 256


def run(
    model: str = "minicoder",
    draft: str | None = None,
    systems: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    prompts: int = REQUESTS,
    new_tokens: int = NEW_TOKENS,
    drafts: int = DRAFTS,
) -> dict[str, Any]:
    """Run every rung in turn on the same requests, `rounds` times. Returns the result as JSON values."""
    import torch

    draft = draft_for(model, draft)
    names = choose(list(RUNGS), systems)
    drafted = [name for name in names if "speculation" in RUNGS[name]]
    missing = {} if draft else dict.fromkeys(drafted, "there is no draft model for it")
    names = [name for name in names if name not in missing]
    longest = min(LONGEST_PROMPT, room_for_prompt(model, new_tokens, SHORTEST_PROMPT))
    requests = prompt_ids(model, prompts, SHORTEST_PROMPT, longest)
    spec = (model, draft, drafts, requests, new_tokens)
    systems_to_compare = [
        rung(name, *spec, baselines=tuple(b for b in baselines_of(name) if b in names)) for name in names
    ]
    code = f"from {__name__} import rung; rung({{!r}}, *{spec!r}).run()"
    rows = compare(systems_to_compare, rounds, lambda name: peak_memory_of(code.format(name)))
    config = {
        "model": model,
        "draft": draft,
        "requests": prompts,
        "prompt_tokens": [len(ids) for ids in requests],
        "new_tokens": new_tokens,
        "requests_at_a_time": {name: prompts if "paged batching" in RUNGS[name] else 1 for name in names},
        "num_speculative_tokens": drafts,
        "sampling": "greedy",
        "dtype": "float32",
        "counted": "new tokens of all requests over the whole run, prefill in it",
        "claimed": {name: {"speed": speed, "memory": gb / CLAIMED[HF][1]} for name, (speed, gb) in CLAIMED.items()},
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "left_out": missing,
    }
    return result("ladder", config, rows)


def baselines_of(name: str) -> tuple[str, ...]:
    """The baselines of a rung: transformers, and for the rungs above `plain` also `plain`."""
    return {HF: (), "plain": (HF,)}.get(name, ("plain", HF))


def rung(
    name: str,
    model: str,
    draft: str | None,
    drafts: int,
    requests: list[list[int]],
    new_tokens: int,
    baselines: tuple[str, ...] = (),
) -> System:
    """Load one rung. Its `run` returns the new tokens of every request."""
    if name == HF:
        peer = Transformers(resolve(model), "float32", "dynamic", 0)
        return System(name, lambda: [peer.complete(ids, new_tokens).token_ids for ids in requests], baselines or None)
    from minillm import LLM, SamplingParams

    parts = RUNGS[name]
    llm_options = options("minillm fp32 + draft" if "speculation" in parts else "minillm fp32", draft, drafts)
    llm = LLM(model, **llm_options, kv_cache_dtype="int8" if "INT8 KV" in parts else "auto")
    prompts = [{"prompt_token_ids": ids} for ids in requests]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    at_once = len(prompts) if "paged batching" in parts else 1
    last: dict[str, Any] = {}

    def run_once() -> list[list[int]]:
        outputs, before = [], llm.engine.num_steps
        for i in range(0, len(prompts), at_once):
            outputs += llm.generate(prompts[i : i + at_once], params, use_tqdm=False)
        last["steps"] = llm.engine.num_steps - before
        last["tokens_per_forward"] = tokens_per_forward(outputs)
        return [o.outputs[0].token_ids for o in outputs]

    return System(name, run_once, baselines or None, lambda: {**last, "kv_bytes_per_token": kv_bytes_per_token(llm)})


def kv_bytes_per_token(llm: LLM) -> float:
    """Bytes of the block pool per token, the draft model's keys and values included."""
    with llm.trace() as trace:
        started = trace.events[0]
    return started.bytes_per_block / started.block_size


def table(outcome: dict[str, Any]) -> Table:
    """One line for each rung: the article's claim and the measurement."""
    from rich.table import Table

    made = Table(title=f"ladder on {outcome['hardware']['cpu']['name']}")
    headings = ("claimed", "over transformers", "over plain", "claimed memory", "KV bytes a token", "peak MB", "tokens")
    for heading in ("rung", *headings):
        made.add_column(heading, justify="left" if heading == "rung" else "right")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in outcome["rows"]:
        rows.setdefault(row["system"], []).append(row)
    for name, found in rows.items():
        made.add_row(name, *_line(name, found))
    for name, reason in outcome["config"]["left_out"].items():
        made.add_row(name, reason)
    return made


def _line(name: str, rows: list[dict[str, Any]]) -> list[str]:
    by_base = {row["baseline"]: row for row in rows}
    speed, memory = CLAIMED.get(name, (None, None))
    over = [
        f"{r['ratio']:.2f}× ({r['ratio_min']:.2f} to {r['ratio_max']:.2f})" if (r := by_base.get(base)) else ""
        for base in (HF, "plain")
    ]
    last = rows[0]
    kv, peak = last["config"].get("kv_bytes_per_token"), last["peak_memory_bytes"]
    return [
        f"{speed:.1f}×" if speed else "",
        *over,
        f"{memory} GB" if memory else "",
        f"{kv:,.0f}" if kv else "",
        f"{peak / 1e6:.0f}" if peak else "",
        same_tokens(last) if last["baseline"] else "",
    ]
