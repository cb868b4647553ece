"""The text of `docs/measured.md`: a table for each benchmark, with what it counts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ablations_page import ablations
from results import (
    EARLIER,
    Result,
    has_extremes_for_intervals,
    is_of_bundled_weights,
    load,
    number,
    ratio,
    revision,
    row_of,
    table_head,
)
from speculation_page import speculation
from technique_figures import drafting, repeated_completions

from minillm.bench.kernel_products import SCHEMES
from minillm.bench.ladder import CLAIMED
from minillm.bench.tables import same_tokens

COLUMNS = ("prompt_tokens", "setting", "condition", "steps", "tokens_per_forward", "kv_bytes_per_token")
"""Values of a row's `config` that have a column of their own, if they are there."""


@dataclass(frozen=True)
class Section:
    """One benchmark in `docs/measured.md`."""

    file: str
    title: str
    text: str
    unit: str = "token"
    """What "ms per" is the time of."""
    rate: str = "tokens/s"
    derived: Callable[[], str] = str
    """Further sentences, which depend on the figures."""


def verification() -> str:
    """What a forward over five tokens costs, with which draft it is compared, and what the engine adds."""
    cost = {name: row_of("verify", f"minillm {name} verify 5")["config"]["verify_over_decode"] for name in PRECISIONS}
    config = load("verify")["config"]
    promised, measured = [], []
    for name, v in cost.items():
        c = row_of("verify", f"minillm {name} draft decode 1")["config"]["draft_over_target"]
        gain = row_of("decode", f"minillm {name} + draft", f"minillm {name}")
        tokens, drafts = gain["config"]["tokens_per_forward"], config["verified_tokens"] - 1
        promised.append(f"{tokens / (drafts * c + v):.2f} ({name})")
        measured.append(f"{gain['ratio']:.2f}")
    within = [row["config"]["v"] for row in drafting("draft_model")]
    return (
        f"The five tokens cost {', '.join(f'{value:.2f} times one ({name})' for name, value in cost.items())}. "
        f"The draft model is quantised to {config['draft_quantization']}. These forwards run without the engine. Their "
        f"`c` and `v` promise the `+ draft` lines of the first table a speed-up, τ / ({drafts}c + v), of "
        f"{', '.join(promised)}; measured were {', '.join(measured)}. In the engine `v` is {min(within):.2f} to "
        f"{max(within):.2f} in fp32 (`benchmarks/speculation.json`)."
    )


FAR = 0.15
"""Two times of a step differ if they are this share apart, more than the engine explains."""


def apart_from_decoding() -> str:
    """Where a step alone and a step of the engine, in different runs, are too far apart; empty if nowhere."""
    alone = {name: row_of("verify_0.4b", f"minillm {name} decode 1")["p50_ms"] for name in PRECISIONS}
    engine = {name: row_of("decode_0.4b", f"minillm {name}")["p50_ms"] for name in PRECISIONS}
    far = [name for name in PRECISIONS if engine[name] / alone[name] - 1 > FAR]
    if not far:
        return ""
    steps = ", ".join(f"{alone[name]:.3g} and {engine[name]:.3g} ms ({name})" for name in PRECISIONS)
    return (
        f"A step over a single token takes, here and in the table before, {steps}. The two are of different runs, and "
        f"why {' and '.join(far)} differs so much is not known: compare only within a table."
    )


def repeated_prompts() -> str:
    """What is said of a result that has a ratio for each completion; a newer one has one for each round."""
    config = load("latency")["config"]
    if "prompts" in config:
        return ""
    return (
        f"Ratios and brackets are over pairs of {repeated_completions()}, as if all were independent. Repeats of one "
        "prompt are not, so the brackets may be too narrow."
    )


def claims() -> str:
    """What the article of the ladder claims, and what is so. Raises `ValueError` if the result no longer says so."""
    (base, (_, base_memory)), *rungs = CLAIMED.items()
    claimed = ", ".join(f"{name} {speed}× in {memory} GB" for name, (speed, memory) in rungs)
    paging = CLAIMED["paged batching"][0] / CLAIMED["speculation"][0]
    paged, combined = (row_of("ladder", name, "plain") for name in ("paged batching", "all"))
    plain = row_of("ladder", "plain", base)
    if not (combined["ratio_min"] < paged["ratio"] < combined["ratio_max"] and plain["ratio"] > CLAIMED["all"][0]):
        raise ValueError("what docs/measured.md says about the ladder is no longer true")
    return (
        f"Claimed, over its baseline in {base_memory} GB without any of them: {claimed}. "
        f"The article's rows seem to include those above them; then paging adds {paging:.2f}×. Its table names no "
        "model; its examples load models of 70 billion parameters, whose weights alone take about 138 GB in FP16 "
        "(lesson 4), more than any of these rungs. Measured, all three together are not measurably faster than paged "
        f"batching alone: {combined['ratio']:.2f}× and {paged['ratio']:.2f}× over `plain`. Over transformers, the "
        f"article's baseline, `plain` is {plain['ratio']:.1f}× as fast with none of the three, more than the "
        f"claimed {CLAIMED['all'][0]}×."
    )


