"""An engine over several processes: same tokens, clear refusals, and no process left alone or waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import minillm.parallel.runner as runner_module
import minillm.parallel.workers as workers_module
from minillm import LLM, AsyncLLM, EngineArgs, SamplingParams
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.errors import ConfigError, EngineDeadError, UnsupportedError
from minillm.models.held_out import held_out_prompts
from minillm.models.loading import save_llama
from minillm.parallel.group import TIMEOUT, Group, gloo_problem, local_store
from minillm.parallel.launch import has_launched_ranks
from minillm.parallel.messages import (
    Allocate,
    Connect,
    CopyBlocks,
    Failed,
    Message,
    Ready,
    Run,
    Setup,
    frame,
    receive,
)
from minillm.parallel.runner import LeadingRunner
from minillm.parallel.workers import Workers
from minillm.reuse.scratch import Scratch
from minillm.trace import RequestPreempted
from minillm.training.train_tokenizer import save_tokenizer, train_tokenizer
from tests.conftest import TEXTS, TinyPair, random_model

ROOT = Path(__file__).parents[2]
PROMPTS = ["def add(a, b):", "for line in path:\n", "import os\n\n\ndef walk(root):\n", "class Stack:"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3, n=3, max_tokens=20, ignore_eos=True)
SMALL_POOL = {"block_size": 4, "num_kv_blocks": 24, "max_model_len": 80, "device": "cpu"}
"""Too small for all prompts at once, so requests are preempted."""


def tokens(llm: LLM, params: SamplingParams, prompts: list = PROMPTS) -> list[list[list[int]]]:
    return [[c.token_ids for c in out.outputs] for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def split(tiny: TinyPair) -> LLM:
    return LLM(str(tiny.target), tensor_parallel_size=2, **SMALL_POOL)


@pytest.fixture(scope="module")
def whole(tiny: TinyPair) -> LLM:
    return LLM(str(tiny.target), enforce_eager=True, **SMALL_POOL)


@pytest.fixture
def doomed(tiny: TinyPair) -> Iterator[LLM]:
    """One that a test may break."""
    llm = LLM(str(tiny.target), tensor_parallel_size=2, **SMALL_POOL)
    yield llm
    llm.engine.runner.workers.close()


def test_two_processes_give_the_tokens_of_one_preempted_or_not(split: LLM, whole: LLM) -> None:
    with split.trace() as trace:
        assert tokens(split, GREEDY) == tokens(whole, GREEDY)
    assert any(isinstance(event, RequestPreempted) for event in trace)


def test_sampled_completions_that_share_and_copy_blocks_are_the_same(
    split: LLM, whole: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {"prompt_token_ids": list(range(10, 21))}  # three tokens in the last block: two of them are only copied
    copied = []
    manager = split.engine.scheduler.kv_cache_manager
    copy = manager.copy_blocks
    monkeypatch.setattr(manager, "copy_blocks", lambda pairs: (copied.extend(pairs), copy(pairs)))
    assert tokens(split, SAMPLED, [prompt]) == tokens(whole, SAMPLED, [prompt])
    assert copied  # completions of one prompt share its last block until they write to it


def test_interrupted_step_ends_on_all_ranks_and_the_next_call_works(
    split: LLM, whole: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, seen = split.engine.runner.model.group, []
    reduce = group.all_reduce

    def interrupting(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        if len(seen) == 13:  # in the middle of a step: five a step
            os.kill(os.getpid(), signal.SIGINT)
        return reduce(x)

    with monkeypatch.context() as patch:
        patch.setattr(group, "all_reduce", interrupting)
        with pytest.raises(KeyboardInterrupt):
            tokens(split, GREEDY)
    assert len(seen) % 5 == 0
    split.engine.pool.check_integrity([])
    assert tokens(split, GREEDY) == tokens(whole, GREEDY)


def test_int8_cache_is_split_by_heads_and_workers_end_with_the_engine(tiny: TinyPair) -> None:
    options = {"kv_cache_dtype": "int8", **SMALL_POOL}
    alone = tokens(LLM(str(tiny.target), enforce_eager=True, **options), GREEDY)
    llm = LLM(str(tiny.target), tensor_parallel_size=2, **options)
    [process] = llm.engine.runner.workers.processes
    assert tokens(llm, GREEDY) == alone
    assert process.poll() is None
    del llm
    assert process.poll() == 0


def test_killed_worker_is_named_at_the_next_call(doomed: LLM) -> None:
    [process] = doomed.engine.runner.workers.processes
    process.kill()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(pid {process.pid}\) has ended: killed by SIGKILL"):
            tokens(doomed, GREEDY)
    doomed.engine.pool.check_integrity([])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals to send")
def test_a_signal_to_all_processes_leaves_the_workers_to_rank_0(doomed: LLM, whole: LLM) -> None:
    """Rank 0 may have requests to finish: a server does, after SIGTERM."""
    [process] = doomed.engine.runner.workers.processes
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        assert tokens(doomed, GREEDY) == tokens(whole, GREEDY)
    doomed.engine.runner.workers.close()
    assert process.poll() == 0


def test_worker_killed_in_the_middle_of_a_step_is_named(doomed: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    [process] = doomed.engine.runner.workers.processes
    group, seen = doomed.engine.runner.model.group, []
    reduce = group.all_reduce

    def killing(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        if len(seen) == 13:
            process.kill()
            process.wait()
        return reduce(x)

    monkeypatch.setattr(group, "all_reduce", killing)
    with pytest.raises(EngineDeadError, match=r"rank 1 .*killed by SIGKILL; the other ranks were stopped"):
        tokens(doomed, GREEDY)


def test_worker_that_cannot_load_says_why(tmp_path: Path) -> None:
    setup = Setup(str(tmp_path), 1, 2, "cpu", "float32", "auto", {}, 16, 1)
    with pytest.raises(EngineDeadError, match=r"rank 1 .* has ended: CheckpointError: .*config\.json"):
        Workers([setup]).wait_until_ready()


def test_worker_that_cannot_allocate_says_why(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Workers.send
    monkeypatch.setattr(Workers, "send", lambda self, m: send(self, Allocate(10**15) if isinstance(m, Allocate) else m))
    with pytest.raises(
        ConfigError, match=r"\d cache blocks need .* MiB, which the system does not give .*; lower num_kv_bl"
    ):
        LLM(str(tiny.target), tensor_parallel_size=2, device="cpu")


def test_worker_that_fails_to_allocate_otherwise_says_why(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Workers.send
    monkeypatch.setattr(Workers, "send", lambda self, m: send(self, Allocate(-1) if isinstance(m, Allocate) else m))
    with pytest.raises(EngineDeadError, match=r"rank 1 .* has ended: RuntimeError: .*negative"):
        LLM(str(tiny.target), tensor_parallel_size=2, device="cpu")


def test_worker_killed_while_the_ranks_connect_is_named_at_once(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Workers.send

    def killing(self: Workers, message: Message) -> None:
        send(self, message)
        if isinstance(message, Connect):
            self.processes[0].kill()

    monkeypatch.setattr(Workers, "send", killing)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 .*killed by SIGKILL; the other ranks were stopped"):
        LLM(str(tiny.target), tensor_parallel_size=2, device="cpu")
    assert time.monotonic() - began < TIMEOUT.total_seconds() / 3


def test_worker_imports_nothing_from_the_current_folder(
    tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("minillm", "torch", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in a notebook
    assert tokens(LLM(str(tiny.target), tensor_parallel_size=2, device="cpu"), GREEDY, PROMPTS[:1])


def test_more_blocks_than_memory_are_refused_as_by_one_process(tiny: TinyPair) -> None:
    with pytest.raises(ConfigError, match=rf"^{10**11} cache blocks need .* MiB, which .*; lower num_kv_blocks"):
        LLM(str(tiny.target), tensor_parallel_size=2, device="cpu", num_kv_blocks=10**11)


def test_workers_end_if_the_engine_is_not_built(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the traceback is held, as a notebook holds it: the engine's objects live on in it."""
    held, wait = [], Workers.wait_until_ready
    monkeypatch.setattr(Workers, "wait_until_ready", lambda self: (held.append(self), wait(self)))
    with pytest.raises(ConfigError, match="holds no block") as caught:
        LLM(str(tiny.target), tensor_parallel_size=2, device="cpu", kv_cache_memory_bytes=1)
    [workers] = held
    [process] = workers.processes
    assert process.poll() is not None
    assert caught.value.__traceback__  # held until here


