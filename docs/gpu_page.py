"""The figures of `docs/gpu.md` and the README's sentences about a GPU: what `minillm bench gpu` measured."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from results import EARLIER, Result, is_of_bundled_weights, load, number, revision, table_head

from minillm.bench.on_gpu.findings import BY_TIMES
from minillm.bench.on_gpu.stage_decode import INT8
from minillm.bench.on_gpu.stage_runner import SKIPPED, STAGES

RUNS = ("gpu", "gpu_first")
"""The results of `minillm bench gpu`, newest first. A stage is taken from the first of them that has it."""
RATES = {"B/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s"), "bytes": (2**20, "MiB")}
"""Units that are printed in larger ones."""
NAMES = {"last cache": "last-level cache"}
"""Metrics that were renamed after a committed run."""
SETTINGS = ("model", "context", "half", "int8", "target, draft")
"""The notes of a stage that say what it was run with."""
WORDS = {
    "half decode, MBU": "decoding with weights in 16 bits, share of a copy's bandwidth",
    "int8 over half": "speed of decoding with INT8 weights, against 16 bits",
    "decode after 32768, half KV, bandwidth": "attention over 32,768 cached tokens in 16 bits, share of a copy's "
    "bandwidth",
    "int8 KV over half": "speed of attention over an INT8 cache, against one in 16 bits",
}
"""What the README calls the metrics with targets that were missed in some run."""
TWO_BASELINES = (
    "For the gains 16 bits were timed again, in turn with the quantised way, where they can take other times than in "
    "their own line; why is not known. So each gain is reported twice: from these rounds, and, `by the two times`, as "
    "the quotient of the times in this table. The target counts for the weaker one."
)


GAINS = {f"{key} over half": ("half decode", f"{key} decode") for key in INT8} | {
    f"{kind} KV over half": ("decode after 32768, half KV", f"decode after 32768, {kind} KV")
    for kind in ("int8", "int4")
}
"""Speeds over a baseline, and the metrics with the times of both, the baseline's first."""


def gpu_tables() -> str:
    """What stands between the marks of `docs/gpu.md`."""
    parts: list[str] = []
    for run in RUNS:
        if stages := _shown(run):
            parts += ["## Stages of an earlier run\n"] if parts else []
            parts += [_about(run), *map(_section, stages)]
    measured = {name for run in RUNS for name in _names(run)}
    if missing := [f"`{stage.name}` ({stage.description})" for stage in STAGES if stage.name not in measured]:
        none = "Neither run" if len(RUNS) == 2 else "No run"
        parts += ["## Not measured\n", f"{none} has {', '.join(missing)}.\n"]
    return "\n".join(parts)


def newest_run(stage: str) -> str:
    """The newest result that has a stage. Raises `ValueError` if none has."""
    found = next((run for run in RUNS if stage in _names(run)), None)
    if found is None:
        raise ValueError(f"no result of a GPU has the stage {stage!r}")
    return found


def newest_stage(name: str) -> Result:
    """A stage of the newest result that has it."""
    [found] = [stage for stage in _stages(newest_run(name)) if stage["name"] == name]
    return found


def _stages(run: str) -> list[Result]:
    """The stages of a run, where each gain is also reported by the two times (`Report.gain`; older runs lack it)."""
    return [stage | {"metrics": list(_with_quotients(stage["metrics"]))} for stage in load(run)["stages"]]


def _with_quotients(metrics: Sequence[Result]) -> Iterator[Result]:
    values = {metric["name"]: metric["value"] for metric in metrics}
    for metric in metrics:
        name, target = metric["name"], metric["target"]
        if name not in GAINS or name + BY_TIMES in values:
            yield metric
            continue
        baseline, own = (values[each] for each in GAINS[name])
        is_weaker = baseline / own < metric["value"]
        met = target and baseline / own >= float(target.removeprefix("≥ "))
        by_times = metric | {"name": name + BY_TIMES, "value": baseline / own, "low": None, "high": None, "bound": None}
        without = {"target": None, "met": None}
        yield metric | (without if is_weaker else {})
        yield by_times | ({"met": met} if is_weaker else without)


