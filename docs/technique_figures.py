"""The figures on `docs/techniques.md`: from `benchmarks/*.json`, the cards of weights and the solved lessons."""

from __future__ import annotations

import json
import re
import statistics
from functools import cache
from typing import Any

from gpu_page import newest_run, newest_stage
from results import ROOT, load, revision


def gpu_attention_ratio() -> float:
    """The speed of the attention kernel on a GPU, over gathering and two products in PyTorch."""
    wanted = {"op": "paged_attention", "kind": "", "tokens": 1, "context": 2000, "implementation": "triton"}
    [found] = [row["config"] for row in newest_stage("kernels")["rows"] if wanted.items() <= row["config"].items()]
    return found["cold_ratio"]


def gpu_attention() -> str:
    """`gpu_attention_ratio` in words."""
    run = load(newest_run("kernels"))
    return (
        f"one token after 2,000 on an {run['hardware']['gpu']['name']}: "
        f"{gpu_attention_ratio():.2f}× gathering and two products in PyTorch, revision "
        f"{revision(run)}"
    )


def counted_steps(system: str) -> int:
    """Steps of a system in the batch benchmark."""
    return next(int(r["config"]["steps"]) for r in load("batch")["rows"] if r["system"] == system)


def repeated_completions() -> str:
    """How many completions of how many prompts the latency benchmark has timed."""
    at = load("latency")["config"]
    return f"{at['completions']} completions of {at['completions'] // at['rounds']} prompts"


def counted(file: str, system: str, key: str) -> str:
    """A counted figure of one system, in a committed result."""
    return f"{next(r for r in load(file)['rows'] if r['system'] == system)['config'][key]:,}"


@cache
def printed(number: str) -> str:
    """All that a solved lesson printed."""
    [file] = (ROOT / "solutions").glob(f"{number}_*.ipynb")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", []) if output["output_type"] == "stream"]
    return "\n".join("".join(output["text"]) for output in outputs)


def lesson(number: str, pattern: str, words: str) -> str:
    """`words` with the groups of `pattern`, which lesson `number` printed, in the places of {0}, {1} and so on."""
    return words.format(*(" ".join(group.split()) for group in groups_of(number, pattern))) + f" (lesson {number})"


def numbers(number: str, pattern: str) -> list[float]:
    """The groups of `pattern`, which lesson `number` printed, as numbers."""
    return [float(group) for group in groups_of(number, pattern)]


def groups_of(number: str, pattern: str) -> tuple[str, ...]:
    """The groups of `pattern` in what lesson `number` printed. Raises `ValueError` if it printed nothing like it."""
    found = re.search(pattern, printed(number))
    if not found:
        raise ValueError(f"lesson {number} prints nothing like {pattern!r}")
    return found.groups()


def card(model: str) -> dict[str, Any]:
    """The facts of trained weights."""
    file = ROOT / "minillm" / "models" / "weights" / model / "training.json"
    return json.loads(file.read_text(encoding="utf-8"))


def drafter(method: str) -> str:
    """Tokens per round of a bundled drafter, on the target's greedy text, from its card."""
    facts = card(f"minicoder-{method}")
    product, total = 1.0, 1.0 + facts["sure_drafts"]
    for rate in facts["acceptance"]["greedy"]["greedy"]:
        product *= rate
        total += product
    minutes = facts["run"]["minutes"]
    time = f"{minutes:.{0 if minutes >= 2 else 1}f} minutes"
    time += " on a GPU" * all(hardware.get("gpu") for hardware in facts["run"]["hardware"])
    trained = f"{facts['run']['tokens']:,} tokens in {time}"
    return f"{total:.2f} tokens per round on the target's greedy text, after training on {trained}"


def ablated(method: str, variant: str) -> dict[str, Any]:
    """A variant of a drafter that was trained for ablations, on held-out code; the whole one has the method's name."""
    return next(r for r in load("ablations")["rows"] if (r["method"], r["variant"]) == (method, variant))


def tokens_per_round(method: str, variant: str) -> float:
    """Those of a variant, at temperature 0."""
    return float(ablated(method, variant)["tokens_per_round"]["greedy"])


def whole_and_without(method: str, without: str) -> str:
    """Tokens per round of a drafter, whole and without one idea, and on how many tokens each was trained."""
    whole, other = (tokens_per_round(method, name) for name in (method, without))
    trained = f"{ablated(method, method)['trained_tokens']:,}"
    return (
        f"{whole:.2f} tokens per round on held-out code, {other:.2f} with {without}, each trained on {trained} tokens"
    )


