"""The batch benchmark: fixed heavy-tailed lengths, utilisation counted from a trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.bench import batch_transformers, batching, vllm_peer
from minillm.bench.benchmarks import BENCHMARKS, find
from minillm.errors import ConfigError
from minillm.models.held_out import held_out_prompts
from minillm.tokenizer import Tokenizer
from tests.conftest import TinyPair


def test_lengths_are_fixed_and_have_a_heavy_tail() -> None:
    lengths = batching.output_lengths()
    assert lengths == batching.output_lengths() and len(lengths) == batching.REQUESTS
    assert min(lengths) >= batching.SHORTEST and max(lengths) == batching.LONGEST
    assert max(lengths) > 8 * sorted(lengths)[batching.REQUESTS // 2]


def test_utilisation_is_counted_from_the_steps(tiny: TinyPair) -> None:
    """Three requests of 2, 4 and 6 tokens, two at a time: 12 request-steps. The third joins in step 3, ends in 8."""
    llm = LLM(str(tiny.target), max_num_seqs=2, block_size=4, enable_prefix_caching=False)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 4, 6)]
    with llm.trace() as trace:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 3, params, use_tqdm=False)
    told = batching.utilisation(trace, 2)
    assert told["steps"] == 8
    assert told["batch_slot_utilisation"] == pytest.approx(12 / 16)
    assert told["batch_slot_utilisation_while_waiting"] == 1.0
    # At the ends of the steps: 3 + 3 tokens in 2 blocks, 4 in 1, 5 + 3 in 3, 4 in 1, then 5, 6 and 7 in 2 each.
    assert told["kv_slot_utilisation"] == pytest.approx(40 / (13 * 4))


def test_requests_that_the_engine_does_not_know_yet_wait_all_the_same(tiny: TinyPair) -> None:
    """Static batches of 2: the third request waits outside for the 4 steps of the first, which use 6 of 8 slots."""
    llm = LLM(str(tiny.target), max_num_seqs=2, block_size=4, enable_prefix_caching=False)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 4, 6)]
    with llm.trace() as trace:
        for part in (slice(0, 2), slice(2, 3)):
            llm.generate([{"prompt_token_ids": [5, 6, 7]}] * len(params[part]), params[part], use_tqdm=False)
    told = batching.utilisation(trace, 2, 3)
    assert told["steps"] == 10
    assert told["batch_slot_utilisation"] == pytest.approx(12 / 20)
    assert told["batch_slot_utilisation_while_waiting"] == pytest.approx(6 / 8)


def test_the_benchmark_is_registered_and_compares_with_every_way_of_transformers() -> None:
    assert "batch" in BENCHMARKS and find("batch") is batching.run
    for name in (batching.CONTINUOUS, batching.CONTINUOUS_ALL, batching.CONTINUOUS_DRAFTED, batching.CONTINUOUS_SUFFIX):
        assert set(batching.TRANSFORMERS) < set(batching.BASELINES[name])
    for table in (batching.BASELINES, batching.SHAPE_BASELINES):
        assert all(base in table for bases in table.values() for base in bases)


def test_vllm_runs_as_many_requests_at_a_time_as_what_it_is_compared_with(
    monkeypatch: pytest.MonkeyPatch, tiny: TinyPair
) -> None:
    made: list[int] = []
    prompts: list[list[list[int]]] = []

    class Peer:
        details: ClassVar[dict[str, str]] = {"vllm": "0"}
        peak_memory = None

        def __init__(self, interpreter: str, threads: int, **spec: Any) -> None:
            made.append(spec["max_num_seqs"])
            prompts.append(spec["prompts"])

        def run(self) -> list[list[int]]:
            return [[1]]

        def close(self) -> None:
            made.append(0)

    monkeypatch.setenv(vllm_peer.INTERPRETER, "python")
    monkeypatch.setattr(batching, "VllmPeer", Peer)
    outcome = batching.run(str(tiny.target), systems=[batching.VLLM, batching.VLLM_ALL], rounds=1)
    assert made == [8, 32, 0, 0] and [row["system"] for row in outcome["rows"]] == ["vLLM CPU", "vLLM CPU, 32 seats"]
    tokenizer = Tokenizer.from_folder(tiny.target)
    own = [tokenizer.encode(prompt.prompt) for prompt in held_out_prompts(batching.REQUESTS)]
    assert prompts == [own, own], "the ids are of the model's own tokenizer"
    assert outcome["config"]["prompt_tokens"] == [len(ids) for ids in own]
    for table in (batching.BASELINES, batching.SHAPE_BASELINES):
        assert batching.VLLM_ALL in table
        for name, bases in table.items():
            vllm = [base for base in bases if base.startswith(batching.VLLM)]
            if name.startswith(batching.CONTINUOUS):
                assert vllm == [batching.VLLM_ALL if name.endswith(batching.ALL) else batching.VLLM]


def test_a_system_that_cannot_run_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch, tiny: TinyPair) -> None:
    monkeypatch.delenv(vllm_peer.INTERPRETER, raising=False)
    outcome = batching.run(str(tiny.target), systems=[batching.VLLM, batching.CONTINUOUS_DRAFTED], rounds=1)
    assert outcome["rows"] == []
    assert outcome["config"]["left_out"] == {
        batching.VLLM: "MINILLM_VLLM_PYTHON does not name an interpreter with vLLM",
        batching.CONTINUOUS_DRAFTED: "there is no draft model for it",
    }


def test_the_draft_changes_no_token_and_is_there_for_the_longest_answers_only(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5 + i, 6, 7] for i in range(batching.REQUESTS)]
    monkeypatch.setattr(batching, "draft_for", lambda model, draft: str(tiny.draft))
    monkeypatch.setattr(batching, "output_lengths", lambda: [2] * (batching.REQUESTS - 2) + [12, 16])
    plain, _ = batching._system(batching.CONTINUOUS, str(tiny.target), prompts)
    drafted, extra = batching._system(batching.CONTINUOUS_DRAFTED, str(tiny.target), prompts)
    assert plain() == drafted()
    told = extra()
    assert told["speculative_config"]["disable_by_batch_size"] == batching.DRAFTING
    assert told["steps"] < batching._system(batching.CONTINUOUS, str(tiny.target), prompts)[1]()["steps"]


def test_looking_back_changes_no_token_and_keeps_nothing_of_earlier_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests come again in every round: who remembered them would guess everything."""
    monkeypatch.setattr(batching, "output_lengths", lambda: [16] * batching.REQUESTS)
    prompts = batching._prompts("minicoder")
    plain, counted = batching._system(batching.CONTINUOUS, "minicoder", prompts)
    looking, extra = batching._system(batching.CONTINUOUS_SUFFIX, "minicoder", prompts)
    first, told = looking(), extra()
    assert first == plain() == looking()
    assert extra()["steps"] == told["steps"] < counted()["steps"]
    assert told["speculative_config"]["suffix_decoding_max_cached_requests"] == 0


