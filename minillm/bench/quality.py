"""What fewer bits cost: perplexity, bits per byte, KL and agreement of every way of keeping keys, values and weights.

Held-out evaluation texts are joined to rows of nearly the model's context and fed with the right token at every
position (teacher forcing), in chunks, through the engine's own runner: what a later chunk reads is what the cache has
really stored. All systems see the same tokens at the same positions, so they differ in nothing but how they keep
things. Bytes are those of a model in float16, its residuals and windows too; the arithmetic is float32, so that the
reference has no errors of its own.

How to read it. KL says how far a system is from the reference; perplexity says how well it predicts, which noise can
improve by chance. The texts are short, 248 tokens at most, so whatever lies far back belongs to another text. Layouts
that forget it lose little that would help to predict (their perplexity even falls), and layouts that keep the newest
tokens whole keep most of what matters: one long text would be harder on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from minillm.bench.harness import result
from minillm.bench.prompts import evaluation_prompts
from minillm.bench.quality_systems import REFERENCE, Builder, QualitySystem, systems
from minillm.errors import MinillmError
from minillm.models.loading import load_config, resolve
from minillm.models.runner import ModelRunner, Segment
from minillm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.table import Table

CHUNK = 16
"""Tokens of each row per step."""
ROWS_AT_ONCE = 128
"""Distributions that are compared at once, to save memory."""


@dataclass(frozen=True)
class Texts:
    """What is fed, and what of it is scored."""

    rows: list[list[int]]
    """Token ids: texts one after the other, each closed by the model's end-of-text token."""
    scored: list[list[int]]
    """Per row the indices of tokens that count: all but end-of-text tokens and the first token of each text."""
    num_bytes: int
    """Bytes of the tokens that count."""

    @property
    def targets(self) -> Tensor:
        """The tokens that count, `[num_scored]`."""
        return torch.tensor([row[i] for row, indices in zip(self.rows, self.scored, strict=True) for i in indices])


@dataclass(frozen=True)
class Quality:
    """How well a system predicts, and how far it is from the reference. Nats per token for the three KL figures."""

    perplexity: float
    bits_per_byte: float
    mean_kl: float
    """KL(reference ‖ system), mean over tokens."""
    mean_kl_error: float
    """Standard error of that mean."""
    max_kl: float
    top1: float
    """Share of tokens at which both have the same likeliest next token."""


@dataclass(frozen=True)
class QualityRow:
    """One line of the result; `error` says why there are no figures."""

    system: str
    kind: str
    """`cache` or `weights`."""
    ratio: float | None = None
    """float16 bytes over its own: how many times smaller it is."""
    num_bytes: float | None = None
    """Per token of a cache at full context; of all linears inside the layers for weights."""
    outputs_equal: bool | None = None
    """Whether the likeliest token was that of the reference everywhere."""
    quality: Quality | None = None
    error: str | None = None
    baseline: str = "float16"
    config: dict[str, Any] = field(default_factory=dict)


def run(model: str = "minicoder") -> dict[str, Any]:
    """Measure every system of `quality_systems.systems`; returns the result as JSON values."""
    folder = resolve(model)
    shape, tokenizer = load_config(folder), Tokenizer.from_folder(folder)
    encoded = [tokenizer.encode(prompt.prompt) for prompt in evaluation_prompts()]
    texts = join(encoded, shape.max_position_embeddings, shape.eos_token_ids[:1], tokenizer)
    builder, todo = Builder(model, len(texts.rows)), systems()
    reference = logprobs(builder.build(todo[0]).runner, texts)
    rows = [measure(system, builder, texts, reference) for system in tqdm(todo, desc="measuring", unit=" systems")]
    config = {
        "model": model,
        "reference": f"{REFERENCE} in float32",
        "row_tokens": [len(row) for row in texts.rows],
        "scored_tokens": len(texts.targets),
        "scored_bytes": texts.num_bytes,
        "chunk": CHUNK,
        "context": shape.max_position_embeddings,
        "bytes": "of a model in float16; caches per token at full context, weights of the linears inside the layers",
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }
    return result("quality", config, rows)


