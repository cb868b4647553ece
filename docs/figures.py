"""Writes the figures of the benchmarks into the documentation, from `benchmarks/*.json`: `python docs/figures.py`.

`docs/measured.md` gets a table for each benchmark (`measured_page.py`), the README a short one between its two marks,
`docs/ray.md` what a cluster costs, measured and modelled (`ray_page.py`), `docs/gpu.md` what a GPU does
(`gpu_page.py`), `docs/completion.md` how long a suggestion takes, `docs/processors.md` how fast a step is with fewer
instructions. None of these figures is typed by hand, and `tests/test_figures.py` fails where a file differs from what
its results say. Typed by hand is what was measured elsewhere: the trial of the grader in `docs/grading.md`, and the
times of tests and mutants in `CONTRIBUTING.md`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import measured_page
from gpu_page import gpu_tables, gpu_words
from measured_page import ALL_AT_ONCE, PRECISIONS
from ray_page import cluster_tables
from results import (
    EARLIER,
    ROOT,
    has_extremes_for_intervals,
    is_of_bundled_weights,
    load,
    number,
    ratio,
    row_of,
    table_head,
)

from minillm.bench import processors

README, MEASURED, RAY = ROOT / "README.md", ROOT / "docs" / "measured.md", ROOT / "docs" / "ray.md"
COMPLETION, PROCESSORS = ROOT / "docs" / "completion.md", ROOT / "docs" / "processors.md"
GPU = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- written by docs/figures.py -->\n", "<!-- end -->\n"
KEYS = {
    "first key": "first: a new text",
    "next key": "next: the key before is cached",
    "last of a burst": "last of eight keys, 60 ms apart; each ends the request of the one before, if it still runs",
}


@dataclass(frozen=True)
class Headline:
    """One line of the README's table: a system of a benchmark against some of its baselines."""

    words: str
    file: str
    system: str
    baselines: tuple[str, ...]
    prompt_tokens: int | None = None


HEADLINES = (
    Headline("decoding, fp32", "decode", "minillm fp32", ("transformers fp32 compiled", "llama.cpp f32")),
    Headline("decoding, int8", "decode", "minillm int8", ("transformers fp32 compiled", "llama.cpp Q8_0")),
    Headline("decoding, w8a8", "decode", "minillm w8a8", ("transformers fp32 compiled", "llama.cpp Q8_0")),
    Headline(
        "with the draft model, fp32", "decode", "minillm fp32 + draft", ("minillm fp32", "transformers fp32 assisted")
    ),
    Headline("with the draft model, int8", "decode", "minillm int8 + draft", ("minillm int8",)),
    Headline("with suffix drafts, fp32", "decode", "minillm fp32 + suffix", ("minillm fp32",)),
    Headline("with suffix drafts, int8", "decode", "minillm int8 + suffix", ("minillm int8",)),
    Headline("AVX2: decoding, fp32", "decode_avx2", "minillm fp32", ("transformers fp32", "llama.cpp f32")),
    Headline("AVX2: decoding, int8", "decode_avx2", "minillm int8", ("transformers fp32", "llama.cpp Q8_0")),
    Headline("AVX2: decoding, w8a8", "decode_avx2", "minillm w8a8", ("transformers fp32", "llama.cpp Q8_0")),
    Headline("Ice Lake: decoding, fp32", "decode_xeon", "minillm fp32", ("transformers fp32", "llama.cpp f32")),
    Headline("Ice Lake: decoding, int8", "decode_xeon", "minillm int8", ("transformers fp32", "llama.cpp Q8_0")),
    Headline("Ice Lake: decoding, w8a8", "decode_xeon", "minillm w8a8", ("transformers fp32", "llama.cpp Q8_0")),
    Headline("prefill of 1,000 tokens, fp32", "prefill", "minillm fp32", ("transformers fp32", "llama.cpp f32"), 1000),
    Headline("prefill of 1,000 tokens, bf16", "prefill", "minillm bf16", ("transformers bf16", "llama.cpp bf16"), 1000),
    Headline(
        "32 requests, 8 at a time, fp32",
        "batch",
        "minillm continuous",
        ("transformers generate_batch", "vLLM CPU", "minillm static"),
    ),
    Headline(
        "32 requests, all at a time, fp32",
        "batch",
        "minillm continuous, 32 seats",
        ("transformers padded batch, 32 seats", "vLLM CPU, 32 seats"),
    ),
    Headline("HTTP server, 32 clients, whole answers, fp32", "serve", "server", ("offline", "vLLM server")),
    Headline("HTTP server, 32 clients, streamed, fp32", "serve", "server, streamed", ("offline",)),
    Headline("0.4B: decoding, bf16", "decode_0.4b", "minillm bf16", ("transformers bf16", "llama.cpp bf16")),
    Headline("0.4B: decoding, int8", "decode_0.4b", "minillm int8", ("transformers bf16", "llama.cpp Q8_0")),
    Headline("0.4B: decoding, w8a8", "decode_0.4b", "minillm w8a8", ("transformers bf16", "llama.cpp Q8_0")),
    *(
        Headline(
            f"0.4B: 32 requests, {seats} at a time, {words}", "batch_0.4b", f"minillm continuous{kind}{ending}", (vllm,)
        )
        for seats, ending, vllm in (("8", "", "vLLM CPU"), ("all", ", 32 seats", "vLLM CPU, 32 seats"))
        for words, kind in (("bf16", " bf16"), ("fp32 on bf16 weights", ""), ("w8a8", " w8a8"))
    ),
    Headline("0.4B, AMX: decoding, bf16", "decode_0.4b_xeon", "minillm bf16", ("transformers bf16", "llama.cpp bf16")),
    *(
        Headline(
            f"0.4B, AMX: prefill of 4,000, {name}",
            "prefill_0.4b_xeon",
            f"minillm {name}",
            ("transformers bf16", "llama.cpp bf16"),
            4000,
        )
        for name in ("fp32", "bf16")
    ),
    Headline("0.4B, AMX: 32 requests, 8 at a time, bf16", "batch_0.4b_xeon", "minillm continuous bf16", ("vLLM CPU",)),
)


