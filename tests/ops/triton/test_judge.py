"""Verdicts of the kernels against those of the judge on the host."""

from __future__ import annotations

import random

import pytest
import torch

from minillm.engine.judge import DeviceJudge, HostJudge, judge
from minillm.request import Request
from minillm.runtime.gpu_executor import GpuExecutor
from minillm.sampling.device import DeviceSampler
from tests.conftest import TinyPair
from tests.engine.test_device_judge import WISHES, elsewhere, engine, judge_on_device, on_device, random_round, texts
from tests.no_waiting import NoWaiting
from tests.ops.triton.steps import WHERE

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("kinds", ["n", "d", "s"])
@pytest.mark.parametrize("wishes", ["greedy", "sampled", "all side by side"])
def test_verdicts_of_the_kernels_are_the_same(wishes: str, kinds: str) -> None:
    """A token would differ if a uniform were within 10^-7 of a border: in these draws one time in 10^5, with these
    fixed seeds never."""
    rng, device_judge = random.Random(0), DeviceJudge(WHERE, "triton")
    torch.manual_seed(0)
    for _ in range(3):
        requests, drafts, logits = random_round(rng, WISHES[wishes], kinds)
        decided, crossed = judge_on_device(requests, elsewhere(drafts, WHERE), logits.to(WHERE), device_judge)
        assert decided == judge(requests, drafts, logits)
        assert crossed["read"] == 1


def test_the_engine_says_the_same_when_kernels_judge(tiny: TinyPair) -> None:
    options = {"device": WHERE.type, "dtype": "float32"}
    fewer = {"max_tokens": 3, "min_tokens": 2}
    plain = engine(tiny, "probabilistic", **options)
    plain.engine.judge, plain.engine.drafter.sampler = HostJudge(), None
    expected = texts(plain, "all side by side", **fewer)
    llm = engine(tiny, "probabilistic", **options)
    crossings = on_device(llm, "triton")
    assert texts(llm, "all side by side", **fewer) == expected
    assert all(crossed["read"] == 1 for crossed in crossings)


@pytest.mark.skipif(WHERE.type == "cuda", reason="on a CPU nothing waits; there it is asked what would")
@pytest.mark.parametrize("drafts", [None, "probabilistic"])
def test_a_whole_step_waits_once_and_once_for_each_drawn_draft(tiny: TinyPair, drafts: str | None) -> None:
    """The step runs from the schedule to the commit, with the kernels of the model, the draft model and the judge. Only
    the executor sends inputs. Sampled drafts are read one by one, because the host prepares the next forward."""
    fewer = {"max_tokens": 4, "min_tokens": 2}
    options = {"enforce_eager": True, "max_num_seqs": 4, "num_kv_blocks": 40, "dtype": "float32"}
    expected = texts(engine(tiny, drafts, **options), "sampled and bent", **fewer)
    llm = engine(tiny, drafts, **options)
    loop, steps = llm.engine, []
    for runner in (loop.runner, *([loop.drafter.runner] if drafts else [])):
        runner.executor = GpuExecutor(runner.model, runner.cache, 4, 4, 64, use_graphs=False)
    loop.judge = DeviceJudge("cpu", "triton")
    if drafts:
        loop.drafter.sampler = DeviceSampler("cpu", "triton")
    real = loop._step

    def watched() -> list[Request]:
        with NoWaiting(GpuExecutor._send) as crossed:
            advanced = real()
        steps.append(crossed)
        return advanced

    loop._step = watched
    assert texts(llm, "sampled and bent", **fewer) == expected
    assert len(steps) > 1
    most = 1 + 2 * bool(drafts)  # after the first token, two drafts and one more token fit
    assert {crossed["read"] for crossed in steps} <= set(range(1, most + 1))
    assert max(crossed["read"] for crossed in steps) == most
    assert all(crossed["send"] == crossed["read"] for crossed in steps)
    assert all(set(crossed) <= {"send", "read", "_send", "kernel"} for crossed in steps)