def join(encoded: Sequence[list[int]], context: int, end: Sequence[int], tokenizer: Tokenizer) -> Texts:
    """Rows of about equal length, none over `context`; a text may begin in one row and go on in the next.

    `end`: the token between texts, or nothing. What opens a row is fed and not scored.
    """
    stream: list[int] = []
    counts: list[bool] = []
    for ids in encoded:
        stream += [*ids, *end]
        counts += [i > 0 for i in range(len(ids))] + [False] * len(end)
    length = -(-len(stream) // -(-len(stream) // context))
    starts = range(0, len(stream), length)
    rows = [stream[start : start + length] for start in starts]
    scored = [[i for i in range(1, len(row)) if counts[start + i]] for start, row in zip(starts, rows, strict=True)]
    num_bytes = sum(len(tokenizer.token_bytes(row[i])) for row, own in zip(rows, scored, strict=True) for i in own)
    return Texts(rows, scored, num_bytes)


def logprobs(runner: ModelRunner, texts: Texts) -> Tensor:
    """What the model expected at every token that counts, given all before it in its row: `[num_scored, vocab]`, fp32.

    All rows run together, `CHUNK` tokens each per step, each in cache blocks of its own.
    """
    first = [0, *accumulate(len(own) for own in texts.scored)]
    found = torch.empty(first[-1], runner.model.config.vocab_size, device=runner.device)
    blocks = -(-max(map(len, texts.rows)) // runner.block_size)
    for start in range(0, max(map(len, texts.rows)), CHUNK):
        active = [r for r, row in enumerate(texts.rows) if start < len(row)]
        parts = [texts.rows[r][start : start + CHUNK] for r in active]
        tables = [range(r * blocks, (r + 1) * blocks) for r in active]
        segments = [Segment(part, start, list(t), len(part)) for part, t in zip(parts, tables, strict=True)]
        for r, rows in zip(active, runner.run(segments).split([len(part) for part in parts]), strict=True):
            # Token i is expected by the row before it.
            places = [(k, i - 1 - start) for k, i in enumerate(texts.scored[r], first[r]) if start < i <= start + CHUNK]
            if places:
                into, of = map(list, zip(*places, strict=True))
                found[into] = rows[of].float().log_softmax(-1)
    return found


def judge(reference: Tensor, got: Tensor, texts: Texts) -> Quality:
    """Compare log-probabilities `[num_scored, vocab]` with those of the reference and with the text itself."""
    targets = texts.targets
    nats = -got.gather(1, targets.unsqueeze(1)).double().sum()
    divergences = []
    for exact, other in zip(reference.split(ROWS_AT_ONCE), got.split(ROWS_AT_ONCE), strict=True):
        divergences.append((exact.double().exp() * (exact.double() - other.double())).sum(-1))
    kl = torch.cat(divergences).clamp_min(0)
    return Quality(
        perplexity=float((nats / len(targets)).exp()),
        bits_per_byte=float(nats / torch.tensor(2.0).log() / texts.num_bytes),
        mean_kl=float(kl.mean()),
        mean_kl_error=float(kl.std() / len(kl) ** 0.5),
        max_kl=float(kl.max()),
        top1=float((reference.argmax(-1) == got.argmax(-1)).double().mean()),
    )


def measure(system: QualitySystem, builder: Builder, texts: Texts, reference: Tensor) -> QualityRow:
    """One line of the result. A system that the model cannot have gets a line that says so."""
    try:
        built = builder.build(system)
    except MinillmError as problem:
        return QualityRow(system.name, system.kind, error=str(problem), config=dict(system.options))
    quality = judge(reference, logprobs(built.runner, texts), texts)
    return QualityRow(
        system.name,
        system.kind,
        ratio=built.float16_bytes / built.num_bytes,
        num_bytes=built.num_bytes,
        outputs_equal=quality.top1 == 1,
        quality=quality,
        config=dict(system.options),
    )


def table(outcome: dict[str, Any]) -> Table:
    """The result of `run` for a terminal."""
    from rich.table import Table

    facts = outcome["config"]
    made = Table(title=f"{facts['model']}: {facts['scored_tokens']} held-out tokens, against {facts['reference']}")
    for heading in ("system", "bytes", "of fp16", "perplexity", "bits/byte", "mean KL", "max KL", "same top-1"):
        made.add_column(heading, justify="left" if heading == "system" else "right")
    kind = None
    for row in outcome["rows"]:
        if kind not in (None, row["kind"]):
            made.add_section()
        kind = row["kind"]
        made.add_row(*_cells(row))
    return made


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [row["system"], row["error"]]
    quality = row["quality"]
    size = f"{row['num_bytes']:.0f}/token" if row["kind"] == "cache" else f"{row['num_bytes'] / 1e6:.2f} MB"
    return [
        row["system"],
        size,
        f"{1 / row['ratio']:.3f}",
        f"{quality['perplexity']:.3f}",
        f"{quality['bits_per_byte']:.4f}",
        f"{quality['mean_kl']:.1e} ± {quality['mean_kl_error']:.0e}",
        f"{quality['max_kl']:.1e}",
        f"{quality['top1']:.1%}",
    ]
