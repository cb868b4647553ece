"""Graphs on = graphs off = plain PyTorch, with a recorder in place of CUDA's; and tests of the recorder itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.ops.triton.conftest import interpreter  # noqa: F401  (first, because it imports Triton in interpreter mode)

# isort: split
from minillm.batch import Segment
from minillm.cache.base import KVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.models.quantize import quantize_model
from minillm.ops.triton import machine, tiling
from minillm.quantization.int8 import Int8
from minillm.runtime import cuda_graphs, gpu_executor
from minillm.runtime.cuda_graphs import CudaCapture
from minillm.runtime.gpu_executor import GpuExecutor
from minillm.runtime.step_inputs import Shape, StepInputs
from tests.runtime.gpu_cases import (
    BLOCK_SIZE,
    BLOCKS,
    OTHER,
    OTHERS_TABLE,
    PROMPT,
    SMALL,
    TABLE,
    random_model,
    relative,
    runner_of,
)
from tests.runtime.gpu_executors import ON_GPU, executor_of
from tests.runtime.software_graph import CaptureError


def short_steps() -> list[list[Segment]]:
    """Return a prefill, then a verification together with a decode."""
    first = [Segment(PROMPT[:4], 0, TABLE, 2), Segment(OTHER[:4], 0, OTHERS_TABLE)]
    return [first, [Segment([51, 52, 53, 54], 4, TABLE, 4), Segment([80], 4, OTHERS_TABLE)]]


class Conversation:
    """Requests that prefill, decode, verify and draft in a random order, as in an engine."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = random.Random(seed)
        order = self.random.sample(range(BLOCKS), BLOCKS)
        each = BLOCKS // count
        self.tables = [order[i * each : (i + 1) * each] for i in range(count)]
        self.cached = [0] * count
        self.limit = min(each * BLOCK_SIZE, 64)

    def step(self) -> list[Segment]:
        """Return the next ragged step: some of the requests, each with one token, a few, or a chunk of a prompt."""
        segments = []
        for r in self.random.sample(range(len(self.tables)), self.random.randint(1, len(self.tables))):
            many = self.random.choice((1, 1, 3)) if self.cached[r] else self.random.choice((2, 5))
            if self.cached[r] + many + 4 > self.limit:
                continue
            tokens = [self.random.randrange(97) for _ in range(many)]
            rows = self.random.choice((1, many))
            segments.append(Segment(tokens, self.cached[r], self.tables[r], rows))
            self.cached[r] += many
        return segments or self.step()

    def roll_back(self) -> None:
        """Reject drafts: remove the last tokens, but leave their keys and values in the cache."""
        self.cached = [max(count - self.random.choice((0, 0, 2)), 1) if count else 0 for count in self.cached]

    def drafting(self) -> tuple[list[Segment], int]:
        """Return what a draft model runs after a step: segments of one or two new tokens, and the number of drafts."""
        segments = [
            Segment([self.random.randrange(97) for _ in range(self.random.choice((1, 2)))], count, table)
            for count, table in zip(self.cached, self.tables, strict=True)
            if count
        ]
        return segments, self.random.choice((1, 2))


@pytest.mark.parametrize("seed", [0, 1])
def test_graphs_on_is_graphs_off_to_the_last_bit_and_the_plain_way_token_for_token(seed: int) -> None:
    model = random_model(SMALL)
    on, off, plain = executor_of(model), executor_of(model, graphs=False), runner_of(model)
    talk = Conversation(seed, 2)
    for _ in range(3):
        step = talk.step()
        replayed, launched, right = on.run(step), off.run(step), plain.run(step)
        assert torch.equal(replayed, launched)
        assert relative(replayed, right) <= 1e-5
        assert replayed.argmax(-1).tolist() == right.argmax(-1).tolist()
        segments, count = talk.drafting()
        assert on.draft(segments, count) == off.draft(segments, count) == plain.draft(segments, count)
        talk.roll_back()
    for mine, right in zip(
        (on.weights.layers[0].keys, off.weights.layers[0].keys), (plain.cache.keys[0],) * 2, strict=True
    ):
        assert torch.equal(mine.isnan(), right.isnan())


