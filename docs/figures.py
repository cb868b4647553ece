"""Writes every measured figure of the documentation from `benchmarks/*.json`: `python docs/figures.py`.

`docs/measured.md` gets a table for each benchmark, the README a short one between its two marks, and `docs/ray.md` what
a cluster costs, measured and modelled. No such figure is typed by hand, and `tests/test_figures.py` fails where a file
differs from what its results say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
README, MEASURED, RAY = ROOT / "README.md", ROOT / "docs" / "measured.md", ROOT / "docs" / "ray.md"
BEGIN, END = "<!-- written by docs/figures.py -->\n", "<!-- end -->\n"

BLOCKS_PER_REPLICA = 1 << 16
"""That the router remembers, unless it is told otherwise (`minillm.cluster.prefix_table`)."""
REQUESTS_PER_REPLICA = 1

Result = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """One benchmark in `docs/measured.md`."""

    file: str
    title: str
    text: str


SECTIONS = (
    Section(
        "decode",
        "Decoding, batch 1",
        "Greedy, the bundled model, held-out prompts. `int8` quantises the weights of the layers and of the "
        "unembedding, `w8a8` also the inputs of the layers' linears, llama.cpp's Q8_0 all weights and inputs, and "
        "`int4` only the layers' weights. `+ draft` is the draft model, quantised to w8a8, with four drafts per round; "
        "`+ suffix` drafts up to eight tokens from earlier text and so needs repetitive text.",
    ),
    Section(
        "verify",
        "What verifying and drafting cost",
        "A forward over five tokens, and one of the draft model, against one of the target over a single token. With "
        "8-bit weights, reading the weights no longer hides the arithmetic, so a verified token costs more.",
    ),
    Section(
        "batch",
        "32 requests at once",
        "Outputs of 8 to 256 tokens with a heavy tail, greedy, float32, prefill included. At most 8 requests run at a "
        "time where the name does not say otherwise.",
    ),
    Section(
        "serve",
        "The HTTP server with 32 clients",
        "64 requests of up to 192 prompt tokens and 128 new ones, greedy, float32, without prefix caching. Server and "
        "client share one core; vLLM's server answers the same client.",
    ),
    Section("prefill", "Prefill", "Prompt tokens until the first new token."),
    Section(
        "latency",
        "A completion in an editor",
        "24 tokens of code after a prompt of 200. `warm` finds the prompt in the prefix cache.",
    ),
    Section(
        "decode_0.4b",
        "Decoding at 0.4 billion parameters",
        "24 layers of 896, random weights in bf16. At this size reading the weights from memory dominates.",
    ),
    Section("verify_0.4b", "Verifying at 0.4 billion parameters", "As above."),
    Section("batch_0.4b", "32 requests at 0.4 billion parameters", "vLLM computes in bf16."),
    Section(
        "decode_0.4b_xeon",
        "Decoding at 0.4 billion parameters, with AMX",
        "Unquantised bf16 weights, everything else of minillm in float32. A virtual machine whose speed changed during "
        "the measurement.",
    ),
    Section(
        "prefill_0.4b_xeon",
        "Prefill at 0.4 billion parameters, with AMX",
        "transformers rounds activations to bf16 and multiplies once, where float32 takes three products "
        "(`minillm/ops/cpu/amx_products.py`), so it is the faster one here.",
    ),
    Section("batch_0.4b_xeon", "32 requests at 0.4 billion parameters, with AMX", "vLLM computes in bf16."),
)


@dataclass(frozen=True)
class Headline:
    """One line of the README's table: a system of a benchmark against some of its baselines."""

    words: str
    file: str
    system: str
    baselines: tuple[str, ...]
    prompt_tokens: int | None = None


