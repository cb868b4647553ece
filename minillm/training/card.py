"""The model card of a bundled model, written only from recorded and measured values.

`training_facts` collects the numbers (`training.json`); `card` writes them as text (`README.md`).
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from minillm.models.decoder import Decoder
from minillm.training.distill import LOSS_FORMULA
from minillm.training.evaluate import Evaluation
from minillm.training.pretrain import Recipe
from minillm.training.recipes import EXTRAPOLATION
from minillm.training.record import RunRecord
from minillm.training.target_evaluation import TargetEvaluation

SCHEMA = 1
MINUTES = """Minutes are wall-clock time in training steps, whatever else the machine was doing. The first step of each
row length in a session is not counted: it may compile."""
Facts = dict[str, Any]


def training_facts(
    name: str,
    pair: str,
    model: Decoder,
    corpus: Facts,
    runs: dict[str, tuple[RunRecord, Recipe]],
    evaluations: dict[str, Evaluation],
    target: TargetEvaluation | None = None,
) -> Facts:
    """All numbers of the card of `name`, as JSON values.

    `pair` is the name of the other model; `runs` are the runs that trained this one, in order; `evaluations` maps
    `distilled` and `undistilled` to the evaluation with that draft; `corpus` is the content of `corpus.json`; `target`
    what is measured of a target alone.
    """
    c = model.config
    return {
        "schema": SCHEMA,
        "name": name,
        "pair": pair,
        "parameters": model.num_parameters,
        "shape": {
            "layers": c.num_layers,
            "hidden": c.hidden_size,
            "intermediate": c.intermediate_size,
            "heads": c.num_heads,
            "kv_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "vocabulary": c.vocab_size,
            "context": c.max_position_embeddings,
        },
        "corpus": {key: corpus[key] for key in ("train", "held_out", "near_duplicates", "sources")},
        "runs": {stage: {**run.summary(), "recipe": _recipe(run, recipe)} for stage, (run, recipe) in runs.items()},
        "evaluation": {which: asdict(evaluation) for which, evaluation in evaluations.items()},
        **({"alone": asdict(target), "extrapolation": EXTRAPOLATION} if target else {}),
    }


def card(facts: Facts, model: str | None = None) -> str:
    """The README.md of a model folder, in Hugging Face's format. `model`: what loads it (default: its name)."""
    parts = [_head(facts, model or facts["name"]), _shape(facts), _training(facts), _quality(facts)]
    parts += [_alone(facts["alone"])] if "alone" in facts else []
    parts += [_limits(facts), _corpus(facts["corpus"])]
    parts += [_texts(facts["alone"]["texts"])] if "alone" in facts else []
    return "\n\n".join(parts) + "\n"


def _recipe(run: RunRecord, recipe: Recipe) -> Facts:
    """The recipe that the run began with, as JSON values, and its budget, unless that is infinite."""
    values = {key: value for key, value in asdict(recipe).items() if value != math.inf}
    return values | (run.recipes[0].recipe if run.recipes else {})


def _head(facts: Facts, model: str) -> str:
    draft = "distillation" in facts["runs"]
    role = (
        f"The draft model for [`{facts['pair']}`](../{facts['pair']}): it guesses what that model would say next."
        if draft
        else f"A small language model of Python code. Its draft model is [`{facts['pair']}`](../{facts['pair']})."
    )
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code, python, minillm]
---
# {facts["name"]}

{role}

Both are made for learning how inference engines work: small enough to run fast on two CPU cores, good enough that
speculative decoding, caching and quantisation have something real to work on. It is a base model: it continues Python
source, it follows no instructions.

```python
from minillm import LLM, SamplingParams

print(LLM("{model}").generate(["def "], SamplingParams(max_tokens=32, temperature=0))[0].outputs[0].text)
```

