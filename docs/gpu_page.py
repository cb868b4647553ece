"""The figures of `docs/gpu.md` and the README's sentences about a GPU: what `minillm bench gpu` measured."""

from __future__ import annotations

import textwrap

from results import EARLIER, Result, is_of_bundled_weights, load, number, revision, table_head

from minillm.bench.on_gpu.stage_runner import STAGES

LATEST, FIRST = "gpu", "gpu_first"
"""The latest run, and the first one, from which the stages come that the latest left out."""
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


def gpu_tables() -> str:
    """What stands between the marks of `docs/gpu.md`."""
    parts = [_about(LATEST)]
    parts += [_section(stage) for stage in load(LATEST)["stages"]]
    left_out = [stage for stage in load(FIRST)["stages"] if stage["name"] not in _names(LATEST)]
    if left_out:
        parts += ["## Stages of an earlier run\n", _about(FIRST)]
        parts += [_section(stage) for stage in left_out]
    measured = {*_names(LATEST), *_names(FIRST)}
    if missing := [f"`{stage.name}` ({stage.description})" for stage in STAGES if stage.name not in measured]:
        parts += ["## Not measured\n", f"Neither run has {', '.join(missing)}.\n"]
    return "\n".join(parts)


def _section(stage: Result) -> str:
    title = f"{stage['what'][0].upper()}{stage['what'][1:]}"
    lines = [f"## {title}", "", *_settings(stage), *table_head(["metric", "value", "spread", "target", "bound"])]
    lines += [_line(metric) for metric in stage["metrics"]]
    lines += [f"| {name} | {_shortened(note)} | | | |" for name, note in _failures(stage).items()]
    if stage["rows"]:
        lines += ["", *_ops(stage["rows"])]
    if noise := _noise_of_tiles(stage):
        lines += ["", noise]
    if _only_layers_in_int8(stage):
        lines += ["", "INT8 weights are those of the layers; the unembedding stays in 16 bits, unlike in the engine."]
    if _without_graphs(stage):
        lines += ["", "`compiled` is without CUDA graphs, which transformers records by default on a GPU."]
    if stage["status"] != "done":
        lines += ["", f"The stage ended early: {stage['status']}."]
    return "\n".join(lines) + "\n"


def gpu_words() -> str:
    """The README's sentences. Raises `ValueError` if the results no longer say so."""
    checks, engine = _stage("check"), _stage("engine")
    same = [m for m in engine["metrics"] if m["name"].endswith("graphs on = off")]
    done = checks["metrics"] and same and {checks["status"], engine["status"]} == {"done"}
    if not (done and all(m["met"] is not False for m in checks["metrics"]) and all(m["met"] for m in same)):
        raise ValueError("the README says that all kernels are correct and that graphs change no token")
    fastest = max(
        (m for m in _stage("bundled")["metrics"] if m["name"].startswith("transformers") and m["unit"] == "tokens/s"),
        key=lambda m: m["value"],
    )
    way = fastest["name"].removesuffix(", decode").removeprefix("transformers ")
    if way.endswith("compiled") and _without_graphs(_stage("bundled")):
        way += " without CUDA graphs"
    ours = _metric("bundled", "minillm fp32, decode")["value"]
    int8 = "INT8 weights" + " (the unembedding in 16 bits)" * _only_layers_in_int8(_stage("decode"))
    missed = [f"{WORDS.get(m['name'], m['name'])} ({m['value']:.2f}, asked {m['target']})" for m in _missed()]
    text = (
        f"On one {load(LATEST)['hardware']['gpu']['name']}, `minillm bench gpu` (revision {revision(load(LATEST))}) "
        "found every kernel within the rounding of its reference, and the same tokens with CUDA graphs as without. "
        "A model of the shape of Llama 3.1 8B with random "
        f"weights in 16 bits decodes {_value('decode', 'half batch 1')} tokens/s at "
        f"{_metric('decode', 'half decode, MBU')['value']:.0%} of the bandwidth of a copy, "
        f"{_metric('decode', 'int8 over half')['value']:.2f}× as many with {int8}, and "
        f"{_value('decode', 'half batch 128')} tokens/s with 128 requests at once (steps of the model alone, after "
        f"{_stage('decode')['notes']['context']} tokens). The bundled model "
        f"in float32 decodes {number(ours)} tokens/s, the fastest way of transformers that was tried "
        f"{number(fastest['value'])} ({way}{_earlier('bundled')}).{_cut(LATEST)} "
        f"What missed its target: {'; '.join(missed) or 'nothing'}. All figures: [docs/gpu.md](docs/gpu.md)."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def _earlier(stage: str) -> str:
    """Marks for a stage whose figures are of an earlier run or of earlier weights."""
    run = LATEST if stage in _names(LATEST) else FIRST
    return "; earlier run" * (run == FIRST) + "; earlier weights" * (not is_of_bundled_weights(run))


def _cut(run: str) -> str:
    """Which of the stages that were asked for a run lacks."""
    cut = [f"`{name}`" for name in load(run)["config"]["stages"] if name not in _names(run)]
    return f" The run was ended before its stage{'s' * (len(cut) > 1)} {', '.join(cut)}." if cut else ""


def _about(run: str) -> str:
    result = load(run)
    hardware, versions = result["hardware"], result["versions"]
    gpu = hardware["gpu"]
    weights = "" if is_of_bundled_weights(run) else f" The bundled model was measured {EARLIER}."
    shown = set(_names(run)) - (set(_names(LATEST)) if run == FIRST else set())
    missed = [f"{m['name']}: {m['value']:.3g} {m['unit']}, asked {m['target']}" for m in _missed(run, shown)]
    text = (
        f"{gpu['name']} ({gpu['total'] / 2**30:.0f} GiB), host {hardware['cpu']['name']}, PyTorch {versions['torch']}, "
        f"Triton {versions['triton']}, revision {revision(result)} (`benchmarks/{run}.json`).{_cut(run)}{weights}"
    )
    lines = [textwrap.fill(text, 120, break_on_hyphens=False), ""]
    lines += ["Missed:" if missed else "No target was missed.", ""]
    lines += [f"- {line}" for line in missed]
    return "\n".join(lines).rstrip() + "\n"


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


def _missed(run: str = LATEST, shown: set[str] | None = None) -> list[Result]:
    """The metrics that missed their target, of the stages `shown`; None: of all."""
    stages = [stage for stage in load(run)["stages"] if shown is None or stage["name"] in shown]
    return [m for stage in stages for m in stage["metrics"] if m["met"] is False]


def _names(run: str) -> list[str]:
    return [stage["name"] for stage in load(run)["stages"]]


def _stage(name: str) -> Result:
    """A stage of the latest run, or of the first one if the latest left it out."""
    run = LATEST if name in _names(LATEST) else FIRST
    [found] = [stage for stage in load(run)["stages"] if stage["name"] == name]
    return found


def _metric(stage: str, name: str) -> Result:
    [found] = [metric for metric in _stage(stage)["metrics"] if metric["name"] == name]
    return found


def _value(stage: str, name: str) -> str:
    return number(_metric(stage, name)["value"])
