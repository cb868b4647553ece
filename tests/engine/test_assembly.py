"""What an engine computes in, and what it keeps its weights in: two things, and one must not leak into the other."""

from __future__ import annotations

import json
import shutil
import warnings
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from minillm import LLM, SamplingParams, hardware
from minillm.cache.paged import PagedKVCache
from minillm.config import CacheConfig, EngineArgs
from minillm.engine import assembly, placement, runner_plans
from minillm.errors import CheckpointError, ConfigError, TokenizerMismatchError, UnsupportedError
from minillm.models import bundled
from minillm.models.calibration import CalibrationTexts
from minillm.models.decoder import Decoder
from minillm.models.loading import load_config, load_model, save_llama
from minillm.ops.cpu.simd import BFLOAT, BFLOAT_PAIRS
from minillm.ops.paged_attention import paged_attention
from minillm.quantization.base import QuantizedLinear
from minillm.quantization.int8 import Int8
from minillm.runtime import cpu_executor, packed_decoder
from minillm.runtime.cpu_executor import CpuExecutor
from minillm.runtime.runner import ModelRunner
from minillm.speculative.draft_heads import HeadsShape
from minillm.speculative.long_model import LongShape
from minillm.speculative.prompt_tokens import PromptTokensShape
from minillm.speculative.spire_model import SpireShape
from tests.conftest import TinyPair
from tests.engine.tiny_engines import pair

PROMPTS = ["def add(a, b):", "for line in"]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
DRAFTS = 3
CACHE_BYTES = 2**20
"""For keys and values of both models, which have one shape: 64 blocks each if their numbers have 4 bytes."""
TOO_SMALL_FOR_FLOAT16 = 2.0**-40
"""One in each matrix: the narrowest floats that hold it exactly are bfloat16's, and there is no second choice."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same target and draft in bfloat16, and upcast to float32: every number is equal."""
    root = tmp_path_factory.mktemp("dtypes")
    for name, (folder, _) in pair(compiled=True).items():
        for dtype in ("bfloat16", "float32"):
            shutil.copytree(folder, root / f"{name} {dtype}")
        model = load_model(folder, torch.bfloat16)
        for parameter in model.parameters():
            parameter.view(-1)[0] = TOO_SMALL_FOR_FLOAT16
        save_llama(model, root / f"{name} bfloat16", torch.bfloat16)
        save_llama(model, root / f"{name} float32", torch.float32)
    return {folder.name: folder for folder in root.iterdir()}


def make(folders: dict[str, Path], stored: str, **options: Any) -> LLM:
    """An engine with a draft, so that both models are looked at."""
    speculative = {"model": str(folders[f"draft {stored}"]), "num_speculative_tokens": DRAFTS}
    memory = {"kv_cache_memory_bytes": CACHE_BYTES}
    return LLM(str(folders[f"target {stored}"]), device="cpu", speculative_config=speculative, **memory, **options)


def runners(llm: LLM) -> list[ModelRunner]:
    assert llm.engine.drafter is not None
    return [llm.engine.runner, llm.engine.drafter.runner]


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def in_float32(runner: ModelRunner) -> bool:
    """Whether the cache and all that is left of the model are."""
    weights = {parameter.dtype for parameter in runner.model.parameters()}
    return weights == {torch.float32} and {runner.cache.keys.dtype, runner.cache.values.dtype} == {torch.float32}


def attention(*args: Any) -> Tensor:
    """Somebody's own operation: the compiled step does not call it, so the engine stays in PyTorch."""
    return paged_attention(*args)


def test_16_bit_weights_give_the_tokens_of_the_same_weights_in_32_bits(folders: dict[str, Path]) -> None:
    narrow, wide = make(folders, "bfloat16"), make(folders, "float32")
    for mine, others in zip(runners(narrow), runners(wide), strict=True):
        assert isinstance(mine.executor, CpuExecutor) and in_float32(mine)
        assert mine.executor.packed.weights.dtype == BFLOAT
        for part in ("weights", "head", "embedding", "vectors", "matrices", "layers"):
            assert np.array_equal(getattr(mine.executor.packed, part), getattr(others.executor.packed, part)), part
        assert mine.cache.num_bytes == CACHE_BYTES / 2
    assert tokens(narrow) == tokens(wide)