def shared_processors() -> str:
    """How many processors the HTTP server shares with its clients."""
    count = load("serve")["config"]["processors"]
    return f"Server and client share {count} processor{'s' * (count > 1)}."


ALL_AT_ONCE = ", 32 seats"


def at_a_time(file: str) -> str:
    """How many of the 32 requests run at a time."""
    result = load(file)
    names = {row["system"] for row in result["rows"]}
    text = f"At most {result['config']['max_num_seqs']} requests run at a time"
    text += ", with `32 seats` 32." if any(name.endswith(ALL_AT_ONCE) for name in names) else "."
    return text + " vLLM with all 32 at a time was not measured." * (f"vLLM CPU{ALL_AT_ONCE}" not in names)


def prefill_peers(file: str) -> str:
    """What is not as it should be with the systems that prefill is compared with."""
    if any("tried_ms_per_prompt" in row["config"] for row in load(file)["rows"]):
        return ""
    return "llama.cpp's setting is the one that was faster in a single run with the shortest prompt."


PRECISIONS = ("fp32", "int8", "w8a8")

PROMPT = ("prompt token", "prompt tokens/s")
TOGETHER = ("token of all requests", "tokens/s of all requests")
MIXED = "vLLM computes in bf16, as `minillm continuous bf16` does, `minillm continuous` in fp32 on the same weights."
SECTIONS = (
    Section(
        "decode",
        "Decoding, batch 1",
        "Greedy, the bundled model, held-out prompts, 128 new tokens each, prefill left out, except that of the draft "
        "model. `int8` quantises the "
        "weights of the layers and of the unembedding (and rounds their inputs to 16 bits), `w8a8` also the inputs of "
        "the layers' linears, llama.cpp's Q8_0 all weights and inputs, and `int4` only the layers' weights. `+ draft` "
        "is the draft model, quantised to w8a8, with four drafts per round; `+ ngram` drafts the four tokens that "
        "followed the last two to five tokens earlier in the text; `+ suffix` drafts up to eight tokens from earlier "
        "text and so needs repetitive text.",
    ),
    Section(
        "decode_avx2",
        "Decoding, batch 1, with AVX2 alone",
        "As above, on a processor without AVX-512 and VNNI: AMD before Zen 4, Intel's laptops before Ice Lake. There "
        "`int8` multiplies 16-bit numbers.",
    ),
    Section(
        "decode_xeon",
        "Decoding, batch 1, on a Xeon of the Ice Lake generation",
        "As in the first table, on a processor with AVX-512 and its VNNI, without AVX-VNNI and AMX.",
    ),
    Section(
        "verify",
        "What verifying and drafting cost",
        "A forward over five tokens, and one of the draft model, against one of the target over a single token.",
        "forward",
        "forwards/s",
        verification,
    ),
    Section(
        "batch",
        "32 requests at once",
        "Outputs of 8 to 256 tokens with a heavy tail, greedy, float32, prefill included. transformers' padded batches "
        "use its growing cache; its preallocated one was not tried. `+ draft` drafts three tokens per round, while at "
        "most three requests are unfinished; `+ suffix` drafts always.",
        *TOGETHER,
        partial(at_a_time, "batch"),
    ),
    Section(
        "serve",
        "The HTTP server with 32 clients",
        "64 requests of up to 192 prompt tokens and 128 new ones, greedy, float32, without prefix caching. Answers are "
        "whole, with `streamed` token by token; vLLM's server answers the same client, whole. The memory of `offline` "
        "is that of 32 of the requests.",
        *TOGETHER,
        shared_processors,
    ),
    Section(
        "prefill",
        "Prefill",
        "Prompt tokens until the first new token. Now and then minillm tries one thread in place of two; such a run "
        "takes about twice as long, and counts like the others.",
        *PROMPT,
        partial(prefill_peers, "prefill"),
    ),
    Section(
        "latency",
        "A completion in an editor",
        "24 tokens of code after a prompt of 200, in fp32 where nothing else is said. `warm` finds the prompt in the "
        "prefix cache.",
        "completion",
        derived=repeated_prompts,
    ),
    Section(
        "decode_0.4b",
        "Decoding at 0.4 billion parameters",
        "24 layers of 896, random weights in bf16. At this size reading the weights from memory dominates. "
        "transformers is not compiled: torch.compile takes minutes at this size.",
    ),
    Section(
        "verify_0.4b",
        "Verifying at 0.4 billion parameters",
        "A forward over five tokens against one over a single token, at this shape.",
        "forward",
        "forwards/s",
        apart_from_decoding,
    ),
    Section(
        "batch_0.4b",
        "32 requests at 0.4 billion parameters",
        MIXED,
        *TOGETHER,
        partial(at_a_time, "batch_0.4b"),
    ),
    Section(
        "decode_0.4b_xeon",
        "Decoding at 0.4 billion parameters, with AMX",
        "24 layers of 896, random weights in bf16. transformers is not compiled, as above. llama.cpp Q8_0 is left out: "
        "it crashes on this processor.",
    ),
    Section(
        "prefill_0.4b_xeon",
        "Prefill at 0.4 billion parameters, with AMX",
        "In bf16 minillm multiplies once, as transformers does; in fp32 it takes three products of bf16 "
        "(`minillm/ops/cpu/amx_products.py`).",
        *PROMPT,
        partial(prefill_peers, "prefill_0.4b_xeon"),
    ),
    Section(
        "batch_0.4b_xeon",
        "32 requests at 0.4 billion parameters, with AMX",
        MIXED,
        *TOGETHER,
        partial(at_a_time, "batch_0.4b_xeon"),
    ),
    Section(
        "ladder",
        "The ladder of one article",
        'The claims of "Mastering KV Cache Compression and Speculative Decoding", with every setting declared '
        "(`minillm/bench/ladder.py`): one technique at a time added to `plain`, and all of them. 16 requests, one "
        "after the other where they are not batched, prefill included.",
        *TOGETHER,
        claims,
    ),
    Section(
        "threads",
        "Threads",
        "Whole completions of one request with more threads than processors, on a machine as it is, beside busy "
        "processes, and with a CPU quota. Compare only lines of one condition: prefill is included, so the numbers are "
        "below those of the first table.",
    ),
)


