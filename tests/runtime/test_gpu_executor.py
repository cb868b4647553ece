"""The GPU executor in Triton's interpreter: what it prepares, what it refuses, and the engine on top of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.ops.triton.conftest import interpreter  # noqa: F401  (first, because it imports Triton in interpreter mode)

# isort: split
from triton.errors import TritonError

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.cache.base import KVCache
from minillm.cache.contiguous import ContiguousKVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.errors import NonFiniteLogitsError
from minillm.runtime import gpu_executor
from minillm.runtime.cuda_graphs import CaptureError
from minillm.runtime.gpu_executor import GpuExecutor, padded_size, unsupported_reason
from minillm.runtime.step_inputs import Shape, StepInputs
from tests.conftest import TinyPair
from tests.no_waiting import NoWaiting, Waits
from tests.runtime.gpu_cases import (
    BLOCK_SIZE,
    OTHER,
    OTHERS_TABLE,
    PLAIN,
    PROMPT,
    SMALL,
    TABLE,
    WHERE,
    empty_cache,
    random_model,
    relative,
    runner_of,
    steps,
)
from tests.runtime.gpu_executors import ON_GPU, executor_of
from tests.runtime.software_graph import SoftwareGraphs


def test_a_step_too_large_for_a_graph_runs_in_its_exact_size() -> None:
    model = random_model(SMALL)
    on, plain = executor_of(model, max_num_seqs=1), runner_of(model)
    long = [Segment([*PROMPT, *OTHER, *PROMPT], 0, TABLE, 3)]
    many = [Segment([7], 12, TABLE), Segment(OTHER, 0, OTHERS_TABLE, 0)]
    for step in (long, many):
        assert on.shape_of(step) is None
        assert relative(on.run(step), plain.run(step)) <= 1e-5
    segments = [Segment([7, 8], 13, TABLE), Segment([7], 6, OTHERS_TABLE)]
    assert on.draft(segments, 3) == plain.draft(segments, 3)
    assert not on.prepared
    assert on.shape_of([Segment([1], 62, TABLE)], 2) is None  # it would end beyond max_model_len


def test_one_request_with_fifteen_drafts_has_a_graph() -> None:
    on = executor_of(random_model(SMALL), max_num_seqs=1)
    assert on.shape_of([Segment(list(range(16)), 4, TABLE, 16)]) == Shape(16, 1, 64, BLOCK_SIZE)


def test_what_fills_a_step_up_is_stored_nowhere() -> None:
    on, plain = executor_of(random_model(SMALL)), runner_of(random_model(SMALL))
    step = [Segment([1, 2, 3], 0, TABLE), Segment([4], 0, [39]), Segment([5], 0, [20])]
    assert on.shape_of(step) == Shape(8, 4, 64, BLOCK_SIZE)
    on.run(step), on.draft(step, 3)
    plain.run(step), plain.draft(step, 3)
    for layer, keys in zip(on.weights.layers, plain.cache.keys, strict=True):
        assert torch.equal(layer.keys.isnan(), keys.isnan())


def test_no_rows_wanted_gives_no_logits_and_what_a_run_returned_stays() -> None:
    on = executor_of(random_model(SMALL))
    assert on.run([Segment(PROMPT, 0, TABLE, 0)]).shape == (0, 97)
    first = on.run([Segment([1], 6, TABLE)])
    kept = first.clone()
    on.run([Segment([2], 7, TABLE)])
    assert torch.equal(first, kept)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_guess_from_no_numbers_is_an_error_and_the_next_drafting_is_whole(graphs: bool) -> None:
    model = random_model(SMALL)
    on = executor_of(model, graphs)
    segments = [Segment(PROMPT, 0, TABLE), Segment(OTHER, 0, OTHERS_TABLE)]
    right = on.draft(segments, 2)
    weight = model.layers[0].mlp.down_proj.weight
    before = weight[5, 3].item()
    weight[5, 3] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match="draft model gave NaN"):
        on.draft(segments, 2)
    weight[5, 3] = before
    assert on.draft(segments, 2) == right


def test_drafting_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    on, reads = executor_of(random_model(SMALL)), []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: [reads.append(x.shape), tolist(x)][1])
    on.draft([Segment(PROMPT, 0, TABLE)], 4)
    assert reads == [(4, 1)]


@pytest.mark.skipif(ON_GPU, reason="on a CPU nothing waits; there it is asked what would")
def test_a_step_waits_for_nothing_with_and_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs are sent before, because `_send` runs on the host and may wait."""
    off = executor_of(random_model(SMALL), graphs=False)
    for step in ([Segment(PROMPT, 0, TABLE, 2)], [Segment(PROMPT * 3, 0, TABLE, 0), Segment([1], 0, [9])]):
        shape = off.shape_of(step)
        sent = off._send(step, shape or off._exact(step))
        drafted = torch.zeros(2, sent.shape.requests, dtype=torch.int64)
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(GpuExecutor, "_send", lambda *args, sent=sent: sent)
            off.memory[: sent.shape.size] = sent.flat
            with NoWaiting():
                off.run(step)
                off._draft_into(drafted, sent, off._batch(sent, step if shape is None else None))
    with pytest.raises(Waits), NoWaiting():
        off.draft([Segment([5], 6, TABLE)], 1)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_block_table_may_leave_out_blocks(graphs: bool) -> None:
    """Run, drafted from, and with the queries of two tokens."""
    model = random_model(SMALL)
    on, plain = executor_of(model, graphs), runner_of(model)
    prompt = list(range(2 * BLOCK_SIZE + 1))
    for one in (on, plain):
        one.run([Segment(prompt, 0, TABLE)])
    view = Segment([7, 8], BLOCK_SIZE + 1, [TABLE[0], *TABLE[2:]], num_skipped=BLOCK_SIZE)
    step = [Segment(OTHER[:3], 0, OTHERS_TABLE), view]
    right, hidden, queries = plain.run_observed(step, [1, 4])
    logits, got_hidden, got = on.run_observed(step, [1, 4])
    assert relative(on.run(step), right) <= 1e-5 and relative(logits, right) <= 1e-5
    assert got.shape == queries.shape and relative(got, queries) <= 1e-5
    for seen in (got_hidden, on.run_observed(step, ()).hidden):
        assert seen.shape == hidden.shape and relative(seen, hidden) <= 1e-5
    assert on.draft(step, 3) == plain.draft(step, 3)
    assert relative(plain.run([replace(view, num_skipped=0)]), right[1:]) > 1e-3