def headline_table() -> str:
    """The README's table."""
    heads = ["measured", "rounds", "tokens/s of all requests (prefill: prompt tokens/s)", "speed over others"]
    lines = table_head(heads)
    for headline in HEADLINES:
        found = {
            row["baseline"]: row
            for row in load(headline.file)["rows"]
            if row["system"] == headline.system and headline.prompt_tokens in (None, row["config"].get("prompt_tokens"))
        }
        rows = [found[baseline] for baseline in headline.baselines]
        words = headline.words + ("" if is_of_bundled_weights(headline.file) else " (earlier weights)")
        words += " (uncommitted code)" * bool(load(headline.file).get("dirty"))
        words += " (lowest to highest)" * has_extremes_for_intervals(headline.file)
        rounds, speed = load(headline.file)["config"]["rounds"], number(rows[0]["tokens_per_s"])
        ratios = "; ".join(f"{ratio(row)} {_shown(headline.file, row['baseline'])}" for row in rows)
        lines.append(f"| {words} | {rounds} | {speed} | {ratios} |")
    return "\n".join(lines) + "\n"


def _shown(file: str, baseline: str) -> str:
    """The name of a baseline. Only vLLM's does not say that it computes in bf16 at a shape of bf16 weights."""
    is_half = load(file)["config"].get("dtype", "").startswith("bfloat16")
    return baseline.replace("vLLM CPU", "vLLM CPU bf16") if is_half else baseline


def _at_a_time(file: str, system: str) -> int:
    """How many of the 32 requests a system runs at a time. vLLM's rows do not say it, but its name does."""
    result = load(file)
    [at, *_] = (row["config"] for row in result["rows"] if row["system"] == system)
    for key in ("max_requests_per_batch", "max_num_seqs", "batch"):
        if key in at:
            return int(at[key])
    return int(result["config"]["requests" if system.endswith(ALL_AT_ONCE) else "max_num_seqs"])


def headline_words() -> str:
    """What follows from the README's table. Raises `ValueError` if the results no longer say so."""
    gains = {name: row_of("decode", f"minillm {name} + draft", f"minillm {name}") for name in PRECISIONS}
    tokens = {name: row["config"]["tokens_per_forward"] for name, row in gains.items()}
    full = [row for row in load("decode")["rows"] if re.search(r"\bf(p)?32\b", row["system"]) and row["baseline"]]
    amx = {
        row["config"]["prompt_tokens"]: ratio(row)
        for row in load("prefill_0.4b_xeon")["rows"]
        if (row["system"], row["baseline"]) == ("minillm bf16", "transformers bf16")
    }
    with_amx = {row["system"] for row in load("batch_0.4b_xeon")["rows"]}
    _require("no vLLM with all 32 requests at a time with AMX", "vLLM CPU, 32 seats" not in with_amx)
    _require("all systems in float32 give the same tokens", all(row["outputs_equal"] for row in full))
    _require("verification costs", all(tokens[name] > row["ratio"] > 1 for name, row in gains.items()))
    older = {line.file for line in HEADLINES if "avx_vnni" not in load(line.file)["hardware"]["cpu"]["simd"]}
    without = "only AVX2, Ice Lake and 0.4B: 32 requests are without AVX-VNNI"
    _require(without, older == {"decode_avx2", "decode_xeon", "batch_0.4b"})
    _require("less is gained with 8 bits", max(gains[n]["ratio"] for n in ("int8", "w8a8")) < gains["fp32"]["ratio"])
    for headline in (headline for headline in HEADLINES if headline.file.startswith("batch")):
        at_a_time = {_at_a_time(headline.file, name) for name in (headline.system, *headline.baselines)}
        _require(f"all systems of the line {headline.words} run as many requests at a time", len(at_a_time) == 1)
    unequal = ratio(row_of("batch", "minillm continuous, 32 seats", "transformers generate_batch"))
    drafted = ", ".join(f"{tokens[name]:.2f} and {row['ratio']:.2f}× ({name})" for name, row in gains.items())
    earlier = f" Lines with `(earlier weights)` were measured {EARLIER}." if "(earlier" in headline_table() else ""
    extremes = ""
    if "(lowest to highest)" in headline_table():
        extremes = " Lines with `(lowest to highest)` have those in brackets in place of the interval of the median."
    text = (
        "With the bundled model in float32 all systems gave the same tokens; with other weights or dtypes greedy "
        "outputs differ between systems (how far: `same tokens` in docs/measured.md). The speed-up by speculation is "
        "below the tokens per forward, because drafts cost time and verifying costs more than decoding. With four "
        "drafts of the draft model (W8A8) "
        f"in every round the tokens per forward and the speed-up are {drafted}. With 8-bit weights a step is shorter, "
        "so saving one gains less. In these lines the number of drafts is fixed; by default the engine drafts as many "
        "as it predicts to pay (lesson 11). `suffix` drafts need repetitive text. With AMX, minillm in bf16 prefills "
        f"{amx[512]} as fast as transformers in bf16 at 512 tokens, {amx[1000]} at 1,000 and {amx[4000]} at 4,000. "
        "In the lines of 32 requests all systems run as many at a time as the line says "
        "(`32 seats`: all 32); with AMX that is 8, because vLLM was not measured with all 32 there. transformers' "
        f"`generate_batch` was measured with 8: minillm with all 32 at a time has {unequal} its tokens/s. The lines "
        "`0.4B: 32 requests` are of an EPYC of another generation, without AVX-VNNI: their tokens/s compare with no "
        "other line's."
        f"{earlier}{extremes}"
    )
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def _require(statement: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"the README states what the results no longer say: {statement}")