def _section(stage: Result) -> str:
    title = f"{stage['what'][0].upper()}{stage['what'][1:]}"
    lines = [f"## {title}", "", *_settings(stage), *table_head(["metric", "value", "spread", "target", "bound"])]
    lines += [_line(metric) for metric in stage["metrics"]]
    lines += [f"| {name} | {_shortened(note)} | | | |" for name, note in _failures(stage).items()]
    if any(metric["name"] in GAINS for metric in stage["metrics"]):
        lines += ["", textwrap.fill(TWO_BASELINES, 120)]
    if stage["rows"]:
        lines += ["", *_ops(stage["rows"])]
    if noise := _noise_of_tiles(stage):
        lines += ["", noise]
    if promise := _spread_of_promise(stage):
        lines += ["", promise]
    if _only_layers_in_int8(stage):
        lines += ["", "INT8 weights are those of the layers; the unembedding stays in 16 bits, unlike in the engine."]
    if _without_graphs(stage):
        lines += ["", "`compiled` is without CUDA graphs, which transformers records by default on a GPU."]
    if stage["status"] != "done":
        lines += ["", f"The stage ended early: {stage['status']}."]
    return "\n".join(lines) + "\n"


def gpu_words() -> str:
    """The README's sentences. Raises `ValueError` if the results no longer say so."""
    checks, engine, run = newest_stage("check"), newest_stage("engine"), newest_run("decode")
    same = [m for m in engine["metrics"] if m["name"].endswith("graphs on = off")]
    done = checks["metrics"] and same and {checks["status"], engine["status"]} == {"done"}
    if not (done and all(m["met"] is not False for m in checks["metrics"]) and all(m["met"] for m in same)):
        raise ValueError("the README says that all kernels are correct and that graphs change no token")
    bundled, decode = newest_stage("bundled"), newest_stage("decode")
    fastest = max(
        (m for m in bundled["metrics"] if m["name"].startswith("transformers") and m["unit"] == "tokens/s"),
        key=lambda m: m["value"],
    )
    way = fastest["name"].removesuffix(", decode").removeprefix("transformers ")
    if way.endswith("compiled") and _without_graphs(bundled):
        way += " without CUDA graphs"
    about = [way, *_origin("bundled", run)]
    about += ["earlier weights"] * (not is_of_bundled_weights(newest_run("bundled")))
    ours = _metric("bundled", "minillm fp32, decode")["value"]
    gain, by_times = (_metric("decode", f"int8 over half{how}")["value"] for how in ("", BY_TIMES))
    about_int8 = ["the unembedding in 16 bits"] * _only_layers_in_int8(decode)
    about_int8 += [f"{gain:.2f}× over 16 bits timed in turn with them"]
    misses = [
        f"{WORDS.get(name, m['name'])} ({'; '.join((f'{value:.2f}, asked {target}', *_origin(stage, run)))})"
        for each in RUNS
        for stage, m in _missed(each)
        for name, value, target in [(m["name"].removesuffix(BY_TIMES), m["value"], m["target"])]
    ]
    text = (
        f"On one {_gpu(run)}, `minillm bench gpu` (revision {revision(load(run))}) found every kernel within the "
        f"rounding of its reference{_aside('check', run)}, and the same tokens with CUDA graphs as "
        f"without{_aside('engine', run)}. "
        "A model of the shape of Llama 3.1 8B with random "
        f"weights in 16 bits decodes {_value('decode', 'half batch 1')} tokens/s at "
        f"{_metric('decode', 'half decode, MBU')['value']:.0%} of the bandwidth of a copy, "
        f"{by_times:.2f}× as many with INT8 weights ({'; '.join(about_int8)}), and "
        f"{_value('decode', 'half batch 128')} tokens/s with 128 requests at once (steps of the model alone, after "
        f"{decode['notes']['context']} tokens). The bundled model "
        f"in float32 decodes {number(ours)} tokens/s, the fastest way of transformers that was tried "
        f"{number(fastest['value'])} ({'; '.join(about)}).{_cut(run)} "
        f"What missed its target: {'; '.join(misses) or 'nothing'}. All figures: [docs/gpu.md](docs/gpu.md)."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def _origin(stage: str, run: str) -> list[str]:
    """Marks for a stage whose figures are of another run than `run`, and perhaps of another GPU."""
    own = newest_run(stage)
    if own == run:
        return []
    order = "earlier run" if RUNS.index(own) > RUNS.index(run) else "newer run"
    return [order] if _gpu(own) == _gpu(run) else [order, _gpu(own)]


def _aside(stage: str, run: str) -> str:
    """The same marks in brackets."""
    marks = _origin(stage, run)
    return f" ({'; '.join(marks)})" if marks else ""


def _cut(run: str) -> str:
    """Which of the stages that were asked for a run lacks."""
    cut = [f"`{name}`" for name in load(run)["config"]["stages"] if name not in _names(run)]
    return f" The run was ended before its stage{'s' * (len(cut) > 1)} {', '.join(cut)}." if cut else ""


def _about(run: str) -> str:
    result = load(run)
    hardware, versions = result["hardware"], result["versions"]
    gpu = hardware["gpu"]
    weights = "" if is_of_bundled_weights(run) else f" The bundled model was measured {EARLIER}."
    missed = [_miss(m) for _, m in _missed(run)]
    replaced = [
        _miss(m)
        for stage in _stages(run)
        if stage["status"] != SKIPPED and newest_run(stage["name"]) != run
        for m in stage["metrics"]
        if m["met"] is False
    ]
    text = (
        f"{gpu['name']} ({gpu['total'] / 2**30:.0f} GiB), host {hardware['cpu']['name']}, PyTorch {versions['torch']}, "
        f"Triton {versions['triton']}, revision {revision(result)} (`benchmarks/{run}.json`).{_cut(run)}{weights}"
    )
    lines = [textwrap.fill(text, 120, break_on_hyphens=False), ""]
    lines += ["Missed:" if missed else "In the stages below no target was missed.", ""]
    lines += [f"- {line}" for line in missed]
    if replaced:
        lines += [""] * bool(missed) + ["Missed in its other stages, which a newer run has replaced:", ""]
        lines += [f"- {line}" for line in replaced]
    return "\n".join(lines).rstrip() + "\n"


def _miss(metric: Result) -> str:
    return f"{metric['name']}: {metric['value']:.3g} {metric['unit']}, asked {metric['target']}"


def _line(metric: Result) -> str:
    size, unit = RATES.get(metric["unit"], (1, metric["unit"]))
    value, low, high = (None if metric[key] is None else metric[key] / size for key in ("value", "low", "high"))
    spread = "" if low is None or low == high else f"{_digits(low, 3)} to {_digits(high, 3)}"
    target = "" if not metric["target"] else f"{metric['target']} {'met' if metric['met'] else '**missed**'}"
    bound = (metric["bound"] or "").replace("|", "\\|")
    name = NAMES.get(metric["name"], metric["name"])
    return f"| {name} | {'' if value is None else _digits(value, 4)} {unit} | {spread} | {target} | {bound} |"


def _digits(value: float, count: int) -> str:
    """`value` with `count` digits, or all of its whole digits where there are more."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (count - 1) else f"{value:.{count}g}"


def _settings(stage: Result) -> list[str]:
    """What the stage was run with, where its metrics do not say it."""
    notes = stage["notes"]
    found = {name: notes[name] for name in SETTINGS if name in notes}
    words = (f"{name}: {value if isinstance(value, str | int) else ', '.join(value)}" for name, value in found.items())
    return [f"{'; '.join(words)}.", ""] if found else []


def _ops(rows: list[Result]) -> list[str]:
    """A table of every op's kernel, from a cold cache where its data are larger than the cache."""
    columns = ["op", "cache or weights", "tokens", "after", "µs", "of a copy's rate", "data", "over the reference"]
    lines = table_head(columns)
    for row in rows:
        at = row["config"]
        if at["implementation"] != "triton":
            continue
        state = "cold" if "cold_us" in at else "warm"
        after = "" if at["context"] is None else number(at["context"])
        lines.append(
            f"| {at['op']} | {at['kind']} | {at['tokens']} | {after} | {at[f'{state}_us']:,.1f} | "
            f"{at[f'{state}_of_copy']:.1%} | {'in memory' if state == 'cold' else 'in cache'} | "
            f"{at[f'{state}_ratio']:.2f}× |"
        )
    return lines


def _noise_of_tiles(stage: Result) -> str:
    """What it means where the default tiles, which were among the candidates, are faster than the best; else empty."""
    times = {metric["name"]: metric["value"] for metric in stage["metrics"]}
    slower = [
        times[name] / times[other] - 1
        for name in times
        if (other := name.replace(", best", ", default")) != name and other in times
    ]
    if max(slower, default=0) <= 0:
        return ""
    text = (
        "The default was among the candidates for the best, and was timed again afterwards. So where it is the faster "
        f"one, the difference is noise, and elsewhere one below {max(slower):.0%} may be noise, too."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _spread_of_promise(stage: Result) -> str:
    """What the spread of the mechanical efficiency leaves out; empty for another stage."""
    found = {metric["name"]: metric for metric in stage["metrics"]}
    if "promised speed-up" not in found:
        return ""
    low, high = (found["promised speed-up"][key] for key in ("low", "high"))
    if low is None:  # older runs tell only the spreads of c and v
        c, v, drawn = found["c"], found["v"], found["E, as drawn"]["value"]
        low, high = (drawn / (c["config"]["drafts"] * c[key] + v[key]) for key in ("high", "low"))
    text = (
        "The spread of the mechanical efficiency is that of the engine's speed-up alone. By the spread of `c` and `v` "
        f"the promise itself is {low:.2f} to {high:.2f}, so an efficiency of about 1 does not tell whether the promise "
        "was exceeded."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _without_graphs(stage: Result) -> bool:
    """Whether transformers was compiled without CUDA graphs: a stage that compiles with them notes the mode."""
    compiled = any("compiled" in metric["name"] for metric in stage["metrics"])
    return compiled and "compile mode" not in stage["notes"]


def _only_layers_in_int8(stage: Result) -> bool:
    """Whether the unembedding of an INT8 model stayed in 16 bits: a stage that quantises it notes so."""
    has_int8 = any(metric["name"] == "int8 decode" for metric in stage["metrics"])
    return has_int8 and "int8" not in stage["notes"]


def _failures(stage: Result) -> dict[str, str]:
    return {name: note for name, note in stage["notes"].items() if name.endswith(" failed")}


def _shortened(note: str) -> str:
    return note.splitlines()[0].replace("|", "\\|")


def _missed(run: str) -> list[tuple[str, Result]]:
    """The metrics that missed their target, of the stages that are taken from a run, with the name of the stage."""
    return [(stage["name"], m) for stage in _shown(run) for m in stage["metrics"] if m["met"] is False]


def _shown(run: str) -> list[Result]:
    """The stages that are taken from a run."""
    return [newest_stage(name) for name in _names(run) if newest_run(name) == run]


def _names(run: str) -> list[str]:
    """The stages that a run has: those for which no time was left have nothing."""
    return [stage["name"] for stage in load(run)["stages"] if stage["status"] != SKIPPED]


def _gpu(run: str) -> str:
    return str(load(run)["hardware"]["gpu"]["name"])


def _metric(stage: str, name: str) -> Result:
    [found] = [metric for metric in newest_stage(stage)["metrics"] if metric["name"] == name]
    return found


def _value(stage: str, name: str) -> str:
    return number(_metric(stage, name)["value"])
