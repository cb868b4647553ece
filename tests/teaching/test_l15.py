"""Lesson 15: no time of a completion is lost, floors are the roofline's, and a learner's kernel cannot do harm."""

from __future__ import annotations

import itertools
from types import FunctionType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch.nn import functional as F

from minillm import LLM, SamplingParams
from minillm.errors import LessonError
from minillm.ops.cpu.simd import LANES, fma, load, splat, store
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l15_under_100_ms import (
    PARTS,
    attribute,
    choose_gamma,
    panel_product,
    product_with,
    step_seconds,
)
from minillm.teaching.latency import decode_step, operations_called, race, record_marks, with_panel_products
from minillm.teaching.registry import find
from minillm.teaching.result import Status
from minillm.viz.charts.roofline import Roof
from minillm.viz.timeline.latency_waterfall import COLOURS

NAMES = ["RequestAdded", "StepStarted", "StepRan prefill", "StepRan verify", "DraftProposed", "Detokenised", "Other"]
PRODUCT = find("l15.panel_product")
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(NAMES)), max_size=30))
def test_parts_always_sum_to_the_whole(taken: list[tuple[float, str]]):
    ends = list(itertools.accumulate(seconds for seconds, _ in taken))
    parts = attribute([(0.0, "Start"), *((end, name) for end, (_, name) in zip(ends, taken, strict=True))])
    assert sum(parts.values()) == pytest.approx(ends[-1] if ends else 0.0, abs=1e-9)


def test_a_run_may_begin_with_any_mark():
    """The lesson cuts the marks of a run."""

    def from_start(marks):
        return attribute(marks[[name for _, name in marks].index("Start") :])

    assert not check_function("l15.attribute", from_start).passed


def test_parts_are_those_that_the_picture_draws_in_the_same_order():
    assert tuple(COLOURS) == PARTS


def counting_clock():
    """A clock that goes on by one at each look, so that times can be counted."""
    return itertools.count().__next__


@pytest.fixture
def engine(tiny) -> LLM:
    return LLM(
        str(tiny.target), num_kv_blocks=32, block_size=4, max_num_batched_tokens=16, max_num_seqs=4, enforce_eager=True
    )


def test_recorded_completion_is_that_of_generate_and_nothing_is_lost(engine: LLM):
    prompt = engine.engine.tokenizer.decode(list(range(20, 60)))
    [expected] = engine.generate(prompt, PARAMS, use_tqdm=False)
    engine.reset_prefix_cache()
    marks, output = record_marks(engine, prompt, PARAMS, counting_clock())
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.outputs[0].text == expected.outputs[0].text
    assert [at for at, _ in marks] == list(range(len(marks)))
    names = [name for _, name in marks]
    assert (names[0], names[1], names[-1]) == ("Start", "RequestAdded", "End")
    chunks = -(-len(output.prompt_token_ids) // 16)
    assert names.count("StepRan prefill") == chunks and names.count("StepRan decode") == 8
    assert names.count("Detokenised") == names.count("Committing") == 10  # nine tokens, and what was held back
    assert sum(attribute(marks).values()) == len(marks) - 1


def test_drafting_and_verifying_have_marks_of_their_own(tiny):
    drafts = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 2}
    llm = LLM(str(tiny.target), num_kv_blocks=32, block_size=4, enforce_eager=True, speculative_config=drafts)
    marks, _ = record_marks(llm, llm.engine.tokenizer.decode([30, 31, 32]), PARAMS, counting_clock())
    parts = attribute(marks)
    assert parts["draft"] > 0 and parts["target"] > 0 and parts["prefill"] > 0
    assert "StepRan verify" in [name for _, name in marks]


def test_nobody_listens_any_more_when_it_is_over(engine: LLM):
    before = list(engine.engine.listeners)
    record_marks(engine, "a", PARAMS)
    assert list(engine.engine.listeners) == before
    with pytest.raises(ValueError):
        record_marks(engine, "", PARAMS)
    assert list(engine.engine.listeners) == before


def clock_that_is_interrupted(place: int):
    """A counting clock at whose look number `place` the stop button is pressed."""
    looks = itertools.count(1)

    def clock() -> int:
        look = next(looks)
        if look == place:
            raise KeyboardInterrupt
        return look

    return clock