def completion_table() -> str:
    """What `docs/completion.md` says about the time of a suggestion."""
    result = load("completion")
    load_average, goal_ms = result["config"]["load"][0], result["config"]["goal_ms"]
    lines = [
        f"| key | p50 | p90 | under {goal_ms:.0f} ms | processor time | prompt tokens, cached | new tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        at = row["config"]
        times = f"{row['p50_ms']:.0f} ms | {at['p90_ms']:.0f} ms | {at['under_goal']:.0%} | {at['cpu_ms']:.0f} ms"
        times += " for all eight" * (row["system"] == "last of a burst")
        tokens = f"{at['prompt_tokens']:.0f}, {at['cached_tokens']:.0f} | {at['generated_tokens']:.0f}"
        lines.append(f"| {KEYS[row['system']]} | {times} | {tokens} |")
    met = all(row["p50_ms"] < goal_ms for row in result["rows"] if row["system"] != "first key")
    machine = f"{result['hardware']['cpu']['name']}, processors used: {result['config']['processors']}"
    weights = "" if is_of_bundled_weights("completion") else f", {EARLIER}"
    table = "\n".join(lines)
    return f"""{machine}, load of the machine {load_average:.1f}{weights} (`benchmarks/completion.json`):

{table}

The goal is a p50 below {goal_ms:.0f} ms from the next key on, and here it is {"met" if met else "missed"}.
"""


def processors_table() -> str:
    """How `docs/processors.md` was measured, and a line for each processor and kind of weights."""
    result = load("processors")
    config, cpu = result["config"], result["hardware"]["cpu"]
    weights = "" if is_of_bundled_weights("processors") else f" {EARLIER[0].upper()}{EARLIER[1:]}."
    words = (
        f"{config['rounds']} rounds on {cpu['name']} ({', '.join(cpu['simd'])}), one thread, completions of "
        f"{config['new_tokens']} tokens after {config['prompt_tokens']}. The spread is the lowest and the highest "
        f"ratio.{weights}"
    )
    return f"{textwrap.fill(words, 120, break_on_hyphens=False)}\n\n{processors.markdown(result)}"


def with_table(readme: str) -> str:
    """`readme` with what is between its marks written anew."""
    return between_marks(readme, headline_table() + "\n" + headline_words() + "\n" + gpu_words())


def with_cluster_tables(page: str) -> str:
    """`docs/ray.md` with what is between its marks written anew."""
    return between_marks(page, cluster_tables())


def between_marks(page: str, text: str) -> str:
    """`page` with `text` between its marks. Raises `ValueError` if it does not have them once."""
    found = re.findall(f"{BEGIN}.*?{END}", page, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"the page needs {BEGIN.strip()} and {END.strip()} once, in this order")
    return page.replace(found[0], f"{BEGIN}{text}{END}")


def measured() -> str:
    """The text of `docs/measured.md`."""
    return measured_page.measured(BEGIN)


def pages() -> dict[Path, str]:
    """Each file with measured figures → what it should be."""
    return {
        MEASURED: measured(),
        README: with_table(README.read_text(encoding="utf-8")),
        RAY: with_cluster_tables(RAY.read_text(encoding="utf-8")),
        COMPLETION: between_marks(COMPLETION.read_text(encoding="utf-8"), completion_table()),
        GPU: between_marks(GPU.read_text(encoding="utf-8"), "\n" + gpu_tables() + "\n"),
        PROCESSORS: between_marks(PROCESSORS.read_text(encoding="utf-8"), processors_table()),
    }


def main() -> None:
    """Write all files."""
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