@pytest.mark.parametrize("layout", [PagedInt8KVCache, PagedInt4KVCache])
def test_quantised_caches_and_weights_under_graphs(layout: type[KVCache]) -> None:
    model = quantize_model(random_model(replace(SMALL, qk_norm=True)), Int8())
    on, off, plain = executor_of(model, True, layout), executor_of(model, False, layout), runner_of(model, layout)
    one_row = [Segment([55], 8, TABLE)]  # has kernels of its own
    for step in (*short_steps(), one_row):
        replayed = on.run(step)
        assert torch.equal(replayed, off.run(step))
        assert relative(replayed, plain.run(step)) <= 1e-5
    for segments in ([Segment([50], 8, TABLE), Segment([51, 3], 5, OTHERS_TABLE)], one_row):
        assert on.draft(segments, 2) == off.draft(segments, 2) == plain.draft(segments, 2)


def test_one_graph_serves_every_step_of_its_shape() -> None:
    model = random_model(SMALL)
    on, plain = executor_of(model), runner_of(model)
    first = [Segment(PROMPT[:5], 0, TABLE), Segment(OTHER[:3], 0, OTHERS_TABLE)]
    second = [Segment([1], 5, TABLE), Segment([2, 3, 4, 5, 6, 7], 3, [5, 6, 12], 6)]
    third = [Segment([9, 8, 7, 6], 6, TABLE, 2), Segment([6], 9, [5, 6, 12])]
    for step in (first, second, third):
        assert on.shape_of(step) == Shape(8, 2, 64, BLOCK_SIZE)
        assert relative(on.run(step), plain.run(step)) <= 1e-5
    if not ON_GPU:
        assert (on.capture.num_captures, on.capture.num_replays) == (1, 3)


def test_as_many_tokens_of_other_requests_or_longer_ones_are_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_executor, "SHORTEST_CONTEXT", 8)
    model = random_model(SMALL)
    on, plain = executor_of(model), runner_of(model)
    one, two = [Segment(PROMPT[:4], 0, TABLE, 4)], [Segment([1, 2], 4, TABLE), Segment([3, 4], 0, OTHERS_TABLE)]
    longer = [Segment([5, 6, 7, 8], 6, TABLE, 4)]
    for step in (one, two, longer):
        assert relative(on.run(step), plain.run(step)) <= 1e-5
    assert list(on.prepared) == [(Shape(4, r, context, BLOCK_SIZE), 0) for r, context in ((1, 8), (2, 8), (1, 16))]


@pytest.mark.skipif(ON_GPU, reason="a CUDA graph does not count its launches")
def test_a_layer_is_ten_launches_and_a_drafted_token_four_more() -> None:
    around = 5  # cosines, sines, embedding, first norm; and the copy of the result into the output
    for layers in (1, 2):
        on = executor_of(random_model(replace(SMALL, num_layers=layers)))
        on.run([Segment([1], 0, TABLE)])
        assert on.capture.num_launches == around + 10 * layers
    counts = []
    for count in (1, 2, 3):
        on.draft([Segment([1], 0, TABLE)], count)
        counts.append(on.capture.num_launches)
    # unembedding, argmax, advance and positions, then another forward
    assert [b - a for a, b in pairwise(counts)] == [4 + around - 1 + 10 * layers] * 2


def test_a_replay_runs_no_python_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    on = executor_of(random_model(SMALL))
    on.run([Segment(PROMPT, 0, TABLE)])
    on.run([Segment([1], 6, TABLE)])
    on.draft([Segment([2], 7, TABLE)], 2)
    monkeypatch.setattr(gpu_executor, "forward", None)
    on.run([Segment([2], 7, TABLE)])
    on.draft([Segment([3], 8, TABLE)], 2)
    with pytest.raises(TypeError):
        on.run([Segment([1, 2, 3], 9, TABLE)])


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # padding rows
def test_keys_cut_into_parts_are_cut_alike_in_every_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_sms", lambda: 16)
    monkeypatch.setattr(tiling, "MIN_KEYS_PER_SPLIT", 16)
    model = random_model(replace(SMALL, sliding_window=5))
    on, off, plain = executor_of(model), executor_of(model, graphs=False), runner_of(model)
    for step in short_steps():
        replayed = on.run(step)
        assert torch.equal(replayed, off.run(step))
        assert relative(replayed, plain.run(step)) <= 1e-5
    if not ON_GPU:
        on.run([Segment([1], 0, [39])])
        assert on.capture.num_launches == 5 + 11  # one more launch merges the splits


def test_an_unknown_scheme_has_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_executor, "is_capturable", lambda model: False)
    on = executor_of(random_model(SMALL))
    assert on.capture is None
    assert on.run([Segment(PROMPT, 0, TABLE)]).isfinite().all()