The folder is an ordinary Llama checkpoint, so `AutoModelForCausalLM.from_pretrained` reads it too."""


def _shape(facts: Facts) -> str:
    s = facts["shape"]
    rows = [
        ("Architecture", "Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied embeddings"),
        ("Parameters", f"{facts['parameters']:,}"),
        ("Layers × hidden", f"{s['layers']} × {s['hidden']}, MLP {s['intermediate']}"),
        ("Heads", f"{s['heads']} query, {s['kv_heads']} key/value, {s['head_dim']} wide"),
        ("Context", f"{s['context']:,} tokens"),
        ("Tokenizer", f"byte-level BPE, {s['vocabulary']:,} tokens, trained on the same corpus"),
        ("Stored as", "bfloat16 safetensors"),
        ("Licence of the weights", "Apache-2.0"),
    ]
    return "## Shape\n\n" + table(("", ""), rows)


def _training(facts: Facts) -> str:
    corpus_tokens = facts["corpus"]["train"]["tokens"]
    rows = []
    for stage, run in facts["runs"].items():
        corpora = f"{run['tokens'] / corpus_tokens:.2f}" if stage == "pretraining" else "–"
        machines = hardware_words(run["hardware"])
        tokens, steps = run["tokens"], run["steps"]
        if stage == "distillation":  # no branch of the run before, whose counts it does not have
            before = facts["runs"]["pretraining"]
            tokens, steps = tokens + before["tokens"], steps + before["steps"]
        rows.append((stage, f"{tokens:,}", corpora, f"{steps:,}", f"{run['minutes']:g}", machines))
    header = ("Stage", "Tokens so far", "Tokens / corpus", "Steps so far", "Minutes of the stage", "Hardware")
    recipes = "\n".join(
        f"- {stage}: {_recipe_words(run['recipe'])}{_change_words(run)}" for stage, run in facts["runs"].items()
    )
    distilled = f"""
Distillation minimises {LOSS_FORMULA}
over the whole vocabulary, p being the target and q the draft, half of each batch on corpus windows and half on texts
that the target wrote after corpus prompts.
"""
    earlier = facts["runs"]["pretraining"].get("earlier_tokens", 0)
    warm_start = f"""
Pretraining did not start from scratch: its first {earlier:,} tokens are those of an earlier version, with whose weights
it began. The minutes of that version are included.
"""
    extrapolated = f"""
The weights are extrapolated: from those at the end of the decay, {facts.get("extrapolation", 1):g} times the way to
those at the end of unlikelihood.
"""
    lengths = facts["runs"]["pretraining"]["recipe"]["lengths"]
    mixed = """
Rows of each length are drawn in an order of their own, so some text was seen twice before other text was seen once.
"""
    return f"""## Training

{table(header, rows)}
{warm_start if earlier else ""}{"" if len(set(lengths)) == 1 else mixed}

![Training loss](loss.svg)

{recipes}

Muon for the matrices, AdamW for the rest; fp32 weights, matrix products in the dtype that the table names.
{MINUTES}
{extrapolated if "extrapolation" in facts else ""}{distilled if "distillation" in facts["runs"] else ""}
`minillm train` runs these stages with the present recipes, on the Python packages of the machine that it runs on, so it
makes another model. The numbers here are also in `training.json`."""


def _recipe_words(recipe: Facts) -> str:
    lengths = recipe["lengths"]
    shares = [f"{lengths.count(length) / len(lengths):.0%} in rows of {length:,}" for length in sorted(set(lengths))]
    decay = recipe["decay_from"]
    end = f"{recipe['decay_to']:.0%} of them" if recipe.get("decay_to") else "zero"
    schedule = "no decay" if decay >= 1 else f"linear decay to {end} from {decay:.0%} of the budget"
    matrices = f", weight decay {recipe['weight_decay']:g} (Muon)" if recipe.get("weight_decay") else ""
    return (
        f"{recipe['tokens_per_step']:,} tokens per step, rows of {lengths[0]:,} tokens"
        if len(set(lengths)) == 1
        else f"{recipe['tokens_per_step']:,} tokens per step, " + " and ".join(shares) + " tokens"
    ) + f", peak rates {recipe['muon_lr']:g} (Muon) and {recipe['adam_lr']:g} (AdamW), {schedule}{matrices}"


def _change_words(run: Facts) -> str:
    """What changed while the run went on."""
    return "".join(
        f"; after {change['after_tokens']:,} tokens "
        + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in change.items() if key != "after_tokens")
        for change in run.get("recipe_changes", ())
    )


def _quality(facts: Facts) -> str:
    e = facts["evaluation"]["distilled"]
    before = facts["evaluation"]["undistilled"]
    bits = [("target", f"{e['target_bits_per_byte']:.3f}"), ("draft", f"{e['draft_bits_per_byte']:.3f}")]
    kinds = (
        ("held-out code", "code"),
        ("the target's greedy text", "greedy"),
        ("the target's text at temperature 1", "sampled"),
    )
    rows = [
        (
            words,
            f"{e[kind]['tokens']:,}",
            f"{e[kind]['top1']:.1%} (before distillation {before[kind]['top1']:.1%})",
            f"{e[kind]['overlap']:.1%} (before {before[kind]['overlap']:.1%})",
        )
        for words, kind in kinds
    ]
    gamma, alpha = e["num_drafts"], e["sampled"]["overlap"]
    expected = gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return f"""## How good it is