def section(part: Section) -> str:
    """A section of `docs/measured.md`."""
    result = load(part.file)
    text = " ".join(filter(None, (part.text, part.derived())))
    return f"## {part.title}\n\n{text}\n\n{_how(part.file, result)}\n\n{_table(part, result)}"


def _how(file: str, result: Result) -> str:
    """Rounds, if there are any, machine, versions, revision and weights of a result."""
    hardware, versions, config = result["hardware"]["cpu"], result["versions"], result["config"]
    threads = f"{config['threads']} thread{'s' * (config['threads'] != 1)} on " if "threads" in config else ""
    used = ", ".join(f"{name} {version}" for name, version in versions.items() if version) + _vllm(result)
    weights = "" if is_of_bundled_weights(file) else f" Measured {EARLIER}."
    machine = f"{threads}{hardware['name']} ({', '.join(hardware['simd'])})"
    brackets = ""
    if "rounds" in config and has_extremes_for_intervals(file):
        brackets = " In brackets are the lowest and the highest: this result has no intervals."
    return (
        f"{_rounds(result)}{machine}. {used}. Revision {revision(result)}.{weights}{brackets} "
        f"Results: `benchmarks/{file}.json`."
    )


def _vllm(result: Result) -> str:
    """vLLM's version and that of its PyTorch, as far as they were recorded: it has an environment of its own."""
    at = next((row["config"] for row in result.get("rows", ()) if row.get("system", "").startswith("vLLM")), None)
    if at is None:
        return ""
    torch = f" with torch {at['vllm_torch']}" if "vllm_torch" in at else ""
    return f", vLLM {at.get('vllm', '(version not recorded)')}{torch}"


def _rounds(result: Result) -> str:
    """How often the systems ran. Where rows say it themselves, those with short runs ran more often."""
    config = result["config"]
    lines = [row for row in result.get("rows", ()) if row.get("baseline") and "rounds" in row["config"]]
    counts = {row["config"]["rounds"] for row in lines}
    counts = counts or ({config["rounds"]} if "rounds" in config else set())
    words = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else ""
    return words and f"{words} rounds, "