def test_weights_in_eight_bits_are_an_option_of_their_own(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "output_lengths", lambda: [2] * batching.REQUESTS)
    prompts = [[5, 6, 7]] * batching.REQUESTS
    _, extra = batching._system(f"{batching.CONTINUOUS} w8a8", str(tiny.target), prompts)
    assert extra()["quantization"] == "w8a8"


@pytest.mark.parametrize(
    ("answer", "message"),
    [(None, "ended after 0 of 1 requests"), (SimpleNamespace(error="out of memory"), "failed: out of memory")],
)
def test_transformers_batching_that_cannot_go_on_is_an_error(
    answer: SimpleNamespace | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([answer])

    class Manager:
        def add_request(self, ids: list[int], **options: Any) -> str:
            return "name"

        def get_result(self, timeout: float) -> SimpleNamespace | None:
            return next(answers)  # it is asked once

        def is_running(self) -> bool:
            return False

    @contextmanager
    def manager(**options: Any) -> Iterator[Manager]:
        yield Manager()

    peer = SimpleNamespace(continuous_batching_context_manager=manager)
    monkeypatch.setattr(batch_transformers, "_load", lambda model: peer)
    run, _ = batch_transformers.generate_batch("any", [[5]], [2], 1)
    with pytest.raises(batch_transformers.PeerError, match=message):
        run()


FAKE_VLLM = """
import types, sys
assert not any(path.endswith("minillm/bench") for path in sys.path)
__version__ = "0"
class SamplingParams:
    def __init__(self, **options): self.max_tokens = options["max_tokens"]
class LLM:
    def __init__(self, model, **options): print("a line that is no answer")
    def generate(self, prompts, params, use_tqdm):
        answer = lambda ids, n: types.SimpleNamespace(token_ids=(ids * n)[:n])
        return [types.SimpleNamespace(outputs=[answer(p["prompt_token_ids"], s.max_tokens)])
                for p, s in zip(prompts, params)]
"""


def test_a_peer_in_another_process_answers_each_time_and_says_when_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not confused by the files beside it: `kernels.py` is a module of minillm and a package of transformers'."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    requests = {"model": "none", "prompts": [[7], [8, 9]], "lengths": [2, 3], "max_num_seqs": 2, "dtype": "float32"}
    peer = vllm_peer.VllmPeer(sys.executable, 1, **requests)
    assert peer.run() == peer.run() == [[7, 7], [8, 9, 8]]
    assert peer.details == {"vllm": "0", "vllm_torch": torch.__version__, "threads": 1}
    peer.close()
    (tmp_path / "vllm.py").write_text("raise ImportError")
    with pytest.raises(ConfigError, match="MINILLM_VLLM_PYTHON"):
        vllm_peer.VllmPeer(sys.executable, 1, **requests)


@pytest.mark.skipif(sys.platform == "win32", reason="the interpreters are shell scripts")
def test_an_interpreter_that_cannot_run_vllm_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 1\n")
    for interpreter in (tmp_path / "none", tmp_path, script):  # not there, a folder, not executable
        with pytest.raises(ConfigError, match=r"cannot be run .*MINILLM_VLLM_PYTHON must name"):
            vllm_peer.VllmPeer(str(interpreter), 1)
    script.chmod(0o700)
    with pytest.raises(ConfigError, match="ended without an answer"):
        vllm_peer.VllmPeer(str(script), 1)
    script.write_text("#!/bin/sh\nread line\necho '{}'\n")  # it ends after the requests, before the first run
    peer = vllm_peer.VllmPeer(str(script), 1)
    peer.process.wait()
    with pytest.raises(ConfigError, match="ended without an answer"):
        peer.run()
    peer.close()