Bits per byte on the held-out files (lower is better):

{table(("Model", "Bits per byte"), bits)}

How well the draft guesses the target. Top-1 agreement is the acceptance rate at temperature 0, Σ min(p, q) the one at
temperature 1:

{table(("Text", "Tokens", "Top-1 agreement", "Σ min(p, q)"), rows)}

With {gamma} drafts per round at temperature 0 a forward of the target yields **{e["greedy_tokens_per_forward"]:.2f}
tokens** (measured by replay on its own greedy text; before distillation {before["greedy_tokens_per_forward"]:.2f}).
At temperature 1 expect about {expected:.2f} (modelled: (1 − α^{gamma + 1}) / (1 − α) with α = {alpha:.3f}, as if every
token were equally easy). In the greedy text {e["greedy_repetition"]:.0%} of the 8-token spans repeat an earlier one,
which makes it easier to guess than real code."""


def _alone(alone: Facts) -> str:
    bands, gaps, repeated = alone["positions"], alone["gaps"], alone["repetition"]
    rows = [
        (f"{b['first']:,} to {b['last']:,}", f"{b['loss']:.3f}", f"{b['short_loss']:.3f}", f"{b['tokens']:,}")
        for b in bands
    ]
    window = f"{bands[0]['last'] - bands[0]['first']:,}"
    return f"""## Long contexts, gaps, repetition

Loss by position, over the held-out files that reach the last position: read from their beginning, and read in windows
of {window} tokens, so never with a longer context. Where the second falls, the text is easier: files begin with a
licence and imports. What the first falls beyond that comes from the context:

{table(("Positions", "Nats per token", f"In windows of {window}", "Tokens"), rows)}

Fill in the middle, {gaps["gaps"]:,} gaps from inside a line to its end: the greedy completion is the rest of the line
in {gaps["with_suffix"]:.1%} with the suffix in the prompt, in {gaps["without_suffix"]:.1%} without it.

Of greedy text, {repeated["tokens"]} tokens after held-out prompts, {repeated["greedy"]:.1%} of the 8-token spans repeat
an earlier one. Of the files' own text in the same places, {repeated["code"]:.1%} do."""


def _texts(texts: list[Facts]) -> str:
    blocks = [
        f"<details><summary>{text['source']}</summary>\n\nGreedy:\n\n{_code(text['signature'] + text['greedy'])}\n\n"
        f"At temperature 1:\n\n{_code(text['signature'] + text['sampled'])}\n\n</details>"
        for text in texts
    ]
    return f"""## What it writes

The first functions of the first {len(texts)} held-out files that have one, continued by the model, as they came. It
read what stands before them in their file.

""" + "\n\n".join(blocks)


def _code(text: str) -> str:
    fence = "`" * (3 + text.count("```"))
    return f"{fence}python\n{text.rstrip()}\n{fence}"


def _limits(facts: Facts) -> str:
    return f"""## Limits

- It is small and was trained briefly: it writes text that looks like Python and seldom is a correct program.
- Files were held out by a hash of their name, and {facts["corpus"]["near_duplicates"]:,} near-duplicates of other files
  were left out. Both halves still come from the same packages; bits per byte on code unlike them are likely higher.
- It has seen Python only, and may repeat passages of its corpus."""


def _corpus(corpus: Facts) -> str:
    train, held = corpus["train"], corpus["held_out"]
    rows = [tuple(source) for source in corpus["sources"]]
    return f"""## Corpus

Python source of the standard library and of installed packages with permissive licences, as they state them.
Training: {train["files"]:,} files, {train["bytes"]:,} bytes, {train["tokens"]:,} tokens.
Held out: {held["files"]:,} files, {held["bytes"]:,} bytes, {held["tokens"]:,} tokens.

{table(("Source", "Version", "Licence"), rows)}"""


def hardware_words(entries: list[Facts]) -> str:
    """Where a run was trained, in the order of its sessions. `entries`: `record.Hardware` as JSON values."""
    return ", then ".join(
        f"{hw['gpu']} ({hw['products']}, PyTorch {hw['torch']})"
        if hw["gpu"]
        else f"{hw['cpu']} ({hw['threads']} of {hw['cores']} cores, {hw['products']}, PyTorch {hw['torch']})"
        for hw in entries
    )


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