def test_workers_end_if_the_next_one_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], workers_module._start

    def start_one(num_threads: int) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(start(num_threads))
        return started[0]

    monkeypatch.setattr(workers_module, "_start", start_one)
    setups = [Setup("", rank, 3, "cpu", "float32", "auto", {}, 16, 1) for rank in (1, 2)]
    with pytest.raises(OSError, match="no more processes") as caught:
        Workers(setups)
    assert started[0].poll() is not None
    assert caught.value.__traceback__  # held until here


def test_the_steps_of_rank_0_have_their_own_limit_of_threads(split: LLM) -> None:
    torch.set_num_threads(2)
    runner = LeadingRunner(split.engine.runner.model, 4, Workers([]), 1)
    assert runner._thread.submit(torch.get_num_threads).result() == 1
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2


def test_an_interrupt_while_rank_0_sets_its_limit_of_threads_leaves_that_of_others(
    split: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads = runner_module._use_threads

    def interrupted(num_threads: int) -> None:
        use_threads(num_threads)
        raise KeyboardInterrupt

    torch.set_num_threads(2)
    monkeypatch.setattr(runner_module, "_use_threads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LeadingRunner(split.engine.runner.model, 4, Workers([]), 1)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == 2


KILLED = """
import os, signal
from minillm import LLM
llm = LLM({model!r}, tensor_parallel_size=2, device="cpu")
print(llm.engine.runner.workers.processes[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_when_rank_0_is_killed(tiny: TinyPair) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED.format(model=str(tiny.target))], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker, give_up = int(done.stdout), time.monotonic() + 20
    while is_alive(worker):
        assert time.monotonic() < give_up
        time.sleep(0.05)


LAUNCHED = """
import sys
from minillm import LLM, SamplingParams
llm = LLM({model!r}, tensor_parallel_size=2, device="cpu")
outs = llm.generate({prompts!r}, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
sys.stdout.write(f"{{llm.engine.runner.model.group.rank}} {{[o.outputs[0].token_ids for o in outs]}}\\n")
"""


def test_every_process_of_torchrun_returns_the_same_tokens(tiny: TinyPair, whole: LLM, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED.format(model=str(tiny.target), prompts=PROMPTS))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    expected = [completion for [completion] in tokens(whole, GREEDY)]
    assert sorted(done.stdout.splitlines()) == [f"{rank} {expected}" for rank in (0, 1)]


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_ranks_of_torchrun_are_not_for_requests_that_arrive_at_any_time(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, under_torchrun: bool
) -> None:
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    backend = None if under_torchrun else "external_launcher"
    args = EngineArgs(str(tiny.target), tensor_parallel_size=2, device="cpu", distributed_executor_backend=backend)
    with pytest.raises(UnsupportedError, match="the ranks of torchrun need the same requests at the same step"):
        AsyncLLM(args)
    assert not has_launched_ranks(replace(args, distributed_executor_backend="mp"))
    AsyncLLM(replace(args, tensor_parallel_size=1)).shutdown()


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size=0 must be an integer of at least 1"),
        ({"tensor_parallel_size": 3}, ConfigError, "tensor_parallel_size=3 does not divide the model: it has 4 query"),
        ({"quantization": "int8"}, UnsupportedError, "quantization='int8' is not supported with tensor_parallel_size"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, UnsupportedError, "speculative_con"),
        ({"kv_cache_config": {"layout": "sinks"}}, UnsupportedError, "kv_cache_config='sinks' is not supported"),
        ({"ops": {"paged_attention": max}}, UnsupportedError, "ops=.* is not supported with tensor_parallel_size=2"),
        ({"kv_cache_dtype": "int4", "kv_cache_config": {"group_size": "a"}}, ConfigError, "group_size='a' must be an"),
        ({"distributed_executor_backend": "ray"}, ConfigError, "distributed_executor_backend='ray' must be"),
        ({"distributed_executor_backend": "external_launcher"}, ConfigError, "torchrun --nproc-per-node 2"),
    ],
)
def test_what_cannot_be_split_is_refused(tiny: TinyPair, options: dict, error: type, reason: str) -> None:
    with pytest.raises(error, match=reason):
        LLM(str(tiny.target), device="cpu", **{"tensor_parallel_size": 2, **options})


def test_keys_and_values_of_a_split_engine_are_not_moved(split: LLM) -> None:
    with pytest.raises(UnsupportedError, match="use tensor_parallel_size=1"):
        Scratch(split, 4)


def test_more_ranks_than_gpus_are_refused(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.engine.assembly.choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="needs as many GPUs, and this machine has 1"):
        LLM(str(tiny.target), tensor_parallel_size=2, dtype="float32")


def test_a_gpu_that_is_not_that_of_rank_0_is_refused(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.engine.assembly.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(
        UnsupportedError, match=r"device='cuda:1' is not supported with tensor_parallel_size=2; use 'cu"
    ):
        LLM(str(tiny.target), tensor_parallel_size=2, dtype="float32", device="cuda:1")


def test_a_pytorch_whose_gloo_has_no_transport_is_refused_before_a_process_starts(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.8 for Windows is one. It says that gloo is available."""

    class NoTransport:
        @staticmethod
        def create_default_device() -> None:
            raise RuntimeError("makeDeviceForHostname(): unsupported gloo device")

    monkeypatch.setattr(dist, "ProcessGroupGloo", NoTransport)
    monkeypatch.setattr(workers_module, "_start", lambda _: pytest.fail("a process was started"))
    gloo_problem.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"needs gloo, which .*unsupported gloo device\); install"):
            LLM(str(tiny.target), tensor_parallel_size=2, device="cpu")
    finally:
        gloo_problem.cache_clear()


def test_a_rank_that_cannot_connect_does_not_say_that_it_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(EngineDeadError, match=r"rank 0 of 2 cannot connect to the other ranks \(.*no-such-interface"):
        Group(0, 2, torch.device("cpu")).connect(dist.HashStore())


def test_an_engine_whose_ranks_cannot_connect_says_why(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(
        EngineDeadError, match=r"rank [01] of 2 cannot connect to the other ranks \(.*no-such-interface"
    ):
        LLM(str(tiny.target), tensor_parallel_size=2, device="cpu")


def test_the_store_of_the_ranks_does_without_libuv() -> None:
    """PyTorch for Windows has none."""
    store = local_store(1)
    assert not store.libuvBackend and not local_store(1, store.port).libuvBackend


def test_frames_survive_the_pipe(split: LLM) -> None:
    segments = []
    run = split.engine.runner.run
    split.engine.runner.run = lambda given: (segments.extend(given), run(given))[1]
    tokens(split, GREEDY, PROMPTS[:2])
    del split.engine.runner.run
    segments[0].masks, segments[0].depths
    reading, writing = os.pipe()
    messages = [Run(segments[:2]), CopyBlocks([(1, 2)]), Allocate(3), Connect(4), Ready(), Failed("why")]
    with open(writing, "wb") as stream:  # noqa: PTH123  (a file descriptor)
        stream.write(b"".join(map(frame, messages)) + b"\x05")
    with open(reading, "rb") as stream:  # noqa: PTH123
        assert [receive(stream) for _ in messages] == messages
        assert receive(stream) is None  # cut off


@pytest.mark.long
def test_hundred_held_out_prompts_with_two_processes() -> None:
    prompts, params = [p.prompt for p in held_out_prompts(100)], SamplingParams(temperature=0, max_tokens=24)
    alone = tokens(LLM("minicoder", enforce_eager=True, device="cpu"), params, prompts)
    assert tokens(LLM("minicoder", tensor_parallel_size=2, device="cpu"), params, prompts) == alone


@pytest.mark.long
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_hundred_held_out_prompts_with_four_processes(kv_heads: int, tmp_path: Path) -> None:
    """With two KV heads, two ranks hold each."""
    tokenizer = train_tokenizer(TEXTS, 300)
    save_llama(random_model(0, 64, 2, 8, kv_heads), tmp_path, torch.float32)
    save_tokenizer(tokenizer, tmp_path, 256)
    prompts, params = [p.prompt[:200] for p in held_out_prompts(100)], SamplingParams(temperature=0, max_tokens=24)
    alone = tokens(LLM(str(tmp_path), enforce_eager=True, device="cpu"), params, prompts)
    assert tokens(LLM(str(tmp_path), tensor_parallel_size=4, device="cpu"), params, prompts) == alone


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def is_alive(pid: int) -> bool:
    """Whether it runs: a process that has ended but was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_options_of_the_cache_reach_all_ranks(tiny: TinyPair) -> None:
    """A layout given as a class, and groups of another size: half of the heads would be stored otherwise."""
    options = {"kv_cache_config": {"layout": PagedInt4KVCache, "group_size": 4}}
    one = tokens(LLM(str(tiny.target), enforce_eager=True, device="cpu", **options), GREEDY)
    assert tokens(LLM(str(tiny.target), tensor_parallel_size=2, device="cpu", **options), GREEDY) == one