def speed_up(method: str) -> str:
    """The speed of a drafting method over plain decoding, by kind of text, and its tokens per forward of the target."""
    ratios = [row["ratio"] for row in drafting(method)]
    speed = (
        f"{statistics.mean(ratios):.2f}× over plain decoding ({min(ratios):.2f} to {max(ratios):.2f} by kind of text)"
    )
    return f"{speed}, {mean(method, 'tau'):.2f} tokens per forward"


def mean_speed_up(method: str) -> float:
    """The same as a number: the mean over kinds of text."""
    return statistics.mean(row["ratio"] for row in drafting(method))


def mean(method: str, key: str) -> float:
    """The mean of `tau`, `c` or `v` (`minillm bench speculation`) over kinds of text."""
    return statistics.mean(row["config"][key] for row in drafting(method))


def on_long_files(method: str, batch: int) -> float:
    """The speed over plain decoding where the context is nearly full."""
    [row] = [row for row in drafting(method, batch) if row["config"]["slice"] == "long files"]
    return float(row["ratio"])


def drafting(method: str, batch: int = 1) -> list[dict[str, Any]]:
    """A drafting method on every kind of text: float32, four drafts per round, `batch` requests together."""
    return [row for row in _drafted(batch) if (row["system"], row["config"]["weights"]) == (method, "fp32")]


def drafting_methods(batch: int = 1) -> list[str]:
    """Those measured with `batch` requests together, without those that decide how many drafts pay."""
    names = dict.fromkeys(row["system"] for row in _drafted(batch) if row["baseline"])
    return [name for name in names if not name.endswith((", adaptive", ", again"))]


def _drafted(batch: int) -> list[dict[str, Any]]:
    """The lines of `minillm bench speculation` that were measured with so many requests together."""
    return [row for row in load("speculation")["rows"] if row["config"]["batch"] == batch]


def kl(technique: str, budget: float | None) -> float:
    """The mean KL of a cache technique at a budget."""
    return float(_zoo_row(technique, budget)["quality"]["mean_kl"])


def recalled(technique: str, budget: float | None) -> float:
    """The share of a definition's tokens that came back, summed over distances."""
    return sum(float(one["tokens"]) for one in _zoo_row(technique, budget)["recall"])


def recalled_from(technique: str, budget: float | None, place: int) -> float:
    """The share of a definition's tokens that came back from one distance: 0 is the nearest, -1 the farthest."""
    return float(sorted(_zoo_row(technique, budget)["recall"], key=lambda one: one["distance"])[place]["tokens"])


def _zoo_row(technique: str, budget: float | None) -> dict[str, Any]:
    return next(row for row in load("zoo")["rows"] if (row["technique"], row["budget"]) == (technique, budget))


def zoo(technique: str) -> str:
    """Mean KL of a cache technique, with its standard error, at each budget that it reaches."""
    rows = [r for r in load("zoo")["rows"] if r["technique"] == technique and r["quality"]]
    parts = [f"KL {_kl_of(r)} at {r['share']:.0%}" for r in sorted(rows, key=lambda r: r["share"])]
    return ", ".join(parts) + " of the bytes"


def closest(budget: float) -> list[str]:
    """The cache techniques that reach a budget with their mean KL, closest to the plain cache first."""
    rows = [r for r in load("zoo")["rows"] if r["budget"] == budget and r["quality"]]
    return [f"`{r['technique']}` {_kl_of(r)}" for r in sorted(rows, key=lambda r: r["quality"]["mean_kl"])]


def _kl_of(row: dict[str, Any]) -> str:
    return f"{row['quality']['mean_kl']:.2g} ± {row['quality']['mean_kl_error']:.1g}"


def beside(technique: str) -> str:
    """All figures of an idea of `minillm.beside`, each with its plain way."""
    rows = [row for row in load("beside")["rows"] if row["technique"] == technique]
    return "; ".join(map(_beside_figure, rows))


def _beside_figure(row: dict[str, Any]) -> str:
    value, plain = (f"{row[key]:.3g} {row['unit']}".strip() for key in ("value", "plain"))
    spread = f", {row['speed']:.2f}× ({row['speed_min']:.2f} to {row['speed_max']:.2f})" if row["speed"] else ""
    return f"{row['measure']} {value} ({row['plain_way']}: {plain}){spread}"


def figure(technique: str, number: int) -> dict[str, Any]:
    """One figure of an idea of `minillm.beside`."""
    return [row for row in load("beside")["rows"] if row["technique"] == technique][number]


def distilled() -> str:
    """What distillation added to the draft's acceptance."""
    found = card("minicoder-draft")["evaluation"]
    after, before = (found[which]["code"]["overlap"] for which in ("distilled", "undistilled"))
    return f"Σ min(p, q) on held-out code {before:.1%} before, {after:.1%} after"