@pytest.mark.parametrize(
    "options",
    [{"enforce_eager": True}, {"ops": {"paged_attention": attention}}],
    ids=["eager", "an op replaced"],
)
def test_who_stays_in_pytorch_computes_in_float32(folders: dict[str, Path], options: dict[str, Any]) -> None:
    plain = make(folders, "bfloat16", **options)
    assert all(runner.executor is None and in_float32(runner) for runner in runners(plain))
    assert tokens(plain) == tokens(make(folders, "float32", **options))


def test_where_nothing_is_compiled_the_engine_computes_in_float32(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_executor, "unsupported_reason", lambda *_: "not here")
    assert all(runner.executor is None and in_float32(runner) for runner in runners(make(folders, "bfloat16")))


def test_bfloat16_that_is_asked_for_is_what_is_computed_in(folders: dict[str, Path]) -> None:
    for runner in runners(make(folders, "bfloat16", dtype="bfloat16")):
        assert isinstance(runner.executor, CpuExecutor)
        assert runner.executor.packed.weights.dtype == BFLOAT_PAIRS  # for activations in bfloat16
        assert runner.cache.keys.dtype == torch.bfloat16
    for runner in runners(make(folders, "bfloat16", dtype="bfloat16", enforce_eager=True)):
        assert runner.executor is None
        assert {parameter.dtype for parameter in runner.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
def test_the_weights_are_never_there_twice(
    quantization: str | None, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a matrix is packed, all before it are gone, and none is in more bytes than the file has."""
    matrices: list[weakref.ref[Tensor]] = []
    num_alive: list[int] = []

    def before(name: str, owner: Any, look: Callable[[Any], None]) -> None:
        really = getattr(owner, name)

        def watched(first: Any, *others: Any, **options: Any) -> Any:
            look(first)
            return really(first, *others, **options)

        monkeypatch.setattr(owner, name, watched)

    def find(model: nn.Module) -> None:
        if not matrices:
            tensors = [*model.named_parameters(), *model.named_buffers()]
            found = [t for name, t in tensors if t.ndim == 2 and "rope" not in name]
            assert {t.dtype.itemsize for t in found} <= {1, 2}
            matrices.extend(map(weakref.ref, found))

    def count_left(_: Any) -> None:
        num_alive.append(sum(matrix() is not None for matrix in matrices))

    before("_pack_matrices", packed_decoder, find)
    before("pack_int8", packed_decoder, count_left)
    before("pack_floats", packed_decoder, count_left)
    before("pack_pairs", packed_decoder, count_left)
    before("warm_up", CpuExecutor, count_left)
    LLM(str(folders["target bfloat16"]), device="cpu", quantization=quantization)
    # Eight of the layers, embedding, unembedding. The embedding is taken over when the layers are packed.
    assert num_alive == [10, 9, 8, 7, 6, 5, 4, 3, 1, 0]


@pytest.mark.parametrize(("quantization", "rounded"), [(None, False), ("int4", False), ("int8", True), ("w8a8", True)])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_an_unembedding_is_rounded_where_weights_have_eight_bits(
    which: str, quantization: str | None, rounded: bool, tiny: TinyPair
) -> None:
    """In plain PyTorch as in the compiled step, or the two would not write the same; its inputs stay as they are."""
    speculative = {"model": str(tiny.draft), "quantization": quantization if which == "draft" else None}
    own = quantization if which == "target" else None
    llm = LLM(str(tiny.target), quantization=own, speculative_config=speculative, enforce_eager=True)
    runner = llm.engine.runner if which == "target" else llm.engine.drafter.runner
    head = runner.model.lm_head
    assert (isinstance(head, QuantizedLinear) and type(head.scheme) is Int8) is rounded
    other = llm.engine.drafter.runner if which == "target" else llm.engine.runner
    assert not isinstance(other.model.lm_head, QuantizedLinear)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float16"}, "runs models in float32 or bfloat16 on a CPU, and this one is in float16"),
        ({}, r"hidden size 48 and .* head size 16 of 32"),
    ],
)
def test_a_cpu_says_why_the_step_is_not_compiled_for_a_model(
    tiny: TinyPair, options: dict[str, Any], reason: str
) -> None:
    words = f"the CPU runs plain PyTorch, which is correct but slower: .*{reason}.*; choose another dtype or model, or"
    with pytest.warns(UserWarning, match=words):
        LLM(tiny.target, device="cpu", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"kv_cache_config": {"layout": "sinks", "window": 28}},
        {"ops": {"paged_attention": partial(paged_attention)}, "dtype": "float16"},
        {"dtype": "float32"},
    ],
    ids=["eager", "a layout", "an op of the user", "nothing is missing"],
)
def test_a_cpu_says_nothing_where_pytorch_was_chosen_or_is_not_needed(
    tiny: TinyPair, folders: dict[str, Path], options: dict[str, Any]
) -> None:
    folder = folders["target float32"] if options == {"dtype": "float32"} else tiny.target
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(folder, device="cpu", **options)


def test_a_cpu_says_nothing_where_the_machine_lacks_something(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor says that."""
    monkeypatch.setattr(ModelRunner, "unsupported_reason", lambda self: "numba cannot be imported")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(tiny.target, device="cpu")


@pytest.mark.parametrize(
    ("reason", "runs_kernels", "is_told"),
    [("another format", True, False), ("an old GPU", False, True), (None, True, True)],
    ids=["a layout", "the machine", "the compiler"],
)
def test_a_gpu_says_why_it_falls_back_unless_that_was_chosen(
    reason: str | None, runs_kernels: bool, is_told: bool, tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_plans, "triton_runs", lambda device: runs_kernels)
    monkeypatch.setattr(ModelRunner, "unsupported_reason", lambda self: reason)
    monkeypatch.setattr(ModelRunner, "use_executor", lambda *_: "no compiler")
    place = placement.Placement(torch.float32, torch.device("cuda"), may_move_weights=True)
    plans = runner_plans.RunnerPlans(place, 16, PagedKVCache, CacheConfig(), CalibrationTexts(None))
    plans.new_runner(load_model(tiny.target, torch.float32)).device = place.device
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plans.use_executors(1, 64)
    words = f"the GPU runs plain PyTorch, which is correct but slower: {reason or 'no compiler'}; run `minillm doctor`"
    assert [str(warning.message).startswith(words) for warning in told] == [True] * is_told


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried"),
        MemoryError(),
    ],
    ids=["Linux, macOS", "Windows", "Python"],
)
def test_memory_that_the_system_does_not_give_is_told_with_its_size(
    tiny: TinyPair, problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the process, such as `ulimit -v`, is not seen in the free memory."""

    def refuse(*_: Any, **__: Any) -> None:
        raise problem

    monkeypatch.setattr(PagedKVCache, "__init__", refuse)
    with pytest.raises(ConfigError, match=r"20 cache blocks need \d+ MiB, which the system does not give this process"):
        LLM(str(tiny.target), device="cpu", num_kv_blocks=20)


@pytest.mark.parametrize("num_blocks", [10**16, 10**18, 10**20], ids=str)
def test_more_memory_than_there_is_or_than_pytorch_can_count_is_told_with_its_size(
    tiny: TinyPair, num_blocks: int
) -> None:
    with pytest.raises(ConfigError, match=f"{num_blocks} cache blocks need "):
        LLM(str(tiny.target), device="cpu", num_kv_blocks=num_blocks)


@pytest.fixture
def unlike(tiny: TinyPair, tmp_path: Path) -> Callable[..., Path]:
    """Saves a draft model with the target's tokenizer whose config has these values."""

    def save(**values: Any) -> Path:
        config = replace(load_config(tiny.draft), **values)
        shutil.copytree(tiny.draft, tmp_path / "draft")
        save_llama(Decoder(config), tmp_path / "draft", torch.float32)
        return tmp_path / "draft"

    return save


def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is loaded."""
    monkeypatch.setattr(placement, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.parametrize("method", ["draft_model", "draft_tree", "staged"])
def test_a_draft_with_another_tokenizer_is_refused(
    method: str, tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_loads(monkeypatch)
    with pytest.raises(TokenizerMismatchError, match="'minicoder-draft' has another tokenizer than the target"):
        LLM(str(tiny.target), speculative_config={"method": method, "model": "minicoder-draft"})


def test_a_draft_with_another_number_of_logits_is_refused(
    tiny: TinyPair, unlike: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer is the target's: only the padding of the vocabulary differs."""
    folder = unlike(vocab_size=320)
    nothing_loads(monkeypatch)
    with pytest.raises(TokenizerMismatchError, match=rf"'{folder}' has 320 logits, the target 300; use a draft model"):
        LLM(str(tiny.target), speculative_config={"model": str(folder)})


def test_a_draft_with_a_shorter_context_is_refused(
    tiny: TinyPair, unlike: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unlike(max_position_embeddings=128)
    for most, words in ((None, 256), (129, 129)):
        told = f"context of 128 tokens, less than max_model_len={words}; lower max_mod"
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=told):
            nothing_loads(patch)
            LLM(str(tiny.target), speculative_config={"model": str(folder)}, max_model_len=most)
    assert LLM(str(tiny.target), speculative_config={"model": str(folder)}, max_model_len=128).max_model_len == 128


def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that PyTorch sees a full, old GPU 0 and an empty, new GPU 1."""
    free, cards = (0, 2**30), (SimpleNamespace(major=7, minor=5), SimpleNamespace(major=8, minor=0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[_index(device)], 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: cards[_index(device)])


def _index(device: Any) -> int:
    """Of the GPU that PyTorch means by `device`; None is the current one, here the first."""
    return torch.device(device if device is not None else "cuda:0").index or 0


def test_the_blocks_are_counted_in_the_memory_of_the_gpu_that_will_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch)
    args = EngineArgs(model="", gpu_memory_utilization=0.5, max_num_seqs=1024, block_size=16)
    assert assembly._num_blocks(args, 2**20, 4096, torch.device("cuda:1")) == 512
    with pytest.raises(
        ConfigError, match=r"a cache of 0 bytes holds no block .* raise gpu_memory_utilization or lower b"
    ):
        assembly._num_blocks(args, 2**20, 4096, torch.device("cuda:0"))
    with pytest.raises(
        ConfigError, match=r"a cache of 9 bytes holds no block .* raise kv_cache_memory_bytes or lower b"
    ):
        assembly._num_blocks(replace(args, kv_cache_memory_bytes=9), 2**20, 4096, torch.device("cuda:0"))


def test_memory_that_pytorch_keeps_of_an_engine_before_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts it as used until PyTorch gives it back."""
    kept = [1000 * 2**20]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30 - sum(kept), 2**30))
    args = EngineArgs(model="", gpu_memory_utilization=0.5, max_num_seqs=1024, block_size=16)
    assert assembly._num_blocks(args, 2**20, 4096, torch.device("cuda")) == 512


