"""Draft heads beside a compiled target: a round in one compiled call (`ops.cpu.heads`), over packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.models.decoder import Decoder
from minillm.ops.cpu import amx, heads
from minillm.ops.cpu.compiled import showing_progress
from minillm.ops.cpu.launch import Launcher
from minillm.ops.cpu.matrix_fields import BIAS, COLUMNS, GROUP, MATRIX_FIELDS, NONE, OUTPUTS, PANEL
from minillm.ops.cpu.panels import pack_floats
from minillm.ops.cpu.rounding import codes_size
from minillm.ops.cpu.simd import LANES
from minillm.ops.cpu.step import NO_TOKEN
from minillm.runtime.packed_decoder import Vectors, empty_aligned, packed, smallest_cast
from minillm.speculative.draft_heads import KINDS, DraftHeads, HeadsShape
from minillm.speculative.target_heads import HeadsRound, TargetHeads


def can_compile(shape: HeadsShape) -> bool:
    """Whether the sizes are those that the compiled round reads: multiples of sixteen."""
    sizes = (shape.hidden_size, shape.inner_size, shape.position_rank, shape.token_rank)
    return all(size % LANES == 0 for size in sizes)


class CompiledHeads(TargetHeads):
    """Heads whose weights are packed, and which read the target's embedding and unembedding where its step has them."""

    def __init__(self, plain: TargetHeads, target: Decoder) -> None:
        """`target` was packed by its executor. W D is rounded to the bits of the other weights."""
        self.heads, self.token_table, self.narrow, self.dtype = (
            plain.heads,
            plain.token_table,
            plain.narrow,
            plain.dtype,
        )
        shape, decoder = self.heads.shape, packed(target)
        vectors = Vectors()
        norm = self.heads.token_norm
        norm_at, eps_at = vectors.add(norm.weight), vectors.add(np.full(LANES, norm.eps, np.float32))
        self.matrices = np.full((heads.POSITION_OUT + shape.num_drafts, MATRIX_FIELDS), NONE, np.int64)
        panels = _pack(_matrices(self.heads, self.narrow), self.matrices)
        self.matrices[heads.CONFIDENCE, BIAS] = vectors.add(self.heads.confidence.bias)
        tokens = self.token_table.numpy().reshape(-1)
        self.weights = heads.HeadsWeights(self.matrices, vectors.flat(), panels, tokens)
        self.target = heads.Unembedding(decoder.head, decoder.matrices[-1], decoder.vectors, decoder.embedding)
        self.dims = np.array(
            [
                shape.hidden_size, shape.inner_size, shape.position_rank, shape.token_rank, shape.num_drafts,
                target.config.vocab_size, decoder.tied, norm_at, eps_at, 0,
            ],
            np.int64,
        )  # fmt: skip
        fields = [*self.matrices[:, [COLUMNS, GROUP]], decoder.matrices[-1, [COLUMNS, GROUP]]]
        self.widest_codes = max(codes_size(amx.ROWS, int(columns), int(group)) for columns, group in fields)
        self.launcher = Launcher(heads.run, heads.run_together)
        self.floats, self.codes = np.zeros(0, np.float32), np.zeros(0, np.uint8)
        zeros = (
            torch.zeros(1, shape.hidden_size, dtype=torch.float32, device="cpu"),
            torch.zeros(1, dtype=torch.int64, device="cpu"),
        )
        with showing_progress():
            self.launcher.warm_up(lambda: self._run(*zeros, [1], KINDS.index("greedy"), 0.0, num_drafted=1))

    def begin(self, hidden: Tensor, last: Tensor, most: Sequence[int], kind: int, min_survival: float) -> HeadsRound:
        """See `TargetHeads.begin`."""
        counts, logits, contexts, _ = self._run(hidden, last, most, kind, min_survival, num_drafted=0)
        longest = int(counts.max())
        rows = logits[: len(counts) * longest].unflatten(0, (-1, longest)) if longest else logits[:0]
        return HeadsRound(counts.tolist(), rows[..., : len(self.narrow)], contexts[:, :longest])

    def draft_argmax(self, hidden: Tensor, last: Tensor, most: Sequence[int], min_survival: float) -> list[list[int]]:
        """See `TargetHeads.draft_argmax`."""
        counts, _, _, drafted = self._run(
            hidden, last, most, KINDS.index("greedy"), min_survival, self.heads.shape.num_drafts
        )
        rows = [row[:count] for row, count in zip(drafted.tolist(), counts.tolist(), strict=True)]
        return [row[: row.index(NO_TOKEN)] if NO_TOKEN in row else row for row in rows]

    def _run(
        self, hidden: Tensor, last: Tensor, most: Sequence[int], kind: int, min_survival: float, num_drafted: int
    ) -> tuple[np.ndarray, Tensor, Tensor, np.ndarray]:
        """Run a round. Returns the numbers of drafts, the logits, the contexts and the drafts."""
        n, shape = len(most), self.heads.shape
        counts = np.minimum(np.array(most, np.int64), shape.num_drafts)
        longest = int(counts.max())
        logits = torch.empty(n * longest, int(self.target.matrix[OUTPUTS]), dtype=torch.float32, device="cpu")
        contexts = torch.empty(n, shape.num_drafts, shape.token_rank, dtype=torch.float32, device="cpu")
        drafted = np.empty((n, num_drafted), np.int64)
        self.dims[heads.KIND] = kind
        work = n * longest
        threads = self.launcher.threads(work)
        self._make_room(n, threads)
        self.launcher.launch(
            work, threads, self.dims, self.weights, self.target,
            heads.RoundArrays(
                hidden.float().contiguous().numpy().reshape(-1), last.numpy(), counts, logits.numpy().reshape(-1),
                contexts.numpy().reshape(-1), drafted,
            ),
            float(min_survival), self.floats, self.codes,
        )  # fmt: skip
        return counts, logits, contexts, drafted

    def _make_room(self, n: int, threads: int) -> None:
        """Make the scratch memory large enough for a round of `n` requests."""
        needed = int(heads.areas.py_func(self.dims, n)[-1]) + threads * heads.THREAD_SIZE
        if len(self.floats) < needed:
            self.floats = empty_aligned(needed, np.dtype(np.float32))
        bytes_needed = -(-n * self.heads.shape.num_drafts // amx.ROWS) * self.widest_codes
        if len(self.codes) < bytes_needed:
            self.codes = empty_aligned(bytes_needed, np.dtype(np.uint8))


def _matrices(network: DraftHeads, narrow: Tensor) -> list[Tensor]:
    """The matrices in the order of `ops.cpu.heads`; W D in the dtype of the others."""
    linears = (
        network.gate_up, network.down, network.position_in, network.context, network.confidence, network.state,
    )  # fmt: skip
    own = [linear.weight.detach() for linear in (*linears, *network.position_out)]
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(weight.to(dtype).float(), weight.float()) for weight in own):
            narrow = narrow.to(dtype).float()
    return [*own[: len(linears)], narrow, *own[len(linears) :]]


def _pack(weights: Sequence[Tensor], matrices: np.ndarray) -> np.ndarray:
    """The panels of all matrices in one array; fills in their rows of `matrices`."""
    cast, parts, at = smallest_cast(weights), [], 0
    for weight, fields in zip(weights, matrices, strict=True):
        rows, columns = weight.shape
        fields[[PANEL, COLUMNS, OUTPUTS]] = at, columns, -(-rows // LANES) * LANES
        parts.append(pack_floats(cast(weight)))
        at += len(parts[-1])
    panels = empty_aligned(at, parts[0].dtype)
    panels[:] = np.concatenate(parts)
    return panels
