"""The quality of every quantised cache and weight format: perplexity, bits per byte, KL divergence, top-1 agreement.

Held-out evaluation texts are concatenated to rows of at most `context` tokens: the model's context, or 1,024 if less.
They are fed with the true token at every position (teacher forcing), in chunks, through the engine's runner, so later
chunks read what the cache actually stores. All systems see the same tokens at the same positions and differ only in the
storage format. Bytes are those of a model in float16, including residuals and windows, which take more per token in a
short request; for a cache they are those of `context` tokens. The arithmetic is float32, so that the reference has no
rounding errors of 16 bits.

How to read it. KL is the distance of a system from the reference. Perplexity is how well it predicts, which noise can
improve by chance. The texts are short, 248 tokens at most, so distant tokens belong to another text. Layouts that evict
them lose little that helps to predict (their perplexity even falls), and layouts that keep the newest tokens in full
precision keep most of what matters. One long text would be harder for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from minillm.batch import Segment
from minillm.bench.harness import result
from minillm.bench.quality_systems import REFERENCE, Builder, QualitySystem, context_of, systems
from minillm.errors import MinillmError
from minillm.models.held_out import evaluation_prompts
from minillm.models.hub import resolve
from minillm.models.loading import load_config
from minillm.runtime.runner import ModelRunner
from minillm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.table import Table

CHUNK = 16
"""Tokens of each row per step."""
ROWS_AT_ONCE = 128
"""Number of distributions compared at once, to save memory."""


@dataclass(frozen=True)
class Texts:
    """The token ids that are fed to the model, and which of them are scored."""

    rows: list[list[int]]
    """Token ids: concatenated texts, each followed by the model's end-of-text token."""
    scored: list[list[int]]
    """For each row the indices of scored tokens: all but end-of-text tokens and the first token of each text."""
    num_bytes: int
    """Bytes of the scored tokens."""

    @property
    def targets(self) -> Tensor:
        """The ids of the scored tokens, `[num_scored]`."""
        return torch.tensor([row[i] for row, indices in zip(self.rows, self.scored, strict=True) for i in indices])


@dataclass(frozen=True)
class Quality:
    """How well a system predicts, and its distance from the reference. The three KL values are in nats per token."""

    perplexity: float
    bits_per_byte: float
    mean_kl: float
    """KL(reference ‖ system), mean over tokens."""
    mean_kl_error: float
    """Standard error of that mean, as if tokens were independent: those of one text are not, so it is too small."""
    max_kl: float
    top1: float
    """Share of tokens at which the system and the reference have the same argmax."""


@dataclass(frozen=True)
class QualityRow:
    """One line of the result. If the model cannot run the system, `error` says why."""

    system: str
    kind: str
    """`cache` or `weights`."""
    ratio: float | None = None
    """Compression ratio: float16 bytes divided by the system's bytes."""
    num_bytes: float | None = None
    """For a cache: bytes per token of a request of `context` tokens. For weights: bytes of all linears inside the
    layers."""
    outputs_equal: bool | None = None
    """Whether the argmax equals that of the reference at every scored token."""
    quality: Quality | None = None
    error: str | None = None
    baseline: str = "float16"
    config: dict[str, Any] = field(default_factory=dict)


def run(model: str = "minicoder") -> dict[str, Any]:
    """Measure every system of `quality_systems.systems`. Returns the result as JSON values."""
    folder = resolve(model)
    shape, tokenizer = load_config(folder), Tokenizer.from_folder(folder)
    encoded = [tokenizer.encode(prompt.prompt) for prompt in evaluation_prompts()]
    context = context_of(model)
    texts = join(encoded, context, shape.eos_token_ids[:1], tokenizer)
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
        "context": context,
        "bytes": f"of a model in float16; caches per token of a request of {context} tokens, weights of the linears "
        "inside the layers",
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }
    return result("quality", config, rows)


def join(encoded: Sequence[list[int]], context: int, end: Sequence[int], tokenizer: Tokenizer) -> Texts:
    """Concatenate texts to rows of about equal length, at most `context`. A text may continue in the next row.

    `end`: the token between texts, or empty. The first token of a row is not scored.
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
    num_bytes = sum(
        len(tokenizer.token_bytes(row[i])) for row, indices in zip(rows, scored, strict=True) for i in indices
    )
    return Texts(rows, scored, num_bytes)


def logprobs(runner: ModelRunner, texts: Texts) -> Tensor:
    """Log-probabilities at every scored token, given all tokens before it in its row: `[num_scored, vocab]`, fp32.

    All rows run together, `CHUNK` tokens each per step, each in its own cache blocks.
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
            # The logits of position i - 1 predict token i.
            pairs = [(k, i - 1 - start) for k, i in enumerate(texts.scored[r], first[r]) if start < i <= start + CHUNK]
            if pairs:
                targets, sources = map(list, zip(*pairs, strict=True))
                found[targets] = rows[sources].float().log_softmax(-1)
    return found


def judge(reference: Tensor, got: Tensor, texts: Texts) -> Quality:
    """Compare log-probabilities `[num_scored, vocab]` with those of the reference and with the true tokens."""
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
    """Measure one system. If the model does not support it, the row has only an error."""
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