def test_an_interrupt_leaves_no_request_in_the_engine(engine: LLM):
    """At every event of the first steps, also where a token becomes text."""
    before = list(engine.engine.listeners)
    for place in range(1, 31):
        with pytest.raises(KeyboardInterrupt):
            record_marks(engine, "a", PARAMS, clock_that_is_interrupted(place))
        assert not engine.llm_engine.has_unfinished_requests()
        assert engine.llm_engine.metrics.requests == {}
        assert list(engine.engine.listeners) == before
        assert engine.reset_prefix_cache()
    marks, _ = record_marks(engine, "a", PARAMS, counting_clock())
    assert len(marks) > 30


def test_completions_that_share_their_steps_are_refused(engine: LLM):
    with pytest.raises(LessonError, match="n=2"):
        record_marks(engine, "a", SamplingParams(n=2, max_tokens=2))
    [other] = engine.submit("a", PARAMS)
    with pytest.raises(LessonError, match=rf"other requests \({other.request_id}\).*run or abort them"):
        record_marks(engine, "a", PARAMS)
    engine.engine.abort(other.request_id)
    record_marks(engine, "a", PARAMS)


@given(num_bytes=st.floats(1, 1e9), work=st.floats(1, 1e12), bandwidth=st.floats(1e6, 1e12), rate=st.floats(1e6, 1e15))
def test_without_calls_a_step_takes_what_the_roofline_says(
    num_bytes: float, work: float, bandwidth: float, rate: float
):
    attainable = Roof("m", bandwidth, rate).attainable(work / num_bytes)
    assert step_seconds(num_bytes, work, 0, bandwidth, rate, 1.0) == pytest.approx(work / attainable)


def test_calls_come_on_top():
    alone = step_seconds(60.0, 10.0, 0, 20.0, 10.0, 0.5)
    assert step_seconds(60.0, 10.0, 7, 20.0, 10.0, 0.5) == alone + 3.5


