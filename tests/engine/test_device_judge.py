"""Judging a step with one wait for the device: the verdicts, texts and errors of the judge that looks at everything."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.engine import judge as judge_file
from minillm.engine.judge import DeviceJudge, judge
from minillm.errors import DraftError, NonFiniteLogitsError
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.sampling import device as device_sampling
from minillm.sampling.device import DeviceSampler
from minillm.speculative.drafter import Draft
from tests.conftest import TinyPair
from tests.engine.test_judge import CountCalls
from tests.no_waiting import NoWaiting, Waits

DEVICE_JUDGE = DeviceJudge("cpu", "reference")
PROMPTS = ["def add(a, b):", "for line in", "class", "import os\n\n\ndef walk(root):"]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01}
BENT = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2, "min_tokens": 9}
WISHES = {
    "greedy": [GREEDY],
    "greedy and bent": [GREEDY | BENT],
    "sampled": [SAMPLED],
    "sampled and bent": [SAMPLED | BENT],
    "all side by side": [GREEDY, SAMPLED, GREEDY | BENT, {"temperature": 1.3, "min_tokens": 4}],
}
VOCAB = 40


def random_round(rng: random.Random, wishes: list[dict], kinds: str) -> tuple[list[Request], list[Draft], Tensor]:
    """Requests, their drafts and their logits. `kinds`: s(ampled) and d(eterministic) drafts, n(one)."""
    requests, drafts, rows = [], [], []
    for r in range(rng.randint(1, 5)):
        count, kind = rng.choice([1, 2, 5]), rng.choice(kinds)
        logits = 2 * torch.randn(1 if kind == "n" else count + 1, VOCAB)
        prompt, said = [[rng.randrange(VOCAB) for _ in range(n)] for n in (4, rng.choice([1, 12]))]
        params = SamplingParams(**wishes[r % len(wishes)], max_tokens=90)
        stops = frozenset({int(logits[0].argmax())})
        requests.append(Request(f"r{r}", "", prompt + said, 4, params, 90, rng.getrandbits(70), stop_ids=stops))
        q = torch.softmax(logits[:-1] + torch.randn(len(logits) - 1, VOCAB), -1)
        tokens = q.argmax(-1) if kind == "d" or params.is_greedy else q.multinomial(1).squeeze(1) if len(q) else q
        drafts.append(Draft([int(x) for x in tokens] if len(q) else [], q if kind == "s" else None))
        rows.append(logits)
    return requests, drafts, torch.cat(rows)


def judge_on_device(
    requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor, device_judge: DeviceJudge = DEVICE_JUDGE
) -> tuple[Any, Counter[str]]:
    """The verdicts, and how often they crossed."""
    with NoWaiting() as crossed:
        try:
            decided: Any = device_judge.judge(requests, drafts, logits, logits)
        except judge_file.BrokenRowError as broken:
            decided = broken.row
    return decided, crossed


@pytest.mark.parametrize("kinds", ["n", "d", "s", "nds"])
@pytest.mark.parametrize("wishes", WISHES)
def test_verdicts_are_the_same_for_one_copy_and_one_read(wishes: str, kinds: str) -> None:
    """A token differs if a uniform falls within 10^-7 of a border: in these 400 draws one time in 10^4; with fixed
    seeds, never."""
    rng, seen = random.Random(0), set()
    torch.manual_seed(0)
    for _ in range(25):
        requests, drafts, logits = random_round(rng, WISHES[wishes], kinds)
        decided, crossed = judge_on_device(requests, drafts, logits)
        assert decided == judge(requests, drafts, logits)
        assert crossed["read"] == 1
        assert crossed["send"] <= 1
        seen |= {verdict.num_accepted for verdict in decided}
    assert ({0} if kinds == "n" else {0, 1, 2}) <= seen
    if wishes == "greedy" and "s" not in kinds:
        assert "send" not in crossed


def test_a_greedy_step_asks_little_of_pytorch() -> None:
    """The two operations are one kernel each where there are kernels. Besides them three sizes are asked for, and both
    results turned into integers, put together and read."""
    requests, drafts, logits = random_round(random.Random(0), WISHES["greedy"], "d")
    device_judge = DeviceJudge("cpu", "reference")
    found = device_judge.sampler.argmax(logits), device_judge.all_finite(logits)
    device_judge.sampler.argmax, device_judge.all_finite = lambda x: found[0], lambda x: found[1]
    with CountCalls() as calls:
        device_judge.judge(requests, drafts, logits, logits)
    assert 0 < calls.count <= 7


META = torch.device("meta")
"""A device whose tensors have shapes and no numbers: whoever looks at one, or mixes it with the host's, is told so."""