def test_step_inputs_say_what_a_batch_says() -> None:
    runner = runner_of(random_model(SMALL))
    view = Segment([1, 2], 9, TABLE, num_skipped=2 * BLOCK_SIZE)
    for step in (*steps(), [Segment([5], 3, OTHERS_TABLE), view]):
        batch, shape = runner.batch(step), Shape(16, 4, 64, BLOCK_SIZE)
        inputs = StepInputs.over(torch.zeros(shape.size, dtype=torch.int32), shape)
        inputs.fill(step)
        tokens, count = batch.query_start[-1], len(step)
        assert inputs.token_ids.tolist() == batch.token_ids.tolist() + [0] * (16 - tokens)
        assert inputs.positions.tolist() == batch.positions.tolist() + [0] * (16 - tokens)
        assert inputs.slots.tolist() == batch.slot_mapping.tolist() + [-1] * (16 - tokens)
        assert inputs.query_start.tolist() == batch.query_start + [tokens] * (4 - count)
        assert inputs.seq_lens.tolist() == batch.seq_lens + [0] * (4 - count)
        assert inputs.draft_query_start.tolist() == [*range(count + 1), *[count] * (4 - count)]
        for row, segment in zip(inputs.block_tables.tolist(), step, strict=False):
            assert row[: len(segment.block_table)] == segment.block_table
        ends = zip(step, batch.query_start[1:], strict=True)
        wanted = [row for s, end in ends for row in range(end - s.num_logits, end)]
        assert inputs.logit_rows.tolist()[: len(wanted)] == wanted


def test_fields_begin_where_wide_loads_may_and_end_before_the_next() -> None:
    for shape in (Shape(1, 1, 1, 1), Shape(24, 32, 100, 16), Shape(3, 5, 7, 2)):
        flat = torch.zeros(shape.size, dtype=torch.int32)
        inputs = StepInputs.over(flat, shape)
        for i, name in enumerate(shape.fields, start=1):
            field = getattr(inputs, name)
            assert field.storage_offset() * 4 % 16 == 0
            field += i
        assert all((getattr(inputs, name) == i).all() for i, name in enumerate(shape.fields, start=1))


def test_sizes_grow_and_waste_little() -> None:
    sizes = sorted({padded_size(n) for n in range(1, 513)})
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert len(sizes) == 23
    assert all(padded_size(size) == size for size in sizes)
    assert all(n <= padded_size(n) < n + max(8, n / 4) for n in range(1, 513))
    assert all(a < b for a, b in pairwise(sizes))