def test_cuda_warms_up_and_captures_on_one_side_stream_with_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the calls to `torch.cuda` with mocks. Whether CUDA then does what it should, only a GPU can show."""
    calls: list[tuple] = []

    class Stream:
        def __init__(self, *device: object) -> None:
            self.name = "side" if device else "current"

        def wait_stream(self, other: Stream) -> None:
            calls.append((self.name, "waits for", other.name))

    class Graph:
        def replay(self) -> None:
            calls.append(("replay",))

    @contextmanager
    def entered(*what: object) -> Iterator[None]:
        calls.append(("enter", *what))
        yield
        calls.append(("leave",))

    pools = iter(range(9))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered(stream.name))
    monkeypatch.setattr(
        torch.cuda,
        "graph",
        lambda graph, pool, stream, capture_error_mode: entered("graph", pool, stream.name, capture_error_mode),
    )
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: calls.append(("back to", stream.name)))
    capture = CudaCapture(torch.device("cuda"))
    replay = capture(lambda: calls.append(("run",)))
    capture(lambda: None)
    replay()
    assert calls[:10] == [
        ("side", "waits for", "current"),
        *(("enter", "side"), ("run",), ("run",), ("leave",)),
        ("current", "waits for", "side"),
        *(("enter", "graph", 0, "side", "thread_local"), ("run",), ("leave",)),
        ("back to", "current"),
    ]
    assert [t for t in calls if "graph" in t] == [("enter", "graph", 0, "side", "thread_local")] * 2
    assert calls[-1] == ("replay",)

    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(cuda_graphs.CaptureError, match="operation not permitted"):
        capture(fails)
    assert calls[-1] == ("back to", "current")

    @contextmanager
    def ends_with_an_error(*given: object, **options: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def fails_when_captured(problem: BaseException) -> Callable[[], None]:
        runs = []

        def function() -> None:
            runs.append(1)
            if len(runs) > cuda_graphs.WARM_UPS:
                raise problem

        return function

    monkeypatch.setattr(torch.cuda, "graph", ends_with_an_error)
    with pytest.raises(cuda_graphs.CaptureError, match="item waits for the device"):
        capture(fails_when_captured(RuntimeError("item waits for the device")))
    assert calls[-1] == ("back to", "current")
    with pytest.raises(KeyboardInterrupt):
        capture(fails_when_captured(KeyboardInterrupt()))
    assert calls[-1] == ("back to", "current")


# Tests of the recorder: bugs that a CUDA graph would turn into crashes or stale results.


def branches_on_a_length(on: GpuExecutor, inputs: StepInputs) -> None:
    if inputs.seq_lens[0].item() > 3:
        on.hidden.zero_()


def asks_for_truth(on: GpuExecutor, inputs: StepInputs) -> None:
    if (inputs.slots < 0).all():
        on.hidden.zero_()


def lists_a_tensor(on: GpuExecutor, inputs: StepInputs) -> None:
    on.hidden[: len(inputs.slots.tolist())].zero_()


def selects_by_booleans(on: GpuExecutor, inputs: StepInputs) -> None:
    on.hidden[: inputs.shape.tokens][inputs.slots >= 0] = 0


def finds_indices(on: GpuExecutor, inputs: StepInputs) -> None:
    on.hidden.index_fill_(0, (inputs.slots >= 0).nonzero().squeeze(1), 0)


def brings_a_list(on: GpuExecutor, inputs: StepInputs) -> None:
    on.hidden[: inputs.shape.requests].add_(torch.tensor([[1.0]] * inputs.shape.requests))


def brings_an_array(on: GpuExecutor, inputs: StepInputs) -> None:
    on.hidden[:1].add_(torch.from_numpy(np.ones(1, np.float32)))


@pytest.mark.skipif(ON_GPU, reason="the recorder stands in for a GPU")
@pytest.mark.parametrize(
    "bug",
    [
        branches_on_a_length,
        asks_for_truth,
        lists_a_tensor,
        selects_by_booleans,
        finds_indices,
        brings_a_list,
        brings_an_array,
    ],
    ids=lambda bug: bug.__name__,
)
def test_the_recorder_refuses_what_a_capture_must_not_do(
    bug: Callable[[GpuExecutor, StepInputs], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = executor_of(random_model(SMALL))
    run_into = GpuExecutor._run_into

    def with_bug(self: GpuExecutor, output: torch.Tensor, inputs: StepInputs) -> None:
        run_into(self, output, inputs)
        bug(self, inputs)

    monkeypatch.setattr(GpuExecutor, "_run_into", with_bug)
    with pytest.raises(CaptureError, match=r"waits for the device|from the host"):
        on.run([Segment(PROMPT, 0, TABLE)])