def elsewhere(drafts: Sequence[Draft], device: torch.device) -> list[Draft]:
    return [replace(d, probs=None if d.probs is None else d.probs.to(device)) for d in drafts]


def pretend_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones for every result, which must lie on the device: all is well, token 1, one draft accepted."""

    def ones(*results: Tensor) -> list[list[int]]:
        assert {result.device for result in results} == {META}
        return [[1] * len(result) for result in results]

    for file in (judge_file, device_sampling):
        monkeypatch.setattr(file, "copy_to_host", ones)


@pytest.mark.parametrize("kinds", ["n", "nds"])
@pytest.mark.parametrize("wishes", WISHES)
def test_nothing_is_forgotten_on_the_host(wishes: str, kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_read(monkeypatch)
    device_judge, rng = DeviceJudge(META), random.Random(0)
    for _ in range(5):
        requests, drafts, logits = random_round(rng, WISHES[wishes], kinds)
        decided, _ = judge_on_device(requests, elsewhere(drafts, META), logits.to(META), device_judge)
        assert [verdict.token_ids[-1] for verdict in decided] == [1] * len(requests)
        rows, of_next = [request.sampling_row() for request in requests], logits[: len(requests)].to(META)
        with NoWaiting():
            tokens, probs = device_judge.sampler.draw(of_next, rows, np.zeros(len(rows)))
        assert (tokens, probs.device) == ([1] * len(rows), META)


def test_a_tensor_forgotten_on_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_read(monkeypatch)
    device_judge, real = DeviceJudge(META), DEVICE_JUDGE.rejection
    requests, drafts, logits = random_round(random.Random(1), WISHES["sampled"], "s")
    args = requests, elsewhere(drafts, META), logits.to(META)
    device_judge.rejection = lambda *columns: real(*columns[:-1], columns[-1][torch.arange(len(columns[-1]))])
    with pytest.raises(Waits, match="two devices"):
        judge_on_device(*args, device_judge)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("wishes", ["greedy", "all side by side"])
def test_the_first_broken_row_is_found_among_those_of_prompts_too(wishes: str, bad: float) -> None:
    requests, drafts, logits = random_round(random.Random(3), WISHES[wishes], "nds")
    everything = torch.cat([torch.randn(3, VOCAB), logits])
    assert len(DEVICE_JUDGE.judge(requests, drafts, logits, everything)) == len(requests)
    everything[2, 5] = everything[-1, 7] = bad
    for judge_of_step in (DEVICE_JUDGE, judge_file.HostJudge()):
        with pytest.raises(judge_file.BrokenRowError) as broken:
            judge_of_step.judge(requests, drafts, everything[3:], everything)
        assert broken.value.row == 2
    assert judge_file.first_broken_row(everything) == 2


def test_rows_of_prompts_alone_are_read_and_no_rows_at_all_are_not() -> None:
    with NoWaiting() as crossed:
        verdicts = DEVICE_JUDGE.judge([], [], torch.empty(0, VOCAB), torch.ones(2, VOCAB))
    assert (verdicts, dict(crossed)) == ([], {"read": 1})
    with NoWaiting() as crossed:
        verdicts = DEVICE_JUDGE.judge([], [], torch.empty(0, VOCAB), torch.empty(0, VOCAB))
    assert (verdicts, dict(crossed)) == ([], {})


def request(**params: Any) -> Request:
    return Request("a", "", [1, 2, 3], 2, SamplingParams(**params), 9, 5, stop_ids=frozenset(range(VOCAB)))


IMPOSSIBLE = torch.eye(VOCAB)[:1]
"""A proposal that can only have been token 0."""


@pytest.mark.parametrize(
    ("asked", "draft", "error"),
    [
        (request(), Draft([3], IMPOSSIBLE), DraftError),
        (request(), Draft([VOCAB]), DraftError),
        (request(), Draft([3, 4], IMPOSSIBLE), DraftError),
        (request(min_tokens=5), Draft([]), NonFiniteLogitsError),
        (request(min_tokens=5, temperature=0), Draft([]), NonFiniteLogitsError),
        (request(min_tokens=5), Draft([3], IMPOSSIBLE[:, [1, 2, 3, 0, *range(4, VOCAB)]]), NonFiniteLogitsError),
    ],
)
def test_what_cannot_be_judged_is_refused_in_the_same_words(asked: Request, draft: Draft, error: type) -> None:
    logits = torch.randn(len(draft.token_ids) + 1, VOCAB)
    with pytest.raises(error) as expected:
        judge([asked], [draft], logits)
    with pytest.raises(error) as found:
        DEVICE_JUDGE.judge([asked], [draft], logits, logits)
    assert str(found.value) == str(expected.value)


# --- in the engine ---------------------------------------------------------------------------------------------------


def on_device(llm: LLM, implementation: str = "reference") -> list[Counter[str]]:
    """Have the engine judge and draw as on a device, and forbid it to wait; what crossed, per step and per draw."""
    engine, crossings = llm.engine, []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with NoWaiting() as crossed:
                result = function(*args)
            crossings.append(crossed)
            return result

        return run

    device = engine.runner.device
    engine.judge = DeviceJudge(device, implementation)
    engine._judge = watched(engine._judge)
    if engine.drafter is not None:
        engine.drafter.sampler = DeviceSampler(device, implementation)
        engine.drafter._draw = watched(engine.drafter._draw)
    return crossings


def engine(tiny: TinyPair, drafts: str | None, **options: Any) -> LLM:
    config = {"model": str(tiny.draft), "num_speculative_tokens": 4, "draft_sample_method": drafts}
    options = {"device": "cpu", "block_size": 4} | options
    return LLM(str(tiny.target), speculative_config=config if drafts else None, **options)


def texts(llm: LLM, wishes: str, **more: Any) -> list[Any]:
    more = {"seed": 7, "max_tokens": 16} | more
    params = [SamplingParams(**(w | more)) for w in (WISHES[wishes] * 4)[: len(PROMPTS)]]
    return [
        (out.prompt_logprobs, out.outputs[0].token_ids, out.outputs[0].logprobs)
        for out in llm.generate(PROMPTS, params, use_tqdm=False)
    ]


@pytest.mark.parametrize("drafts", [None, "greedy", "probabilistic"])
@pytest.mark.parametrize("wishes", WISHES)
def test_the_engine_says_the_same_and_waits_once_a_step(tiny: TinyPair, wishes: str, drafts: str | None) -> None:
    expected = texts(engine(tiny, drafts), wishes)
    llm = engine(tiny, drafts)
    crossings = on_device(llm)
    assert texts(llm, wishes) == expected
    assert len(crossings) >= llm.engine.num_steps > 4
    assert all(crossed["read"] == 1 and crossed["send"] <= 1 for crossed in crossings)
    if wishes == "greedy":
        assert len(crossings) == llm.engine.num_steps
        assert not any(crossed["send"] for crossed in crossings)


def test_a_step_that_only_prefills_is_not_waited_for(tiny: TinyPair) -> None:
    llm = engine(tiny, None, max_num_batched_tokens=5, max_num_seqs=4)
    expected = texts(engine(tiny, None), "sampled")
    crossings = on_device(llm)
    assert texts(llm, "sampled") == expected
    assert {crossed["read"] for crossed in crossings} == {0, 1}


def test_logprobs_are_the_same(tiny: TinyPair) -> None:
    """They are read when the step has been judged, by those who asked for them."""
    expected = texts(engine(tiny, "probabilistic"), "all side by side", logprobs=2, prompt_logprobs=1)
    llm = engine(tiny, "probabilistic")
    llm.engine.judge = DEVICE_JUDGE
    assert texts(llm, "all side by side", logprobs=2, prompt_logprobs=1) == expected
    assert expected[0][0][1] and expected[0][2]


@pytest.mark.parametrize("drafts", [None, "greedy", "probabilistic"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf], ids=str)
def test_one_broken_logit_names_its_request_and_costs_nobody_else(
    tiny: TinyPair, drafts: str | None, bad: float
) -> None:
    expected = [tokens for _, tokens, _ in texts(engine(tiny, drafts), "all side by side")]
    llm = engine(tiny, drafts)
    on_device(llm)
    run, calls = llm.engine.runner.run, []

    def break_one(segments: Sequence[Any]) -> Tensor:
        calls.append(len(segments))
        logits = run(segments).clone()
        if len(calls) == 3:
            logits[-1, 17] = bad
        return logits

    llm.engine.runner.run = break_one
    params = [SamplingParams(**w, seed=7, max_tokens=16) for w in WISHES["all side by side"]]
    requests = llm.submit(PROMPTS, params)
    with pytest.raises(NonFiniteLogitsError, match=f"NaN or infinite logits for request {requests[-1].request_id} "):
        while llm.engine.has_requests:
            llm.engine.step()
    while llm.engine.has_requests:
        llm.engine.step()
    assert [request.output_token_ids for request in requests] == expected


@pytest.mark.parametrize("judged_on_device", [False, True])
def test_a_broken_logit_of_a_prompt_names_its_request(tiny: TinyPair, judged_on_device: bool) -> None:
    llm = engine(tiny, None)
    if judged_on_device:
        llm.engine.judge = DEVICE_JUDGE
    run = llm.engine.runner.run

    def break_a_prompt(segments: Sequence[Any]) -> Tensor:
        logits = run(segments).clone()
        logits[segments[0].num_logits + 2, 5] = math.nan
        return logits

    llm.engine.runner.run = break_a_prompt
    requests = llm.submit(PROMPTS[:2], SamplingParams(prompt_logprobs=1))
    with pytest.raises(NonFiniteLogitsError, match=f"NaN or infinite logits for request {requests[1].request_id} "):
        llm.engine.step()


def test_a_cpu_looks_at_numbers_and_only_another_device_judges_otherwise(tiny: TinyPair) -> None:
    llm = engine(tiny, "probabilistic")
    assert isinstance(llm.engine.judge, judge_file.HostJudge)
    assert llm.engine.drafter.sampler is None
    crossings = on_device(llm)
    llm.engine.judge = judge_file.HostJudge()
    with pytest.raises(Waits, match="numpy"):
        texts(llm, "greedy")
    assert not crossings


@pytest.mark.parametrize(
    ("device", "executor", "asked"), [("cpu", None, []), ("meta", None, ["reference"] * 4), ("meta", 1, [None] * 4)]
)
def test_kernels_choose_tokens_only_where_they_have_been_seen_to_run(
    device: str, executor: object, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is, where an executor runs the model; with `enforce_eager=True` all is PyTorch."""
    seen: list[Any] = []
    for file in (judge_file, device_sampling):
        monkeypatch.setattr(file, "op", lambda name, where, implementation=None: seen.append(implementation))
    runner = object.__new__(ModelRunner)
    runner.device, runner.executor = torch.device(device), executor
    sampler = DeviceSampler.for_device(runner.device, runner.sampling_implementation)
    assert (DeviceJudge.for_runner(runner) is None) == (sampler is None) == (device == "cpu")
    assert seen == asked + asked[:2]


def second_read(logits: Tensor) -> Tensor:
    judge_file.copy_to_host(logits.argmax(-1))
    return logits.aminmax(dim=-1).max.isfinite()


PLANTED = {
    "looks whether all is well": lambda logits: (logits.sum().item() < math.inf) & logits.isfinite().all(-1),
    "branches": lambda logits: logits.isfinite().all(-1) if logits.isfinite().all() else logits[:, 0] > 0,
    "finds the broken ones": lambda logits: torch.ones(len(logits)).index_fill(
        0, (~logits[:, 0].isfinite()).nonzero(), 0
    ),
    "counts them on the host": lambda logits: torch.tensor([all(row) for row in logits.isfinite().tolist()]),
    "copies to the host": lambda logits: logits.cpu().isfinite().all(-1),
    "reads twice": second_read,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_wait_is_seen(name: str) -> None:
    device_judge = DeviceJudge("cpu", "reference")
    device_judge.all_finite = PLANTED[name]
    requests, drafts, logits = random_round(random.Random(1), WISHES["all side by side"], "nds")
    try:
        _, crossed = judge_on_device(requests, drafts, logits, device_judge)
    except Waits:
        assert name != "reads twice"
    else:
        assert name == "reads twice"
        assert crossed["read"] == 2
