"""Contestants complete the same prompts with the same tokens, and what counts of their time is decoding."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from minillm import cli
from minillm.bench import (
    batching,
    decode,
    ladder,
    latency,
    llama_cpp,
    own_engine,
    prefill,
    serving,
    shapes,
    speculation,
    systems,
    transformers_peers,
    verify,
)
from minillm.bench.benchmarks import BENCHMARKS, find
from minillm.bench.completion import Completion, completion_metrics
from minillm.bench.harness import compare
from minillm.bench.systems import (
    Workload,
    choose,
    decode_system,
    draft_for,
    left_out,
    load,
    prepared,
    prompt_ids,
    with_best_settings,
)
from minillm.bench.transformers_peers import FirstTokens
from minillm.commands import bench
from minillm.errors import CheckpointError, ConfigError, UnsupportedError
from minillm.models.hub import resolve
from minillm.tokenizer import Tokenizer
from tests.conftest import TinyPair

PEERS = importlib.util.find_spec("llama_cpp") is not None and importlib.util.find_spec("gguf") is not None


@pytest.fixture
def workload(tiny: TinyPair) -> Workload:
    prompts = prompt_ids(str(tiny.target), 2, 40, 60)
    return Workload(str(tiny.target), str(tiny.draft), prompts, new_tokens=12, num_drafts=3)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minillm fp32", ("float32", None, False, False)),
        ("minillm eager fp32", ("float32", None, True, False)),
        ("minillm bf16", ("bfloat16", None, False, False)),
        ("minillm int8", ("float32", "int8", False, False)),
        ("minillm w8a8 + draft", ("float32", "w8a8", False, True)),
        ("minillm fp32 + draft", ("float32", None, False, True)),
    ],
)
def test_a_name_says_how_the_engine_is_built(name: str, expected: tuple[Any, ...]) -> None:
    found = own_engine.options(name, "small", 3)
    drafted = found.get("speculative_config")
    assert (found["dtype"], found["quantization"], found["enforce_eager"], drafted is not None) == expected
    assert found["enable_prefix_caching"] is False
    assert drafted is None or drafted["num_speculative_tokens"] == 3


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_guesses_looked_up_need_no_model(method: str) -> None:
    found = own_engine.options(f"minillm int8 + {method}", None, 3)
    assert (found["quantization"], found["dtype"], found["enforce_eager"]) == ("int8", "float32", False)
    assert found["speculative_config"]["method"] == method and "model" not in found["speculative_config"]


def test_every_name_of_the_benchmark_has_its_baselines_and_a_dtype() -> None:
    for known in (decode.BUNDLED, decode.LARGE, prefill.BUNDLED, prefill.LARGE):
        order = list(known)
        for name, baselines in known.items():
            assert all(order.index(base) < order.index(name) for base in baselines)
            if name.startswith("minillm"):
                assert own_engine.options(name, "small", 1)["dtype"] in ("float32", "bfloat16")


def test_minillm_is_compared_with_both_peers_in_its_own_dtype() -> None:
    """The weights of a large shape come in bf16: `minillm fp32` has no peer of its kind there."""
    for table in (decode.BUNDLED, prefill.BUNDLED, decode.LARGE, prefill.LARGE):
        for kind in ("bf16",) if "transformers fp32" not in table else ("fp32", "bf16"):
            if f"minillm {kind}" in table:
                peers = {f"transformers {kind}", f"llama.cpp {kind.replace('fp', 'f')}"}
                assert peers <= set(table[f"minillm {kind}"])


def test_systems_keep_their_order_and_unknown_ones_are_refused() -> None:
    assert choose(["a", "b", "c"], ["c", "a"]) == ["a", "c"]
    assert choose(["a", "b"], None) == ["a", "b"]
    with pytest.raises(ConfigError, match="no system 'd' in this benchmark; there are: a, b"):
        choose(["a", "b"], ["a", "d"])


@pytest.mark.parametrize(
    "known",
    [
        batching.BASELINES,
        batching.SHAPE_BASELINES,
        decode.BUNDLED,
        ladder.RUNGS,
        (serving.OFFLINE, serving.SERVER, serving.STREAMED, serving.VLLM),
    ],
    ids=["batch", "batch of a shape", "decode", "ladder", "serve"],
)
def test_every_system_can_be_asked_for_by_name(known: Iterable[str]) -> None:
    """`--systems` takes a list with commas, and some names have one, too."""
    names = list(known)
    assert all(choose(names, bench.names(name)) == [name] for name in names)
    assert choose(names, bench.names(",".join(names))) == names


def test_who_cannot_take_part_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(systems, "has_compiler", lambda: False)
    reasons = left_out(decode.BUNDLED, None)
    assert set(reasons) == {n for n in decode.BUNDLED if any(w in n for w in ("llama", "draft", "assist", "compiled"))}
    assert reasons["llama.cpp Q8_0"] == 'not installed: pip install "minillm-lessons[peers]"'
    with pytest.raises(UnsupportedError, match="not installed"):
        llama_cpp.LlamaCpp(Path("any.gguf"), 8, 1)


def test_only_the_bundled_model_has_a_draft_by_itself(tiny: TinyPair) -> None:
    assert draft_for("minicoder", None) == "minicoder-draft"
    assert draft_for("other", None) is None and draft_for("other", str(tiny.draft)) == str(tiny.draft)


def test_a_draft_that_does_not_exist_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(CheckpointError, match="no model 'small'"):
        draft_for("minicoder", "small")


def test_a_peer_that_ends_its_process_is_refused_before_it_ends_this_one(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[str] = []
    monkeypatch.setattr("minillm.export.gguf.export_gguf", lambda model, file, kind: exported.append(kind))
    crashing = [sys.executable, "-c", "import os; os.abort()"]
    run = subprocess.run
    monkeypatch.setattr(systems.subprocess, "run", lambda command, **options: run(crashing, **options))
    with (
        pytest.raises(ConfigError, match=r"llama.cpp Q8_0 crashes on this processor; name the others with --systems"),
        prepared(workload, ["llama.cpp Q8_0"]),
    ):
        raise AssertionError("the benchmark began")
    assert exported == ["q8_0"]


@pytest.mark.parametrize(
    ("code", "crashed"), [(0, False), (1, False), (-11, True), (0xC0000005, True), (0xC000001D, True)]
)
def test_a_crash_is_noticed_on_windows_too(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, code: int, crashed: bool
) -> None:
    """There an access violation and an illegal instruction have large exit codes."""
    done = subprocess.CompletedProcess([], code)
    monkeypatch.setattr(systems.subprocess, "run", lambda command, **options: done)
    assert systems._crashes("llama.cpp Q8_0", workload) is crashed


def test_llama_cpp_leaves_the_gpu_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its defaults use the GPU in a build for CUDA or Metal."""
    given: dict[str, Any] = {}

    def keep(name: str, answer: Any) -> Any:
        return lambda first, params: given.update({name: params}) or answer

    lib = SimpleNamespace(
        llama_model_default_params=lambda: SimpleNamespace(n_gpu_layers=-1),
        llama_context_default_params=lambda: SimpleNamespace(offload_kqv=True, op_offload=True),
        llama_model_load_from_file=keep("model", "a model"),
        llama_init_from_model=keep("context", "a context"),
        llama_model_get_vocab=lambda model: None,
        llama_vocab_n_tokens=lambda vocab: 300,
        llama_get_memory=lambda context: None,
        llama_free=lambda context: None,
        llama_model_free=lambda model: None,
    )
    monkeypatch.setattr(llama_cpp, "installed", lambda: True)
    monkeypatch.setattr(llama_cpp, "_library", lambda: lib)
    llama_cpp.LlamaCpp(tmp_path / "any.gguf", 8, 1)
    assert given["model"].n_gpu_layers == 0
    assert (given["context"].offload_kqv, given["context"].op_offload) == (False, False)


