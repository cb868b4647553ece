"""The ideas from training and from other layers, `minillm.beside`, measured on this project's own model and texts.

Each line compares an idea with a plain way: bytes and errors are counted and depend on nothing but the weights; times
are of this machine, both measured in turn. Texts are held-out prompts; what is fitted to text is measured on other
files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from minillm.bench.harness import result
from minillm.bench.timing import medians, ratio, time_in_turn
from minillm.beside.binary_linear import BinaryLinear
from minillm.beside.chunked_training import SavedBytes, chunked_backward, whole_backward
from minillm.beside.contrastive import dense_contrastive_loss, tiled_contrastive_loss
from minillm.beside.embedding_codes import EmbeddingCodes
from minillm.beside.sparse_gather import by_bag, by_gather, by_product, incidence
from minillm.beside.structured_linear import compare
from minillm.models.decoder import Decoder
from minillm.models.held_out import calibration_prompts, evaluation_prompts
from minillm.models.hub import resolve
from minillm.models.loading import load_model
from minillm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.table import Table

CHUNK = 128
LENGTHS = (512, 1024)
BLOCKS = 16
BATCH, WIDTH = 2048, 384
TRIPLES = 20_000
ROUNDS = 15
"""Of times."""


@dataclass(frozen=True)
class BesideRow:
    """One figure of an idea, and the same of the plain way."""

    technique: str
    measure: str
    value: float
    plain: float
    plain_way: str
    unit: str
    speed: float | None = None
    """Of a time: how many times as fast as the plain way, the median of the rounds."""
    speed_min: float | None = None
    speed_max: float | None = None


def run(model: str = "minicoder") -> dict[str, Any]:
    """Measure every idea on `model`. Returns the result as JSON values."""
    folder = resolve(model)
    decoder = load_model(folder, torch.float32, torch.device("cpu")).requires_grad_()
    tokenizer = Tokenizer.from_folder(folder)
    fitted, texts = (
        torch.tensor([token for one in prompts for token in tokenizer.encode(one.prompt)])
        for prompts in (calibration_prompts(), evaluation_prompts())
    )
    parts: list[Callable[[], Iterator[BesideRow]]] = [
        lambda: chunked_training(decoder, texts),
        lambda: structured_matrices(decoder),
        lambda: contrastive_loss(),
        lambda: binary_weights(decoder),
        lambda: embedding_codes(decoder, fitted, texts),
        lambda: sparse_gather(decoder),
    ]
    rows = [row for part in tqdm(parts, desc="measuring", unit=" ideas") for row in part()]
    config = {"model": model, "text_tokens": len(texts), "dtype": "float32", "device": "cpu"}
    return result("beside", {**config, "threads": torch.get_num_threads()}, rows)


def chunked_training(model: Decoder, texts: Tensor) -> Iterator[BesideRow]:
    """OOMB: bytes that autograd keeps, and the difference of the gradients."""
    for length in LENGTHS:
        peaks, grads = [], []
        for chunked in (True, False):
            model.zero_grad(set_to_none=True)
            with SavedBytes(model) as saved:
                if chunked:
                    chunked_backward(model, texts[: length + 1], CHUNK)
                else:
                    whole_backward(model, texts[: length + 1])
            peaks.append(saved.peak)
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad(set_to_none=True)
        yield BesideRow(
            "OOMB", f"kept for the backward pass, {length:,} tokens", peaks[0] / 1e6, peaks[1] / 1e6, "whole text", "MB"
        )
    error = float(torch.linalg.norm(grads[0] - grads[1]) / torch.linalg.norm(grads[1]))
    yield BesideRow("OOMB", "relative difference of the gradients", error, 0.0, "whole text", "")


def structured_matrices(model: Decoder) -> Iterator[BesideRow]:
    """BLAST and Monarch: relative error at Monarch's number of parameters, mean over one layer's matrices."""
    layer = model.layers[len(model.layers) // 2]
    weights = [layer.qkv_proj.weight, layer.o_proj.weight, layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight]
    found = [compare(weight.detach(), BLOCKS) for weight in weights]
    means = {name: sum(one[name][1] for one in found) / len(found) for name in found[0]}
    for name in ("BLAST", "Monarch"):
        yield BesideRow(name, "relative error at equal parameters", means[name], means["SVD"], "SVD", "")


def contrastive_loss() -> Iterator[BesideRow]:
    """The tiled loss: bytes that autograd keeps, seconds of forward and backward."""
    generator = torch.Generator().manual_seed(0)
    x, y = (F.normalize(torch.randn(BATCH, WIDTH, generator=generator), dim=-1).requires_grad_() for _ in "xy")
    ways: list[Callable[[], Tensor]] = [
        lambda: tiled_contrastive_loss(x, y, 0.07),
        lambda: dense_contrastive_loss(x, y, 0.07),
    ]
    peaks = []
    for way in ways:
        with SavedBytes(torch.nn.Module()) as saved:
            way().backward()
        peaks.append(saved.peak / 1e6)
    yield BesideRow("tiled contrastive loss", f"kept for the backward pass, batch {BATCH:,}", *peaks, "dense", "MB")
    tiled, dense = ways
    runs = {"": lambda: tiled().backward(), "dense": lambda: dense().backward()}
    yield from _times("tiled contrastive loss", "forward and backward", runs)


def binary_weights(model: Decoder) -> Iterator[BesideRow]:
    """BiMaCoSR: relative error of one layer's down projection, beside one bit and one scale per channel alone."""
    weight = model.layers[len(model.layers) // 2].mlp.down_proj.weight.detach()
    fits = [BinaryLinear.fit(weight), BinaryLinear.fit(weight, rank=0, density=0.0)]
    errors = [float(torch.linalg.norm(weight - fit.dense()) / torch.linalg.norm(weight)) for fit in fits]
    bits = [fit.num_bits / weight.numel() for fit in fits]
    yield BesideRow("BiMaCoSR", "relative error of a matrix", *errors, "one bit and a scale", "")
    yield BesideRow("BiMaCoSR", "size", *bits, "one bit and a scale", "bits per weight")


def embedding_codes(model: Decoder, fitted: Tensor, read: Tensor) -> Iterator[BesideRow]:
    """MEC: error of the embeddings that the text `read` needs, with codebooks fitted by the frequency of tokens in
    another text, `fitted`, and without; bytes."""
    table = model.embed_tokens.weight.detach()
    counts = torch.bincount(fitted, minlength=len(table))
    parts = table.shape[1] // 8
    fits = [EmbeddingCodes.fit(table, counts, parts, power=power, rounds=8) for power in (0.5, 0.0)]
    errors = [float(torch.linalg.norm(table[read] - fit.rows(read)) / torch.linalg.norm(table[read])) for fit in fits]
    yield BesideRow("MEC", "relative error of the embeddings that a text reads", *errors, "all rows alike", "")
    yield BesideRow("MEC", "bytes", fits[0].num_bytes / 1e6, table.numel() * 2 / 1e6, "float16", "MB")


def sparse_gather(model: Decoder) -> Iterator[BesideRow]:
    """SparseTransX: sums of gathered rows as one sparse product, on the embedding table. Beside it the sum as one
    writes it, and PyTorch's own function for it."""
    table = model.embed_tokens.weight.detach()
    rows = torch.randint(len(table), (TRIPLES, 3), generator=torch.Generator().manual_seed(0))
    signs = torch.tensor([1.0, 1.0, -1.0])
    matrix = incidence(rows, signs, len(table))
    runs = {
        "": lambda: by_product(table, matrix),
        "gather": lambda: by_gather(table, rows, signs),
        "embedding_bag": lambda: by_bag(table, rows, signs),
    }
    yield from _times("SparseTransX", f"{TRIPLES:,} triples", runs)


def _times(technique: str, measure: str, runs: Mapping[str, Callable[[], object]]) -> Iterator[BesideRow]:
    """Time the idea, which is the run without a name, and its plain ways in turn. A row for each plain way."""
    seconds = time_in_turn(runs, ROUNDS, torch.get_num_threads())
    median = medians(seconds)
    for plain_way in runs:
        if plain_way:
            speed = ratio(seconds[plain_way], seconds[""])
            times = (1e3 * median[""], 1e3 * median[plain_way])
            yield BesideRow(
                technique,
                measure,
                *times,
                plain_way,
                "ms",
                speed=speed.median,
                speed_min=speed.low,
                speed_max=speed.high,
            )


def table(outcome: dict[str, Any]) -> Table:
    """The result of `run` for a terminal."""
    from rich.table import Table

    made = Table(title=f"Beside inference, on {outcome['config']['model']}")
    for heading in ("technique", "measured", "value", "plain", "speed over", "plain way"):
        made.add_column(heading, justify="right" if heading in ("value", "plain", "speed over") else "left")
    for row in outcome["rows"]:
        value, plain = (f"{row[key]:.4g} {row['unit']}".strip() for key in ("value", "plain"))
        speed = row.get("speed")
        spread = "" if speed is None else f"{speed:.2f}× ({row['speed_min']:.2f} to {row['speed_max']:.2f})"
        made.add_row(row["technique"], row["measure"], value, plain, spread, row["plain_way"])
    return made