HEADLINES = (
    Headline("decoding, fp32", "decode", "minillm fp32", ("transformers fp32", "llama.cpp f32")),
    Headline("decoding, int8", "decode", "minillm int8", ("transformers fp32", "llama.cpp Q8_0")),
    Headline("decoding, w8a8", "decode", "minillm w8a8", ("transformers fp32", "llama.cpp Q8_0")),
    Headline(
        "with the draft model, fp32", "decode", "minillm fp32 + draft", ("minillm fp32", "transformers fp32 assisted")
    ),
    Headline("with the draft model, int8", "decode", "minillm int8 + draft", ("minillm int8",)),
    Headline("with suffix drafts, fp32", "decode", "minillm fp32 + suffix", ("minillm fp32",)),
    Headline("with suffix drafts, int8", "decode", "minillm int8 + suffix", ("minillm int8",)),
    Headline("prefill of 1,000 tokens, fp32", "prefill", "minillm fp32", ("transformers fp32", "llama.cpp f32"), 1000),
    Headline(
        "32 requests, fp32", "batch", "minillm continuous", ("transformers padded batch", "vLLM CPU", "minillm static")
    ),
    Headline("HTTP server, 32 clients, fp32, one core", "serve", "server", ("offline", "vLLM server")),
    Headline("0.4B: decoding, int8", "decode_0.4b", "minillm int8", ("transformers bf16", "llama.cpp Q8_0")),
    Headline("0.4B: decoding, w8a8", "decode_0.4b", "minillm w8a8", ("transformers bf16", "llama.cpp Q8_0")),
    Headline("0.4B: 32 requests, bf16 weights", "batch_0.4b", "minillm continuous", ("vLLM CPU",)),
    Headline("0.4B: 32 requests, w8a8", "batch_0.4b", "minillm continuous w8a8", ("vLLM CPU",)),
    Headline("0.4B, AMX: decoding, bf16 weights", "decode_0.4b_xeon", "minillm fp32", ("llama.cpp bf16",)),
    Headline(
        "0.4B, AMX: prefill of 4,000, bf16 weights",
        "prefill_0.4b_xeon",
        "minillm fp32",
        ("llama.cpp bf16", "transformers bf16"),
        4000,
    ),
    Headline("0.4B, AMX: 32 requests, bf16 weights", "batch_0.4b_xeon", "minillm continuous", ("vLLM CPU",)),
)


def load(file: str) -> Result:
    """A committed result of `minillm bench`."""
    return json.loads((BENCHMARKS / f"{file}.json").read_text(encoding="utf-8"))


def headline_table() -> str:
    """The README's table."""
    lines = ["| measured | tokens/s | speed over others |", "|---|---|---|"]
    for headline in HEADLINES:
        found = {
            row["baseline"]: row
            for row in load(headline.file)["rows"]
            if row["system"] == headline.system and headline.prompt_tokens in (None, row["config"].get("prompt_tokens"))
        }
        rows = [found[baseline] for baseline in headline.baselines]
        lines.append(f"| {headline.words} | {_number(rows[0]['tokens_per_s'])} | {'; '.join(map(_ratio, rows))} |")
    return "\n".join(lines) + "\n"


def section(part: Section) -> str:
    """A section of `docs/measured.md`."""
    result = load(part.file)
    hardware, versions, config = result["hardware"]["cpu"], result["versions"], result["config"]
    machine = f"{config['threads']} threads on {hardware['name']} ({', '.join(hardware['simd'])})"
    used = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    how = f"{config['rounds']} rounds, {machine}. {used}. Results: `benchmarks/{part.file}.json`."
    return f"## {part.title}\n\n{part.text}\n\n{how}\n\n{_table(result)}"