def _table(part: Section, result: Result) -> str:
    """One row per system, prompt length and condition; what it is compared with stands after the figures. Then follows,
    if some system gives other tokens than one that it is compared with, whether they are the same."""
    also = [key for key in COLUMNS if any(key in row["config"] for row in result["rows"])]
    heads = ["system", *(key.replace("_", " ") for key in also), part.rate, f"ms per {part.unit}"]
    differ = any(row["outputs_equal"] is False for row in result["rows"])
    lines = [*table_head([*heads, "peak MB", "speed over", *["same tokens"] * differ])]
    systems: dict[tuple[Any, ...], list[Result]] = {}
    for row in result["rows"]:
        key = (row["system"], row["config"].get("prompt_tokens"), row["config"].get("condition"))
        systems.setdefault(key, []).append(row)
    for rows in systems.values():
        first = rows[0]
        peak = first["peak_memory_bytes"]
        cells = [first["system"], *(_cell(first["config"].get(key)) for key in also)]
        cells += [number(first["tokens_per_s"]), f"{first['p50_ms']:.3g}", number(peak and peak / 1e6)]
        cells.append("<br>".join(f"{ratio(row)} {row['baseline']}" for row in rows if row["baseline"]))
        same = [same_tokens(row) for row in rows if row["baseline"]]
        cells += ["<br>".join(same if len(set(same)) > 1 else same[:1])] * differ
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def kernels() -> str:
    """The section on single ops: the compiled ones for one token, at the larger of both shapes."""
    result = load("kernels")
    compiled = {row["config"]["op"] for row in result["rows"] if row["config"]["implementation"] == "compiled"}
    lacking = [f"`{name}`" for name in SCHEMES if name not in compiled]
    later = f"The result lacks the compiled {' and '.join(lacking)}, which came later.\n" if lacking else ""
    heads = ["op", "tokens in the cache", "µs", "of a copy's bandwidth", "speed over the reference"]
    lines = table_head([*heads, "over the engine's PyTorch"])
    shown = [row for row in result["rows"] if (row["config"]["shape"], row["config"]["tokens"]) == ("0.4b", 1)]
    pytorch = {_op(row): row["config"] for row in shown if row["config"]["implementation"] == "pytorch"}
    for row in shown:
        at = row["config"]
        if at["implementation"] == "compiled":
            kind = "cold" if "cold_us" in at else "warm"
            share = f"{at['cold_of_copy']:.0%}" if kind == "cold" else "in cache"
            took, own = at[f"{kind}_us"], pytorch.get(_op(row))
            over = f"{own[f'{kind}_us'] / took:.2f}×" if own else ""
            name = f"{at['op']} {at['kind']}".strip()
            lines.append(f"| {name} | {_cell(at['context'])} | {_short(took)} | {share} | {ratio(row)} | {over} |")
    return (
        f"""## Single ops

Every op of the compiled step by itself, for one token at the shape of 0.4 billion parameters, with weights, keys and
values that are not in the processor's cache, except where the table says so. Bytes are modelled: the least that the op
can move. A copy also writes, so an op that only reads can exceed its bandwidth. `minillm bench kernels` has the other
shapes and numbers of tokens. The reference is the op written plainly in PyTorch, not the fastest way to write it there;
where the engine has a faster way in PyTorch, the last column compares with that, by the medians. PyTorch is called from
Python, the compiled function from compiled code, each as in the engine: where an op takes only some µs, the ratio is
mostly that of the calls.
{later}
{_how("kernels", result)}

"""
        + "\n".join(lines)
        + "\n"
    )


def _op(row: Result) -> tuple[Any, ...]:
    """Which op a row of `bench kernels` is of."""
    return tuple(row["config"][key] for key in ("op", "kind", "context"))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else number(value)


def measured(begin: str) -> str:
    """The text of `docs/measured.md`. `begin`: its first mark."""
    words = (
        "`minillm bench` alternates between the systems within one run, with the same checkpoint, prompts and threads; "
        "a system's name or its section says in which precision it computes, llama.cpp's name that of its weights (its "
        "attention is as `setting` says). A ratio is the median over pairs of runs of the same round. In brackets is "
        "where the true median lies with a probability of 95%, if rounds are independent, or from fewer than six "
        "rounds the lowest and the highest. An absolute number holds only for its machine, and other work shared these "
        "machines. A system has a line for each prompt length. `setting` is the one in which a peer was fastest in "
        "short trials. `same tokens` tells, for each system of `speed over` or once for all, whether the tokens are "
        "equal, and if not, which share of them precedes the first difference.\n\n"
        "`peak MB` is the peak resident memory of a process that loads the system and runs it once, so imports, "
        "compiling and quantising are part of it. That of vLLM and of servers is of the processes that ran all rounds, "
        "summed; vLLM is given 1 GiB for its KV cache."
    )
    filled = "\n\n".join(textwrap.fill(part, 120, break_on_hyphens=False) for part in words.split("\n\n"))
    head = f"# Measured\n\n{begin.strip()}\n\n{filled}\n"
    return "\n".join([head, *map(section, SECTIONS), speculation(_how), ablations(_how), kernels()])
