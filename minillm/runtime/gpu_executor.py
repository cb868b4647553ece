"""Runs a decoder's steps on a GPU in Triton kernels, short steps in CUDA graphs, and drafts without the host.

A decoding step of a small model launches some hundred kernels of a few microseconds each, and Python takes longer to
launch a kernel than the GPU to run it. A CUDA graph is a recording of launches, including the addresses that they read
and write, which the GPU replays at a single command. So everything that changes from step to step must be at a fixed
address: in one integer tensor (`step_inputs`), copied there before each replay, or in the cache. A graph is recorded
for one *shape*. A step is padded to the next larger shape, with tokens that are not stored and belong to no request.

    key of a graph   (tokens, requests, context), each rounded up. Attention reads `query_start` and `seq_lens` on the
                     device, so one graph serves decoding, verification and any mixture of them. The context fixes the
                     width of the block tables and the number of splits of the keys.
    in the graph     everything from the embedding to the final norm. Outside: one copy to the device, then the
                     unembedding of the wanted rows. These two or three launches are made while the GPU is busy with
                     the graph. So no graph stores logits for all its rows, and the result of `run` is not overwritten.
    drafting         the whole chain in one graph: forward, argmax, the next token's slot (`ops.advance`), forward, …
                     The host reads once, at the end.

A prefill, and any step larger than the largest graph, launches the same kernels one by one, without padding.

What it costs: a graph is captured at the first step of its shape (two warm-up runs, one recording; kernels may be
compiled then, which takes seconds). Its own memory is small, because all graphs share one pool: nothing in it is needed
after a replay. Padding adds fewer than 8 tokens, or up to a quarter if there are more than 64, and fewer requests than
there are; padding requests have no work. The host writes a step's inputs anew each time, block tables from lists:
0.07 ms for one request; for 64 in blocks of 16 tokens 0.2 ms at 1024 tokens, 1.4 ms at 8192 (one CPU core).

Wins: small models and small batches, bound by launches; drafting above all. Loses: only memory and start-up time where
a step takes milliseconds anyway (`docs/gpu.md` has what an H100 measured). Tested in Triton's interpreter, with a
recorder in place of CUDA's: results equal those of plain PyTorch, token for token in float32; graphs on equals graphs
off to the last bit; nothing in a recorded part reads a tensor on the host or copies from the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from subprocess import CalledProcessError

import torch
from torch import Tensor
from triton.errors import TritonError

from minillm.batch import Batch, Segment
from minillm.cache.base import KVCache
from minillm.errors import BROKEN_DRAFTS, NonFiniteLogitsError
from minillm.models.decoder import Decoder
from minillm.ops.dispatch import implementations
from minillm.ops.transfer import on_device
from minillm.ops.triton.machine import FLOATS, power_of_two
from minillm.ops.triton.tiling import AttentionMetadata, HeadShape, StepSizes, Tiling
from minillm.runtime.cuda_graphs import Capture, CaptureError, CudaCapture, Replay
from minillm.runtime.gpu_step import FORMATS, Ops, Weights, forward, is_capturable
from minillm.runtime.runner import ObservedStep
from minillm.runtime.step_inputs import Shape, StepInputs

MAX_GRAPH_TOKENS = 512
"""Tokens of the largest graph. More tokens keep a GPU busy without one."""
MAX_GRAPH_QUERY_LEN = 16
"""Most new tokens of one request in a graph. More are a prefill, whose attention needs larger tiles."""
MAX_GRAPHS = 256
"""Most graphs; each takes some memory of its own. Steps of further shapes launch their kernels one by one."""
TOKENS_PER_REQUEST = 8
"""Tokens per request in the graph of the largest batch: one and seven drafts."""
SHORTEST_CONTEXT = 256
"""All shorter contexts share a graph: attention does not split so few keys anyway."""
NO_TOKEN = -1
"""Stored instead of a draft token whose logits were NaN or infinite."""
FAILURES = (TritonError, RuntimeError, OSError, AssertionError, CalledProcessError)
"""Errors on a machine that cannot compile kernels: no C compiler, no libcuda, a driver that is too old, …"""


def unsupported_reason(model: Decoder, cache: KVCache) -> str | None:
    """Return why kernels cannot run this model over this cache here; None if they can."""
    weight = model.embed_tokens.weight
    if implementations("paged_attention", weight.device)[0] != "triton":
        return f"Triton's kernels do not run on {weight.device}: they need an NVIDIA GPU from Turing (sm_75) on"
    if type(model) is not Decoder:
        return f"kernels implement the forward of Decoder, and {type(model).__name__} has its own"
    if weight.dtype not in FLOATS:
        return f"kernels support float32, float16 and bfloat16; the model is in {str(weight.dtype)[6:]}"
    rows = cache.stored_rows()
    if rows is None or rows.format not in FORMATS:
        return f"kernels support caches of {', '.join(FORMATS)}; {type(cache).__name__} has another format"
    if rows.format == "float" and rows.keys[0].dtype != weight.dtype:
        return f"kernels need keys and values in the model's dtype; {type(cache).__name__} has {rows.keys[0].dtype}"
    if cache.ops != type(cache).ops:
        return "an op of the cache was replaced"
    if rows.group_size % 2:
        return f"kernels pack INT4 codes in pairs of one group; this cache has groups of {rows.group_size}"
    return None


def _reason(problem: BaseException) -> str:
    """Return the type of an error, or of its first cause, with the first and the last line of its text.

    PyTorch gives the reason in the first line, Triton in the last one, after the position and the source.
    """
    while problem.__cause__ is not None:
        problem = problem.__cause__
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    ends = " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return f"{type(problem).__name__}: {ends}" if ends else type(problem).__name__


def padded_size(count: int) -> int:
    """Return the size to which this many tokens are padded: 1, 2, 4, then multiples of 8 up to 64, of 16 up to 128, …

    These are at most four sizes per power of two: vLLM's `cudagraph_capture_sizes` with fewer large sizes.
    """
    if count <= 4:
        return power_of_two(count)
    step = max(8, power_of_two(count) // 8)
    return -(-count // step) * step


@dataclass(frozen=True)
class CapturedStep:
    """A step of one shape, ready to be replayed with new inputs."""

    inputs: StepInputs
    """On the device, at the start of the memory that all shapes share."""
    output: Tensor
    """Hidden states, `[tokens, hidden]`, or drafted tokens, `[count, requests]`. The next run overwrites it."""
    replay: Replay


class GpuExecutor:
    """Runs one model over one cache. It uses the model's own tensors and leaves the model as it is.

    `max_num_seqs` and `max_model_len` bound the shapes of graphs; a larger step runs without a graph.
    `use_graphs=False` runs each step as it would be captured, with the same padding. `capture`: see `Capture`; None
    records CUDA graphs. No graphs are used where a product might wait for the device (`is_capturable`).
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        use_graphs: bool = True,
        capture: Capture | None = None,
    ) -> None:
        config, weight = model.config, model.embed_tokens.weight
        self.device, self.block_size = weight.device, block_size
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.weights = Weights.of(model, cache)
        self.ops = Ops.of(self.device)
        self.heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, weight.dtype)
        self.capture: Capture | None = None
        if use_graphs and is_capturable(model):
            self.capture = capture or CudaCapture(self.device)
        most_tokens = max(TOKENS_PER_REQUEST * max_num_seqs, MAX_GRAPH_QUERY_LEN)
        self.most_tokens = padded_size(min(MAX_GRAPH_TOKENS, most_tokens))
        largest = Shape(self.most_tokens, power_of_two(max_num_seqs), max_model_len, block_size)
        with torch.inference_mode():
            self.memory = torch.zeros(largest.size, dtype=torch.int32, device=self.device)
            self.hidden = torch.zeros(self.most_tokens, config.hidden_size, dtype=weight.dtype, device=self.device)
        self.prepared: dict[tuple[Shape, int], CapturedStep] = {}
        """The captured steps by shape and number of drafts (0: a step without drafting)."""

    runs_trees = False
    supports_confidence = False

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment]) -> Tensor:
        """See `ModelRunner.run`. Does not wait for the device. No later step overwrites the result."""
        with on_device(self.device):
            return self.weights.head(self._hidden(segments))

    @torch.inference_mode()
    def run_observed(self, segments: Sequence[Segment], rows: Sequence[int]) -> ObservedStep:
        """See `ModelRunner.run_observed`. With `rows`, it runs without a graph, whose queries nobody could read in
        between."""
        with on_device(self.device):
            if not rows:
                hidden, w = self._hidden(segments), self.weights
                return ObservedStep(w.head(hidden), hidden, hidden.new_empty(len(w.layers), 0, w.num_heads, w.head_dim))
            own = torch.tensor(rows, device=self.device)
            queries: list[Tensor] = []
            hidden = self._hidden(segments, lambda q: queries.append(q.index_select(0, own)))
            return ObservedStep(self.weights.head(hidden), hidden, torch.stack(queries))

    def _hidden(self, segments: Sequence[Segment], on_queries: Callable[[Tensor], None] | None = None) -> Tensor:
        """The hidden states of the wanted rows, which no later step overwrites. With `on_queries` (see `forward`), no
        graph is used."""
        shape = self.shape_of(segments) if on_queries is None else None
        if shape is None:
            inputs = self._send(segments, self._exact(segments))
            hidden = forward(self.weights, self.ops, self._batch(inputs, segments), on_queries)
        else:
            step = self._prepare(shape)
            self._send(segments, shape, step.inputs)
            step.replay()
            inputs, hidden = step.inputs, step.output
        wanted = inputs.logit_rows[: sum(segment.num_logits for segment in segments)]
        return hidden.index_select(0, wanted)

    @torch.inference_mode()
    def draft(self, segments: Sequence[Segment], count: int) -> list[list[int]]:
        """See `ModelRunner.draft`. Waits once, for all tokens.

        Raises `NonFiniteLogitsError` if the logits of a draft token were NaN or infinite.
        """
        with on_device(self.device):
            shape = self.shape_of(segments, count - 1)
            if shape is None:
                inputs = self._send(segments, self._exact(segments, count - 1))
                output = torch.empty(count, len(segments), dtype=torch.int64, device=self.device)
                self._draft_into(output, inputs, self._batch(inputs, segments))
            else:
                step = self._prepare(shape, count)
                self._send(segments, shape, step.inputs)
                step.replay()
                output = step.output
            drafted = [list(tokens) for tokens in zip(*output.tolist(), strict=True)][: len(segments)]
        if any(NO_TOKEN in tokens for tokens in drafted):
            raise NonFiniteLogitsError(BROKEN_DRAFTS)
        return drafted

    def warm_up(self) -> str | None:
        """Run a step of padding only, so that kernels are compiled now; returns what went wrong, or None."""
        try:
            with torch.inference_mode(), on_device(self.device):
                inputs = StepInputs.over(self.memory, self._padded(1, 1, 1))
                inputs.clear()
                self._run_into(self.hidden[:1], inputs)
                self.weights.head(self.hidden[:1])
        except FAILURES as problem:
            return f"the kernels do not run here ({_reason(problem)})"
        return None

    def shape_of(self, segments: Sequence[Segment], ahead: int = 0) -> Shape | None:
        """Return the shape to which a step is padded; None for a prefill, or if the step is larger than any graph.

        `ahead`: tokens that are drafted after the step.
        """
        tokens = sum(len(s.token_ids) for s in segments)
        context = max(s.end for s in segments) + ahead
        if (
            tokens > self.most_tokens
            or len(segments) > self.max_num_seqs
            or context > self.max_model_len
            or max(len(s.token_ids) for s in segments) > MAX_GRAPH_QUERY_LEN
        ):
            return None
        return self._padded(tokens, len(segments), context)

    def _padded(self, tokens: int, requests: int, context: int) -> Shape:
        context = min(power_of_two(context, SHORTEST_CONTEXT), self.max_model_len)
        return Shape(padded_size(tokens), power_of_two(requests), context, self.block_size)

    def _exact(self, segments: Sequence[Segment], ahead: int = 0) -> Shape:
        tokens = sum(len(s.token_ids) for s in segments)
        context = max(s.end for s in segments) + ahead
        return Shape(tokens, len(segments), context, self.block_size)

    def _send(self, segments: Sequence[Segment], shape: Shape, inputs: StepInputs | None = None) -> StepInputs:
        """Copy a step to the device, in one copy from pinned memory, for which the host does not wait.

        The host memory is new each time: PyTorch reuses pinned memory only when copies from it are done, so no step
        overwrites memory from which an earlier step is still being copied.
        """
        pinned = self.device.type == "cuda"
        host = torch.zeros(shape.size, dtype=torch.int32, device="cpu", pin_memory=pinned)
        StepInputs.over(host, shape).fill(segments)
        if inputs is None:
            return StepInputs.over(host.to(self.device, non_blocking=True), shape)
        inputs.flat.copy_(host, non_blocking=True)
        return inputs

    def _prepare(self, shape: Shape, count: int = 0) -> CapturedStep:
        """Return the step of this shape, captured at its first use. `count`: drafts; 0: no drafting."""
        if (shape, count) in self.prepared:
            return self.prepared[shape, count]
        inputs = StepInputs.over(self.memory, shape)
        if count:
            output = torch.zeros(count, shape.requests, dtype=torch.int64, device=self.device)
            function = partial(self._draft_into, output, inputs)
        else:
            output = self.hidden[: shape.tokens]
            function = partial(self._run_into, output, inputs)
        if self.capture is None or len(self.prepared) == MAX_GRAPHS:
            return CapturedStep(inputs, output, function)
        inputs.clear()  # warm-up runs must neither write to the cache nor read it
        try:
            replay = self.capture(function)
        except CaptureError as problem:
            warnings.warn(f"new shapes run without CUDA graphs from now on: {problem}", RuntimeWarning, stacklevel=2)
            self.capture = None
            return CapturedStep(inputs, output, function)
        self.prepared[shape, count] = CapturedStep(inputs, output, replay)
        return self.prepared[shape, count]

    def _run_into(self, output: Tensor, inputs: StepInputs) -> None:
        output.copy_(forward(self.weights, self.ops, self._batch(inputs)))

    def _draft_into(self, output: Tensor, inputs: StepInputs, batch: Batch | None = None) -> None:
        """Fill `output` (`[count, requests]`) with greedily drafted tokens."""
        w, ops, shape = self.weights, self.ops, inputs.shape
        hidden = forward(w, ops, batch or self._batch(inputs))
        last = hidden.index_select(0, inputs.logit_rows[: shape.requests])
        lengths, tokens, are_valid = inputs.seq_lens, [], []
        for number in range(1, len(output) + 1):
            token_ids, is_valid = ops.argmax(w.head(last))
            tokens.append(token_ids)
            are_valid.append(is_valid)
            if number == len(output):
                break
            slots, next_lengths = ops.advance(lengths, inputs.block_tables, shape.block_size)
            positions = lengths + inputs.num_skipped
            last = forward(w, ops, self._one_each(inputs, token_ids, positions, slots, next_lengths))
            lengths = next_lengths
        torch.stack(tokens, out=output)
        output.masked_fill_(torch.stack(are_valid).logical_not_(), NO_TOKEN)

    def _batch(self, inputs: StepInputs, segments: Sequence[Segment] | None = None) -> Batch:
        """Return the batch of a step. Without `segments` only its shape is known, and the lists are made from that."""
        shape = inputs.shape
        if segments is None:
            longest = -(-shape.tokens // shape.requests)
            query_start = [*[0] * shape.requests, shape.tokens]
            seq_lens = [shape.context] * shape.requests
        else:
            longest = max(len(s.token_ids) for s in segments)
            query_start = [0, *accumulate(len(s.token_ids) for s in segments)]
            seq_lens = [s.end for s in segments]
        batch = Batch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slots,
            block_tables=inputs.block_tables,
            query_start=query_start,
            seq_lens=seq_lens,
            block_size=shape.block_size,
        )
        batch.set_plan(AttentionMetadata(inputs.query_start, inputs.seq_lens))
        batch.set_plan(Tiling.for_sizes(StepSizes(shape.tokens, shape.requests, longest), shape.context, self.heads))
        return batch

    def _one_each(
        self, inputs: StepInputs, token_ids: Tensor, positions: Tensor, slots: Tensor, seq_lens: Tensor
    ) -> Batch:
        """Return the batch of the next drafting step: one token for each request."""
        shape = inputs.shape
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=inputs.block_tables,
            query_start=list(range(shape.requests + 1)),
            seq_lens=[shape.context] * shape.requests,
            block_size=shape.block_size,
        )
        batch.set_plan(AttentionMetadata(inputs.draft_query_start, seq_lens))
        batch.set_plan(Tiling.for_sizes(StepSizes(shape.requests, shape.requests, 1), shape.context, self.heads))
        return batch
