"""Runs one model over one ragged step: turns requests into a `Batch`, and hidden states into the wanted logits.

By default it runs one PyTorch operation after the other. After `use_executor` an executor runs the same steps faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minillm.batch import Batch, Segment, logit_rows
from minillm.cache.base import KVCache
from minillm.errors import BROKEN_DRAFTS, NonFiniteLogitsError
from minillm.models.decoder import Attention, Decoder

EXECUTORS = {
    "cpu": ("numba", "minillm.runtime.cpu_executor", "CpuExecutor"),
    "cuda": ("triton", "minillm.runtime.gpu_executor", "GpuExecutor"),
}
"""Device type → the package that its executor needs, and the executor's module and class. They are imported on first
use, because numba takes half a second. The class is an `Executor`, built as `class(model, cache, block_size,
max_num_seqs, max_model_len)`; the module also has `unsupported_reason(model, cache)`, which returns why no executor of
this class can run them, or None."""


class ObservedStep(NamedTuple):
    """The result of a step, and what drafters read of it."""

    logits: Tensor
    """`[sum of num_logits, vocab]`, as `ModelRunner.run` returns them."""
    hidden: Tensor
    """`[sum of num_logits, hidden]`: the hidden states after the final norm, which the unembedding multiplies. A copy:
    no later step overwrites it."""
    queries: Tensor
    """`[num_layers, number of observed tokens, num_heads, head_dim]`: their queries as attention gets them, rotated."""


class Executor(Protocol):
    """Runs the steps of one model over one cache faster than plain PyTorch."""

    runs_trees: bool
    """Whether it can run a step in which a segment ends in a draft tree; if not, plain PyTorch runs such a step."""
    supports_confidence: bool
    """Whether it has `draft_while_confident`; if not, `run` is called once for each token."""

    def warm_up(self) -> str | None:
        """Prepare the first steps. Returns why it cannot run here, or None; with a reason, the model is as before."""

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """See `ModelRunner.run`."""

    def run_observed(self, segments: Sequence[Segment], rows: Sequence[int]) -> ObservedStep:
        """See `ModelRunner.run_observed`."""

    def draft(self, segments: Sequence[Segment], count: int) -> list[list[int]]:
        """See `ModelRunner.draft`."""

    def draft_while_confident(
        self, segments: Sequence[Segment], count: int, survival: Sequence[float], min_survival: float
    ) -> tuple[list[list[int]], list[float]]:
        """See `ModelRunner.draft_while_confident`."""


class QueryRecorder:
    """The attention of a cache, which also collects the queries of some tokens."""

    def __init__(self, cache: KVCache, rows: Sequence[int]) -> None:
        self.cache, self.rows = cache, list(rows)
        self.queries: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`."""
        self.queries.append(q[self.rows])
        return self.cache.attend(layer, q, k, v, batch)


def check_finite(logits: Tensor) -> None:
    """Raise `NonFiniteLogitsError` if some logits of a draft are NaN or infinite: their argmax is a token of no
    meaning."""
    if not logits.isfinite().all():
        raise NonFiniteLogitsError(BROKEN_DRAFTS)