@pytest.mark.parametrize(("device", "mode"), [("cpu", "default"), ("cuda", "reduce-overhead")])
def test_transformers_is_compiled_as_it_does_by_default_on_a_gpu(device: str, mode: str) -> None:
    """There the mode records CUDA graphs. On a CPU `generate` compiles only if told so."""
    config = transformers_peers._compile_config(device)
    assert config.mode == mode and bool(config._compile_all_devices) is (device == "cpu")


def test_prompts_are_long_enough_and_cut_off(tiny: TinyPair) -> None:
    found = prompt_ids(str(tiny.target), 3, 50, 70)
    tokenizer = Tokenizer.from_folder(resolve(str(tiny.target)))
    assert all(50 <= len(ids) <= 70 for ids in found) and tokenizer.decode(found[0])
    with pytest.raises(ConfigError, match="500 prompts of 50 tokens"):
        prompt_ids(str(tiny.target), 500, 50, 70)


# --- what counts -----------------------------------------------------------------------------------------------------


def test_first_tokens_are_told_from_the_prompt_and_from_later_ones() -> None:
    first = FirstTokens()
    first.put(torch.zeros(1, 7))
    assert first.at is None
    first.put(torch.zeros(3))
    at = first.at
    first.put(torch.zeros(2))
    first.end()
    assert at is not None and (first.at, first.count) == (at, 3)