def test_what_cannot_be_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(layout: type[KVCache] = PagedKVCache, dtype: torch.dtype = torch.float32, **options: int) -> str | None:
        model = random_model(PLAIN).to(dtype)
        return unsupported_reason(model, layout(model.config, 8, BLOCK_SIZE, dtype, WHERE, **options))

    assert reason() is None
    assert reason(PagedInt4KVCache) is None
    assert "ContiguousKVCache" in reason(ContiguousKVCache)
    assert "float64" in reason(dtype=torch.float64)
    assert "groups of 1" in reason(PagedInt4KVCache, group_size=1)
    model = random_model(SMALL)
    cache = empty_cache(model)
    cache.ops = {**cache.ops, "paged_attention": print}
    assert "replaced" in unsupported_reason(model, cache)
    monkeypatch.setattr("minillm.ops.dispatch.triton_runs", lambda kind, oldest: False)
    assert "Turing" in reason()


def behind(cause: Exception, problem: Exception) -> Exception:
    """Return an error with its cause."""
    problem.__cause__ = cause
    return problem


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            RuntimeError("Failed to find C compiler\n\ninstall one\n"),
            "RuntimeError: Failed to find C compiler … install one",
        ),
        (TritonError("at 3:4:\n    x = y\n        ^\nno such name"), "TritonError: at 3:4: … no such name"),
        (
            behind(TritonError("at 3:4:\nno such name"), TritonError("at 9:9:\n^")),
            "TritonError: at 3:4: … no such name",
        ),
        (OSError("a driver that is too old"), "OSError: a driver that is too old"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_kernels_that_do_not_compile_are_told(problem: Exception, reason: str) -> None:
    on = executor_of(random_model(SMALL))
    assert on.warm_up() is None

    def broken(*args: object) -> None:
        raise problem

    object.__setattr__(on.ops, "rope", broken)
    assert on.warm_up() == f"the kernels do not run here ({reason})"


def test_a_runner_on_a_gpu_gets_the_executor_or_the_reason_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(gpu_executor, "CudaCapture", lambda device: SoftwareGraphs())
    runner = runner_of(random_model(SMALL))
    runner.device = torch.device("cuda")
    assert runner.use_executor(2, 32) is None
    assert isinstance(runner.executor, GpuExecutor)
    assert (runner.executor.max_num_seqs, runner.executor.max_model_len) == (2, 32)
    assert (
        relative(
            runner.run([Segment(PROMPT, 0, TABLE)]), runner_of(random_model(SMALL)).run([Segment(PROMPT, 0, TABLE)])
        )
        <= 1e-5
    )

    for broken, reason in (("unsupported_reason", "no such cache"), ("GpuExecutor.warm_up", "no compiler")):
        runner.executor = None
        with monkeypatch.context() as patch:
            patch.setattr(f"minillm.runtime.gpu_executor.{broken}", lambda *args, reason=reason: reason)
            assert runner.use_executor() == reason
        assert runner.executor is None
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton cannot be imported" in runner.use_executor()


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_engine_says_the_same_through_the_executor(tiny: TinyPair, drafts: int) -> None:
    speculative = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": drafts}
    options = {"block_size": 4, "dtype": "float32", "enforce_eager": True, "max_num_seqs": 2, "num_kv_blocks": 16}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    said = []
    for fast in (False, True):
        llm = LLM(str(tiny.target), speculative_config=speculative if drafts else None, **options)
        runners = [llm.engine.runner, *([llm.engine.drafter.runner] if drafts else [])]
        for runner in runners if fast else []:
            capture = None if ON_GPU else SoftwareGraphs()
            runner.executor = GpuExecutor(runner.model, runner.cache, 4, 2, 64, capture=capture)
        said.append([out.outputs[0].token_ids for out in llm.generate(["for", "def"], params, use_tqdm=False)])
        assert all(runner.executor.prepared for runner in runners) if fast else True
    assert said[0] == said[1]


def test_steps_go_on_without_graphs_if_one_cannot_be_recorded() -> None:
    on, plain = executor_of(random_model(SMALL)), runner_of(random_model(SMALL))

    def fails(function: object) -> None:
        raise CaptureError("operation not permitted when stream is capturing")

    on.capture = fails
    segments = [Segment(PROMPT, 0, TABLE)]
    with pytest.warns(RuntimeWarning, match="without CUDA graphs from now on: operation not permitted"):
        assert relative(on.run(segments), plain.run(segments)) <= 1e-5
    assert on.capture is None and on.draft(segments, 2) == plain.draft(segments, 2)


def test_there_are_no_more_graphs_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_executor, "MAX_GRAPHS", 1)
    on, plain = executor_of(random_model(SMALL)), runner_of(random_model(SMALL))
    for step in ([Segment(PROMPT, 0, TABLE)], [Segment([1], 6, TABLE)], [Segment([2], 7, TABLE)]):
        assert relative(on.run(step), plain.run(step)) <= 1e-5
    assert len(on.prepared) == 1