class ModelRunner:
    """A model and the cache it writes to."""

    def __init__(self, model: Decoder, cache: KVCache, block_size: int) -> None:
        self.model = model
        self.cache = cache
        self.block_size = block_size
        self.device = model.embed_tokens.weight.device
        self.executor: Executor | None = None
        """The executor that runs the steps; None: plain PyTorch."""

    @property
    def sampling_implementation(self) -> str | None:
        """Which implementation of the ops samples from this model's logits: the device's best (None) with an executor,
        because kernels are then known to compile here; else PyTorch's, which always runs."""
        return "reference" if self.executor is None else None

    def unsupported_reason(self) -> str | None:
        """Return why no executor can run this model over this cache; None if one can, judged without trying it."""
        module, reason = self._executor_module()
        return reason or module.unsupported_reason(self.model, self.cache)

    def unsupported_sizes(self) -> str | None:
        """On a CPU: the reason, if it is the dtype or the sizes of the model, over a cache that the compiled step could
        read. None otherwise."""
        module, reason = self._executor_module()
        return None if reason or self.device.type != "cpu" else module.unsupported_sizes(self.model, self.cache)

    def use_executor(self, max_num_seqs: int = 1, max_model_len: int | None = None) -> str | None:
        """Run steps through an executor from now on: on a CPU in compiled code, which takes over the model's weights;
        on a GPU in kernels and CUDA graphs.

        `max_num_seqs`: most requests of a step; `max_model_len`: most tokens of a request, None for the model's
        context. The executor prepares for these limits, and all steps keep within them.

        Returns the reason if no executor can run this model over this cache; then nothing has changed.
        """
        if reason := self.unsupported_reason():
            return reason
        module, _ = self._executor_module()
        longest = max_model_len or self.model.config.max_position_embeddings
        executor_class = getattr(module, EXECUTORS[self.device.type][2])
        executor = executor_class(self.model, self.cache, self.block_size, max_num_seqs, longest)
        reason = executor.warm_up()
        if reason is None:
            self.executor = executor
        return reason

    def _executor_module(self) -> tuple[Any, str | None]:
        """Return the module of the device's executor, or the reason why there is none."""
        if self.device.type not in EXECUTORS:
            return None, f"there is no executor for {self.device.type}"
        package, module, _ = EXECUTORS[self.device.type]
        try:
            import_module(package)
        except (ImportError, ValueError) as problem:  # numba: ValueError where NUMBA_NUM_THREADS is 0
            return None, f"{package} cannot be imported ({problem})"
        return import_module(module), None

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """Run one forward. Returns `[sum of num_logits, vocab]` in the order of `segments`."""
        if (executor := self._executor_for(segments)) is not None:
            return executor.run(segments)
        with torch.inference_mode():
            return self.model.logits(self._hidden(segments, self.cache))

    def run_observed(self, segments: Sequence[Segment], rows: Sequence[int] = ()) -> ObservedStep:
        """As `run`. Also returns the hidden states of which it returns logits, and the queries of the step's tokens
        `rows`."""
        if (executor := self._executor_for(segments)) is not None:
            return executor.run_observed(segments, rows)
        recorder = QueryRecorder(self.cache, rows)
        with torch.inference_mode():
            hidden = self._hidden(segments, recorder)
            return ObservedStep(self.model.logits(hidden), hidden, torch.stack(recorder.queries))

    def _executor_for(self, segments: Sequence[Segment]) -> Executor | None:
        """The executor, unless it cannot run these segments."""
        can_run = self.executor is not None and (self.executor.runs_trees or all(s.parents is None for s in segments))
        return self.executor if can_run else None

    def _hidden(self, segments: Sequence[Segment], attention: Attention) -> Tensor:
        """The hidden states of the wanted rows in plain PyTorch."""
        batch = self.batch(segments)
        hidden = self.model(batch.token_ids, batch.positions, attention, batch)
        rows = logit_rows(segments)
        if len(rows) < hidden.shape[0]:
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=self.device)]
        return hidden

    def draft(self, segments: Sequence[Segment], count: int) -> list[list[int]]:
        """Return the `count` tokens that follow each segment under greedy decoding.

        Each segment wants one row of logits, and its block table has room for `count` - 1 more tokens. Raises
        `NonFiniteLogitsError` if the logits of one of them are NaN or infinite.
        """
        if self.executor is not None:
            return self.executor.draft(segments, count)
        return self.draft_step_by_step(segments, count, [1.0] * len(segments), 0.0)[0]

    def draft_while_confident(
        self, segments: Sequence[Segment], count: int, survival: Sequence[float], min_survival: float
    ) -> tuple[list[list[int]], list[float]]:
        """As `draft`, but each chain ends before the token with which its survival falls below `min_survival`: the
        product of the probabilities that the model gives its tokens, temperature 1. `survival`: that of each chain so
        far, 1 for one that begins. Returns the tokens, and the product with that of a token left out, if one was."""
        if self.executor is not None and self.executor.supports_confidence:
            return self.executor.draft_while_confident(segments, count, survival, min_survival)
        return self.draft_step_by_step(segments, count, survival, min_survival)

    def draft_step_by_step(
        self, segments: Sequence[Segment], count: int, survival: Sequence[float], min_survival: float
    ) -> tuple[list[list[int]], list[float]]:
        """As `draft_while_confident`, with one forward for each token."""
        tokens: list[list[int]] = [[] for _ in segments]
        products, steps = list(survival), list(segments)
        active = [i for i, product in enumerate(products) if product >= min_survival]
        for _ in range(count):
            if not active:
                break
            logits = self.run([steps[i] for i in active])
            check_finite(logits)
            found = logits.argmax(-1)
            likely = [1.0] * len(active)
            if min_survival:
                likely = logits.float().softmax(-1).gather(-1, found.unsqueeze(-1)).flatten().tolist()
            for i, token, probability in zip(active, found.tolist(), likely, strict=True):
                products[i] *= probability
                if products[i] >= min_survival:
                    tokens[i].append(token)
                    s = steps[i]
                    steps[i] = Segment([token], s.end, s.block_table, num_skipped=s.num_skipped)
            active = [i for i in active if products[i] >= min_survival]
        return tokens, products

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KVCache.copy_blocks`."""
        self.cache.copy_blocks(pairs)

    def batch(self, segments: Sequence[Segment]) -> Batch:
        """Return the segments as one batch on the model's device."""
        return Batch.from_segments(segments, self.block_size, self.device)