@settings(max_examples=40)
@given(out=st.integers(1, 70), columns=st.integers(1, 40), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_panel_product_is_linear_for_ragged_sizes(out: int, columns: int, rows: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randint(-8, 9, (out, columns), generator=draw).float()
    x = torch.randint(-8, 9, (rows, columns), generator=draw).float()
    assert torch.equal(product_with(panel_product, weight, x), F.linear(x, weight))


def test_a_kernel_that_leaves_its_array_is_told_so():
    def writes_one_too_many(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        for panel in range(len(y) // LANES + 1):
            store(y, panel * LANES, load(x, 0))

    report = str(check_function(PRODUCT, writes_one_too_many))
    assert "wrote 16 numbers outside of y" in report


def _product(body: str) -> FunctionType:
    space = {"fma": fma, "load": load, "splat": splat, "store": store, "LANES": LANES}
    exec(f"def panel_product(panels, x, y):\n    {body}", space)
    return space["panel_product"]


STRAYING = {
    "a panel per output": "for panel in range(y.shape[0]): store(y, panel * LANES, load(panels, panel * LANES))",
    "reads behind x": "store(y, 0, load(x, len(x)))\n    store(y, 0, load(panels, 0))",
    "reads far away": "store(y, 0, load(panels, 10**9))",
    "writes far away": "store(y, 10**9, load(panels, 0))",
}


@pytest.mark.parametrize("body", STRAYING.values(), ids=STRAYING)
def test_a_product_that_leaves_its_arrays_never_passes_and_never_ends_the_process(body: str):
    result = check_function(PRODUCT, _product(body))
    assert result.status is Status.FAILED, str(result)


def test_planted_products_are_not_compiled_and_do_what_compiled_ones_do():
    weight, x = torch.arange(60.0).view(20, 3), torch.tensor([[1.0, -2.0, 3.0]])
    for wrong in PRODUCT.wrong[:4]:
        slow = product_with(wrong.function, weight, x)
        again = FunctionType(wrong.function.__code__, dict(wrong.function.__globals__))
        again.__globals__["__name__"] = "elsewhere"
        torch.testing.assert_close(slow, product_with(njit(again), weight, x))


def test_a_function_that_numba_does_not_understand_is_told_so():
    def prints_a_dictionary(panels: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        y[0] = "sixteen"

    report = str(check_function(PRODUCT, prints_a_dictionary))
    assert "numba cannot compile this" in report and len(report) < 2500


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("store(y, 0, fma(load(panels, 0), x[0], load(panels, 0)))", "splat(number) makes one"),
        ("sums = 0.0\n    for _ in x: sums = fma(sums, sums, load(panels, 0))", "splat(number) makes one"),
        ("store(y, 0, load(panels, 0) * x[0])", "splat(number) makes one"),
        ("v = load(x, 0)\n    store(y, 0, splat(v[0]))", "x[k] reads one number of an array"),
        ("sums = load(panels, 0)\n    sums += sums\n    store(y, 0, sums)", "fma(a, b, sums) is a * b + sums"),
    ],
)
def test_what_numba_says_of_vectors_is_told_in_words(body: str, cause: str):
    report = check_function(PRODUCT, _product(body))
    assert report.counterexample.cause.endswith(cause), str(report)


def test_a_compiled_stub_is_not_done_yet():
    @njit
    def panel_product(panels, x, y):
        raise NotImplementedError("write panel_product here, then run its check")

    assert check_function(PRODUCT, panel_product).status is Status.NOT_DONE


def test_counterexample_of_the_product_can_be_redone_by_hand():
    report = str(check_function(PRODUCT, PRODUCT.wrong[0].function))
    assert "sixteen outputs, three inputs" in report
    assert PRODUCT.wrong[0].description in report


@given(
    acceptance=st.floats(0, 1),
    cost=st.floats(0, 1),
    more=st.lists(st.floats(0, 2), max_size=5),
)
def test_chosen_gamma_beats_every_other_by_counting_rounds(acceptance: float, cost: float, more: list[float]):
    verify = [1.0, *itertools.accumulate(more, initial=1.0)][: len(more) + 1]

    def tokens(gamma: int) -> float:
        """Over all outcomes of a round: its chance times what it gains."""
        ends_at = [acceptance**i * (1 - acceptance) * (i + 1) for i in range(gamma)]
        return sum(ends_at) + acceptance**gamma * (gamma + 1)

    speed = [tokens(g) / (g * cost + v) for g, v in enumerate(verify)]
    assert speed[choose_gamma(acceptance, cost, verify)] == pytest.approx(max(speed))


def test_no_drafts_where_they_cost_as_much_as_a_step():
    assert choose_gamma(0.99, 1.0, [1.0] * 5) == 0


def test_a_race_refuses_parts_that_leave_something_out(engine: LLM):
    prompt = engine.engine.tokenizer.decode(list(range(20, 40)))
    parts = race({"plain": engine, "warm": engine}, prompt, PARAMS, attribute, warm=("warm",), rounds=1)
    assert set(parts) == {"plain", "warm"} and set(parts["plain"]) == set(PARTS)
    with pytest.raises(LessonError, match="the parts leave out"):
        race({"plain": engine}, prompt, PARAMS, lambda marks: {**attribute(marks), "target": 0.0}, rounds=1)
    with pytest.raises(LessonError, match=r"the parts are 1\.0+ s longer than the run"):
        race({"plain": engine}, prompt, PARAMS, lambda m: attribute([(m[0][0] - 1, "Start"), *m[1:]]), rounds=1)


def test_a_race_of_engines_that_have_run_needs_no_run_that_is_not_counted(engine: LLM, monkeypatch):
    """The cold run of an engine is what makes its next run warm."""
    prompt = engine.engine.tokenizer.decode(list(range(20, 40)))
    engine.generate(prompt, PARAMS, use_tqdm=False)
    monkeypatch.setattr(engine, "generate", lambda *_, **__: pytest.fail("one more run"))
    parts = race({"plain": engine, "warm": engine}, prompt, PARAMS, attribute, warm=("warm",), rounds=2)
    assert sum(parts["warm"].values()) > 0


def test_operations_of_a_step_are_counted_by_name(engine: LLM):
    ids = list(range(30, 50))
    one, two = (operations_called(decode_step(engine, ids, width)) for width in (1, 2))
    products = "matmul", "mm", "addmm", "linear"
    assert sum(one[name] for name in products) == sum(two[name] for name in products) > 0


def test_a_model_on_the_learners_product_writes_the_same_tokens(engine: LLM, tiny):
    prompt = engine.engine.tokenizer.decode([30, 31, 32])
    expected = engine.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    own = LLM(str(tiny.target), num_kv_blocks=32, block_size=4, enforce_eager=True)
    layers = with_panel_products(own, engine.engine.runner.model, panel_product)
    assert own.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert layers and all(layer.calls > 0 for layer in layers)