def _table(result: Result) -> str:
    """One row per system and prompt length; what it is compared with stands in the last column."""
    counted = ("prompt_tokens", "steps", "tokens_per_forward")
    also = [key for key in counted if any(key in row["config"] for row in result["rows"])]
    heads = ["system", *(key.replace("_", " ") for key in also), "tokens/s", "ms per token", "peak MB", "speed over"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    systems: dict[tuple[Any, ...], list[Result]] = {}
    for row in result["rows"]:
        systems.setdefault((row["system"], row["config"].get("prompt_tokens")), []).append(row)
    for rows in systems.values():
        first = rows[0]
        cells = [first["system"], *(_number(first["config"].get(key)) for key in also)]
        peak = first["peak_memory_bytes"]
        cells += [_number(first["tokens_per_s"]), f"{first['p50_ms']:.3g}", _number(peak and peak / 1e6)]
        cells.append("<br>".join(_ratio(row) for row in rows if row["baseline"]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(row: Result) -> str:
    median, low, high = (f"{row[key]:.{1 if row[key] >= 10 else 2}f}" for key in ("ratio", "ratio_min", "ratio_max"))
    return f"{median}× ({low} to {high}) {row['baseline']}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2f}"


def with_table(readme: str) -> str:
    """`readme` with the table between its marks written anew."""
    return _between_marks(readme, headline_table())


def with_cluster_tables(page: str) -> str:
    """`docs/ray.md` with what is between its marks written anew."""
    return _between_marks(page, cluster_tables())


def _between_marks(page: str, text: str) -> str:
    found = re.findall(f"{BEGIN}.*?{END}", page, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"the page needs {BEGIN.strip()} and {END.strip()} once, in this order")
    return page.replace(found[0], f"{BEGIN}{text}{END}")


def cluster_tables() -> str:
    """What `minillm cluster failover` counted and measured, and what follows from it for a thousand replicas."""
    found, replica = load("failover"), _row(load("batch"), "minillm continuous")
    rows, routing = found["rows"], {cost["replicas"]: cost for cost in found["routing"]}
    lines = ["| counted | " + " | ".join(row["router"] for row in rows) + " |", "|---|" + "---|" * len(rows)]

    def line(what: str, values: Iterable[str]) -> None:
        lines.append(f"| {what} | " + " | ".join(values) + " |")

    line("requests, answered once, with the tokens of one engine", (_of_requests(row) for row in rows))
    line("of them sent to a second replica", (str(row["sent_again"]) for row in rows))
    line("requests per replica, the killed one first", (_per_replica(row) for row in rows))
    line("prompt tokens from prefix caches", (f"{row['cached_share']:.1%}" for row in rows))
    spent = rows[-1]["processor_ms_per_request"]
    http_ms, choice_ms = spent["proxy"] + spent["gateway"], routing[1000]["microseconds"] / 1000
    table_bytes = routing[1000]["bytes_per_block"] * BLOCKS_PER_REPLICA
    lines += ["", "| measured, router `prefix` | |", "|---|---|"]
    line("processor time per request in Serve's proxy", [f"{spent['proxy']:.1f} ms"])
    line("processor time per request in the gateway: tokenising, hashing, routing", [f"{spent['gateway']:.1f} ms"])
    line("memory of a replica of the bundled model", [f"{rows[-1]['replica_bytes'] / 2**20:,.0f} MiB"])
    line("tokens/s of an engine, 32 requests at once (`benchmarks/batch.json`)", [f"{replica['tokens_per_s']:,.0f}"])
    for count, cost in routing.items():
        line(f"processor time of a choice among {count:,} replicas", [f"{cost['microseconds']:,.0f} µs"])
    line("memory of the router's table per block and replica", [f"{routing[1000]['bytes_per_block']:.0f} bytes"])
    lines += ["", "| modelled from these, 1,000 replicas | |", "|---|---|"]
    line("tokens/s, if nothing else is a limit", [f"{replica['tokens_per_s'] / 1000:.1f} million"])
    line("requests/s of one gateway and proxy, a processor each", [f"{1000 / (max(spent.values()) + choice_ms):,.0f}"])
    needed = REQUESTS_PER_REPLICA * 1000 * (http_ms + choice_ms) / 1000
    line(f"processors for gateways and proxies at {REQUESTS_PER_REPLICA} request/s per replica", [f"{needed:,.0f}"])
    share = f"memory of a gateway's table, {BLOCKS_PER_REPLICA:,} blocks per replica"
    line(share, [f"{1000 * table_bytes / 2**30:.1f} GiB"])
    line("memory of the replicas together", [f"{1000 * rows[-1]['replica_bytes'] / 2**30:,.0f} GiB"])
    machine = found["hardware"]["cpu"]["name"]
    return "\n".join(lines) + f"\n\nRay {found['versions']['ray']}, one run, {machine}. `benchmarks/failover.json`.\n"


def _of_requests(row: Result) -> str:
    return f"{row['requests']}, {row['answered_once']}, {row['same_tokens']}"


def _per_replica(row: Result) -> str:
    counts = dict(row["requests_per_replica"])
    return ", ".join(map(str, [counts.pop(row["killed"]), *counts.values()]))


def _row(result: Result, system: str) -> Result:
    return next(row for row in result["rows"] if row["system"] == system)


def measured(parts: Iterable[Section] = SECTIONS) -> str:
    """The text of `docs/measured.md`."""
    head = f"""# Measured

{BEGIN.strip()}

`minillm bench` alternates between the systems within one run, with the same weights, prompts and threads. A ratio is
the median over pairs of neighbouring runs, with the lowest and highest in brackets. An absolute number holds only for
its machine, and other work shared these machines, so the spreads are wide. A system has a line for each prompt length.
"""
    return "\n".join([head, *map(section, parts)])


def main() -> None:
    """Write all three files."""
    MEASURED.write_text(measured(), encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    RAY.write_text(with_cluster_tables(RAY.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