def test_figures_are_sums_over_prompts() -> None:
    found = [Completion([1, 2, 3, 4], 1.0, 2.0, 1, 2, 6, 2), Completion([5, 6], 3.0, 2.0, 1, 1, 3, 1)]
    told = completion_metrics([[0] * 10, [0] * 30], found)
    assert told == {
        "prefill_tokens_per_s": 10.0,
        "end_to_end_tokens_per_s": 0.75,
        "tokens_per_forward": pytest.approx(4 / 3),
        "acceptance_rate": pytest.approx(1 / 3),
    }
    assert "acceptance_rate" not in completion_metrics([[0]], [Completion([1, 2], 1.0, 1.0)])


def test_only_the_time_after_the_first_tokens_counts(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __init__(self) -> None:
            self.details = {"made": "up"}

        def complete(self, prompt: list[int], new_tokens: int) -> Completion:
            return Completion([1] * new_tokens, 100.0, 0.5, num_first=2)

    monkeypatch.setattr(systems, "load", lambda name, workload: Slow())
    system = decode_system("minillm fp32", workload)
    assert system.run() == [[1] * 12] * 2
    counted = system.counted()
    assert (counted.seconds, counted.num_tokens) == (1.0, 20)
    assert system.extra()["made"] == "up" and system.extra()["prefill_tokens_per_s"] < 1


def test_tokens_that_all_arrive_at_once_leave_nothing_to_measure(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of assisted generation may propose and accept all of them."""

    class AtOnce:
        def __init__(self) -> None:
            self.details: dict[str, Any] = {}

        def complete(self, prompt: list[int], new_tokens: int) -> Completion:
            return Completion([1] * new_tokens, 1.0, 0.0, num_first=new_tokens)

    monkeypatch.setattr(systems, "load", lambda name, workload: AtOnce())
    system = decode_system("transformers fp32 assisted", workload)
    with pytest.raises(ConfigError, match=r"assisted gave all 12 new tokens of each prompt at once.*--new-tokens"):
        compare([system], rounds=1)


# --- settings of peers -----------------------------------------------------------------------------------------------

FLASH, EXACT = llama_cpp.SETTINGS


class Peer:
    """Its completions take `base` and `per_token` seconds, or the next of `times`."""

    def __init__(self, base: float = 0.0, per_token: float = 0.0, times: Iterator[float] | None = None) -> None:
        self.details: dict[str, Any] = {}
        self.base, self.per_token, self.times = base, per_token, times

    def complete(self, prompt: list[int], new_tokens: int) -> Completion:
        seconds = next(self.times) if self.times else self.base + self.per_token * len(prompt)
        return Completion([7] * new_tokens, seconds, 0.0)


def test_the_settings_of_a_peer_are_tried_on_the_longest_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {FLASH: Peer(0.001, 0.0001), EXACT: Peer(0.005)}
    monkeypatch.setattr(systems, "_load_peer", lambda name, workload, setting: peers[setting])
    workload = Workload("any", None, [[0] * 10, [0] * 1000], new_tokens=1)
    best = with_best_settings(workload, ["llama.cpp f32", "minillm fp32"])
    assert best.settings == {"llama.cpp f32": EXACT}
    assert best.tried == {"llama.cpp f32": {FLASH: pytest.approx(101), EXACT: pytest.approx(5)}}


def test_a_peer_with_one_setting_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "_load_peer", lambda *arguments: pytest.fail("a peer was loaded"))
    best = with_best_settings(Workload("any", None, [[0]], new_tokens=1), ["transformers fp32", "minillm fp32"])
    assert best.settings == {"transformers fp32": "forward"} and best.tried == {}


def test_one_slow_run_does_not_decide_which_setting_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {FLASH: Peer(times=chain([9.0, 0.009], repeat(0.001))), EXACT: Peer(0.002)}
    monkeypatch.setattr(systems, "_load_peer", lambda name, workload, setting: peers[setting])
    best = with_best_settings(Workload("any", None, [[0]], new_tokens=1), ["llama.cpp f32"])
    assert best.settings == {"llama.cpp f32": FLASH}


# --- all together ----------------------------------------------------------------------------------------------------

FULL_PRECISION = [
    "transformers fp32",
    "transformers fp32 assisted",
    "minillm eager fp32",
    "minillm fp32",
    "minillm fp32 + draft",
    *(["llama.cpp f32"] if PEERS else []),
]


def test_all_systems_in_full_precision_give_the_same_tokens(workload: Workload) -> None:
    with prepared(workload, FULL_PRECISION) as ready:
        runs = {name: decode_system(name, ready) for name in FULL_PRECISION}
        tokens = {name: system.run() for name, system in runs.items()}
        expected = tokens["transformers fp32"]
        assert [len(ids) for ids in expected] == [12, 12]
        tokens.pop("llama.cpp f32", None)  # its faster way may round attention; the exact one is compared below
        assert set(map(repr, tokens.values())) == {repr(expected)}
        for name, system in runs.items():
            counted, told = system.counted(), system.extra()
            assert counted.seconds > 0 and counted.num_tokens <= 2 * 11, name
            assert ("tried_ms_per_token" in told) is not name.startswith("minillm")
        assert set(runs["transformers fp32"].extra()["tried_ms_per_token"]) == set(transformers_peers.PLAIN)
        for name in ready.tried:
            for setting in set(ready.tried[name]) - {llama_cpp.SETTINGS[0]}:
                peer = systems._load_peer(name, ready, setting)
                assert [peer.complete(ids, 12).token_ids for ids in ready.prompts] == expected, (name, setting)
        assert 1 < runs["minillm fp32 + draft"].extra()["tokens_per_forward"] <= 4


def test_the_fastest_way_of_a_peer_is_measured(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {"dynamic": 3.0, "static": 2.0}
    monkeypatch.setattr(systems, "_try_settings", lambda name, workload, settings: tried)
    with prepared(workload, ["transformers fp32", "minillm fp32"]) as ready:
        assert ready.settings == {"transformers fp32": "static"} and ready.tried == {"transformers fp32": tried}


def test_one_token_needs_no_generate_and_is_the_same(workload: Workload) -> None:
    """So there is one setting of transformers, and its name says so."""
    names = [name for name in FULL_PRECISION if "draft" not in name and "assisted" not in name]
    with prepared(replace(workload, new_tokens=1), names) as ready:
        assert ready.settings["transformers fp32"] == "forward"
        for prompt in ready.prompts:
            found = {name: load(name, ready).complete(prompt, 1) for name in names}
            assert len({tuple(completion.token_ids) for completion in found.values()}) == 1
            assert all(len(c.token_ids) == 1 and c.num_decoded == 0 for c in found.values())


def test_the_files_for_llama_cpp_go_when_they_are_not_needed(workload: Workload) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    with prepared(workload, ["llama.cpp Q8_0"]) as ready:
        assert list(ready.gguf) == ["q8_0"] and Path(ready.gguf["q8_0"]).is_file()
        assert set(ready.tried["llama.cpp Q8_0"]) == set(llama_cpp.SETTINGS)
        assert eval(repr(ready)) == ready
    assert not Path(ready.gguf["q8_0"]).exists()


def test_run_gives_rows_for_each_baseline_that_took_part(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "peak_memory", lambda name, workload: 7)
    outcome = decode.run(
        str(tiny.target),
        str(tiny.draft),
        systems=["minillm eager fp32", "minillm fp32", "minillm w8a8", "minillm fp32 + draft"],
        rounds=1,
        prompts=1,
        new_tokens=6,
    )
    pairs = [(row["system"], row["baseline"]) for row in outcome["rows"]]
    assert pairs == [
        ("minillm eager fp32", None),
        ("minillm fp32", "minillm eager fp32"),
        ("minillm fp32 + draft", "minillm fp32"),
        ("minillm w8a8", "minillm fp32"),
    ]
    assert [row["outputs_equal"] for row in outcome["rows"]][1:3] == [True, True]
    assert outcome["rows"][0]["peak_memory_bytes"] == 7
    assert outcome["config"]["left_out"] == {} and outcome["config"]["num_speculative_tokens"] == 4
    json.dumps(outcome)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new_tokens": 1}, "--new-tokens 1 must be at least 2"),
        ({"new_tokens": 192}, r"--new-tokens 192 leaves 64 of 256 tokens for a prompt of 65; give at most 191"),
        ({"new_tokens": 5000}, r"leaves 0 of 256 tokens"),
    ],
)
def test_new_tokens_that_leave_nothing_to_measure_are_refused(
    tiny: TinyPair, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        decode.run(str(tiny.target), None, systems=["minillm fp32"], **options)


def test_a_shape_takes_no_draft() -> None:
    with pytest.raises(ConfigError, match=r"--draft minicoder-draft is not used with --shape 0\.4b"):
        decode.run(draft="minicoder-draft", shape="0.4b")


@pytest.mark.parametrize("module", [decode, prefill, verify, batching, speculation])
def test_a_model_and_a_shape_are_not_both_taken(module: ModuleType) -> None:
    """The shape would be run in place of the model, without a word."""
    with pytest.raises(ConfigError, match=r"--model minicoder is not used with --shape 0\.4b: leave one of them out"):
        module.run("minicoder", shape="0.4b")


@pytest.mark.parametrize("drafts", [128, 9000])
def test_verified_drafts_that_the_model_has_no_room_for_are_refused(tiny: TinyPair, drafts: int) -> None:
    with pytest.raises(ConfigError, match=rf"^--drafts {drafts} leaves .* for a prompt of 129; give at most 127$"):
        verify.run(str(tiny.target), systems=["minillm fp32"], drafts=drafts)


def test_other_benchmarks_leave_room_for_a_prompt_too(tiny: TinyPair) -> None:
    for run in (latency.run, ladder.run, speculation.run):
        with pytest.raises(ConfigError, match="leaves 0 of 256 tokens for a prompt"):
            run(str(tiny.target), str(tiny.draft), new_tokens=256)
    with pytest.raises(ConfigError, match="--new-tokens 1 must be at least 2"):
        speculation.run(str(tiny.target), str(tiny.draft), new_tokens=1)
    with pytest.raises(ConfigError, match="prompts of 5 to -1 tokens"):
        prompt_ids(str(tiny.target), 1, 5, -1)


def test_a_draft_of_a_shape_is_measured_like_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no default sizes of its own."""
    seen: list[int] = []

    def prompts(model: str, count: int, shortest: int, longest: int) -> list[list[int]]:
        seen.append(count)
        raise ConfigError("far enough")

    monkeypatch.setattr(shapes, "shape_folder", lambda shape: resolve("minicoder"))
    monkeypatch.setattr(decode, "prompt_ids", prompts)
    with pytest.raises(ConfigError, match="far enough"):
        decode.run(shape="0.4b-draft", systems=["minillm fp32"])
    assert seen == [decode.SIZES["0.4b"].prompts]


# --- the command -----------------------------------------------------------------------------------------------------


def test_options_reach_the_benchmark_that_has_them(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    seen: dict[str, Any] = {}

    def fake(model: str = "m", systems: list[str] | None = None, rounds: int = 1) -> dict[str, Any]:
        seen.update(model=model, systems=systems, rounds=rounds)
        reasons = {"llama.cpp f32": llama_cpp.NOT_INSTALLED}
        return {"name": "decode", "hardware": {"cpu": {"name": "chip"}}, "rows": [], "config": {"left_out": reasons}}

    monkeypatch.setattr(bench, "find", lambda name: fake)
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.main(["bench", "decode", "--systems", "minillm fp32, minillm int8 + draft", "--rounds", "3"]) == 0
    assert seen == {"model": "m", "systems": ["minillm fp32", "minillm int8 + draft"], "rounds": 3}
    assert "not installed" in capsys.readouterr().out
    assert cli.main(["bench", "decode", "--drafts", "3"]) == 2
    assert "bench decode has no --drafts; its options: --model, --systems, --rounds\n" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "decode", "--rounds", "0"])


@pytest.mark.parametrize("name", ["decode", "prefill", "latency", "ladder", "verify"])
def test_options_of_the_benchmarks_are_those_of_the_command(name: str) -> None:
    import inspect

    flags = {"model", "draft", "shape", "systems", "rounds", "prompts", "new_tokens", "drafts"}
    assert name in BENCHMARKS
    assert set(inspect.signature(find(name)).parameters) <= flags | {"lengths"}