@pytest.mark.parametrize("needed", [2**31, 2**63])  # the second is more than PyTorch can count
def test_a_cache_that_a_gpu_has_no_memory_for_is_told_with_what_is_free(
    needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus(monkeypatch)
    with pytest.raises(ConfigError) as told, runner_plans.memory_for(20, needed, torch.device("cuda:1")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    expected = f"20 cache blocks need {needed / 2**20:,.0f} MiB, and cuda:1 has 1,024 MiB free; lower num_kv_blocks,"
    assert str(told.value) == f"{expected} kv_cache_memory_bytes or max_model_len"


def test_each_cache_is_on_the_device_of_its_model(tiny: TinyPair) -> None:
    """That of a tensor-parallel rank has the number of the rank, whatever number `device` has."""
    place = placement.Placement(torch.float32, torch.device("meta"), may_move_weights=False)
    plans = runner_plans.RunnerPlans(place, 16, PagedKVCache, CacheConfig(), CalibrationTexts(None))
    runner = plans.new_runner(load_model(tiny.target, torch.float32))
    plans.allocate(2)
    assert runner.cache.keys.device == runner.device == torch.device("cpu")


NO_CODE = "CUDA error: no kernel image is available for execution on the device"


@pytest.fixture
def unusable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that PyTorch counts a GPU that its build has no code for."""
    really = torch.ones

    def ones(*shape: int, device: torch.device, **options: Any) -> Tensor:
        if device.type == "cuda":
            raise RuntimeError(f"{NO_CODE}\nCUDA kernel errors might be asynchronously reported")
        return really(*shape, device=device, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", ones)


def test_a_gpu_that_cannot_be_used_is_left_out_with_a_warning(unusable_gpu: None) -> None:
    with pytest.warns(UserWarning, match=rf"the GPU cannot be used \({NO_CODE}\); say device='cpu'"):
        assert placement.choose_device("auto") == torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert placement.choose_device("cpu") == torch.device("cpu")


def test_a_gpu_that_is_named_and_cannot_be_used_is_refused(unusable_gpu: None) -> None:
    with pytest.raises(ConfigError, match=rf"device='cuda:0' cannot be used here \({NO_CODE}\); use 'cpu'"):
        placement.choose_device("cuda:0")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mps", "device='mps' is not supported; use 'cpu' or 'cuda'"),
        ("gpu", r"device='gpu' cannot be used here \(Expected one of cpu, cuda"),
        (None, "device=None cannot be used here"),
    ],
)
def test_another_device_than_a_cpu_or_a_cuda_gpu_is_refused(name: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        placement.choose_device(name)


def test_a_gpu_that_can_be_used_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(placement.hardware, "unusable_reason", lambda name: None)
    assert placement.choose_device("auto") == torch.device("cuda")
    assert placement.choose_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize("free, num_blocks", [(80 * 2**20, 10), (8 * 2**30, 4 * 256)])
def test_on_a_cpu_the_cache_takes_an_eighth_of_the_memory_that_is_free_or_what_requests_can_fill(
    monkeypatch: pytest.MonkeyPatch, free: int, num_blocks: int
) -> None:
    monkeypatch.setattr(assembly.hardware, "memory", lambda: hardware.Memory(2**40, free))
    args = EngineArgs(model="", max_num_seqs=4, block_size=16)
    bytes_per_block = 2**20 if num_blocks == 10 else 2**10
    assert assembly._num_blocks(args, bytes_per_block, 4096, torch.device("cpu")) == num_blocks


def test_the_gpu_of_the_model_decides_whether_there_is_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch)
    config = replace(load_config(bundled.path("minicoder")), dtype="bfloat16")
    assert placement.choose_dtype("auto", torch.device("cuda:1"), config) == torch.bfloat16
    assert placement.choose_dtype("auto", torch.device("cuda:0"), config) == torch.float16


@pytest.mark.parametrize(
    ("speculation", "error", "words"),
    [
        ({"model": "nowhere-draft"}, CheckpointError, "no model 'nowhere-draft'"),
        ({"model": "minicoder-draft", "quantization": "int3"}, UnsupportedError, "quantization='int3'"),
        ({"method": "staged", "model": "nowhere-draft"}, CheckpointError, "no model 'nowhere-draft'"),
        ({"method": "draft_tree", "model": "nowhere-draft"}, CheckpointError, "no model 'nowhere-draft'"),
        ({"method": "self_quant", "quantization": "int3"}, UnsupportedError, "quantization='int3'"),
        ({"method": "self_sparse", "budget": 8}, ConfigError, "budget=8 must be above block_size=16"),
        ({"method": "heads", "model": "nowhere"}, CheckpointError, "'nowhere' of speculative method 'heads'"),
        ({"method": "heads"}, ConfigError, "'heads' needs 'model'"),
        ({"method": "prompt_tokens"}, ConfigError, "'prompt_tokens' needs 'model'"),
        ({"method": "ngram", "fallback": {"method": "heads"}}, ConfigError, "'heads' needs 'model'"),
    ],
)
def test_options_of_drafters_are_checked_before_any_model_is_loaded(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any], error: type[Exception], words: str
) -> None:
    nothing_loads(monkeypatch)
    with pytest.raises(error, match=words):
        LLM(str(tiny.target), speculative_config=speculation)


@pytest.mark.parametrize(
    ("speculation", "most"),
    [
        ({"method": "draft_tree", "model": "minicoder-draft", "num_speculative_tokens": 20}, 14),
        ({"method": "heads", "num_speculative_tokens": 6}, 5),
        ({"method": "prompt_tokens", "num_speculative_tokens": 5}, 4),
        ({"method": "ngram", "fallback": {"method": "heads", "num_speculative_tokens": 6}}, 5),
    ],
)
def test_more_drafts_than_a_method_can_propose_are_refused_before_any_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any], most: int
) -> None:
    nothing_loads(monkeypatch)
    with pytest.raises(ConfigError, match=rf"num_speculative_tokens=\d+ is more than this .* per round, {most}; lower"):
        LLM("minicoder", speculative_config=speculation)


@pytest.mark.parametrize("method", ["heads", "prompt_tokens", "spire", "long"])
def test_a_drafter_that_was_trained_for_another_target_is_refused_before_any_model_is_loaded(
    tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Weights are not needed for that."""
    shapes = {"heads": HeadsShape, "prompt_tokens": PromptTokensShape, "spire": SpireShape, "long": LongShape}
    nothing_loads(monkeypatch)
    own = load_config(tiny.target)
    for hidden_size, vocab_size, error, words in (
        (own.hidden_size + 8, own.vocab_size, ConfigError, "a target with hidden size"),
        (own.hidden_size, own.vocab_size + 1, TokenizerMismatchError, "a vocabulary of 301 tokens, the target has 300"),
    ):
        shape = asdict(shapes[method](hidden_size=hidden_size))
        content = {"method": method, "target": "another", "target_fingerprint": "", "vocab_size": vocab_size}
        (tmp_path / "config.json").write_text(json.dumps({**content, "shape": shape}))
        with pytest.raises(error, match=words):
            LLM(str(tiny.target), speculative_config={"method": method, "model": str(tmp_path)})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kv_cache_config": {"layout": "snapkv", "budget": 10}}, ConfigError, "budget=10 must be above window=32"),
        ({"kv_cache_config": {"layout": "sinks", "window": 0}}, ConfigError, "window=0 must be"),
        ({"kv_cache_config": {"layout": "lorc", "key_share": [0.5]}}, ConfigError, "key_share has 1 numbers for 2 la"),
        ({"ops": {"paged_atention": paged_attention}}, UnsupportedError, "can replace: paged_attention, tree_attenti"),
        ({"ops": {"x": print}, "kv_cache_config": {"layout": "sinks"}}, UnsupportedError, "it can replace: nothing"),
    ],
)
def test_options_of_the_cache_are_checked_before_any_model_is_loaded(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    nothing_loads(monkeypatch)
    with pytest.raises(error, match=words):
        LLM(str(tiny.target), **options)
