"""The compiled step against plain PyTorch, for every option of the architecture, every cache and kind of weights."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numba import typeof
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.cache.base import KVCache
from minillm.cache.contiguous import ContiguousKVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.errors import NonFiniteLogitsError, UnsupportedError
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.decoder import Decoder
from minillm.models.held_out import held_out_prompts
from minillm.models.quantize import Calibration, decoder_linears, quantize_model, quantize_unembedding
from minillm.ops.cpu import launch, panels
from minillm.ops.cpu.nibbles import FLOAT_NIBBLES, pack_nibbles
from minillm.ops.cpu.processor import processor
from minillm.ops.cpu.register_tiles import PMADDWD
from minillm.ops.cpu.simd import BFLOAT, HALF, WORDS
from minillm.ops.cpu.step import areas
from minillm.quantization.awq import AWQ
from minillm.quantization.base import LayerStatistics, QuantizedLinear, Scheme
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.squeezellm import SqueezeLLM
from minillm.quantization.w8a8 import W8A8
from minillm.runtime import packed_decoder
from minillm.runtime.cpu_executor import CpuExecutor, unsupported_reason
from minillm.runtime.packed_decoder import PACKED_ROWS, FloatPacking
from minillm.runtime.runner import ModelRunner

PLAIN = ModelConfig(97, 64, 96, 3, 4, 2, 32, 64, rope=RopeConfig())
SHAPES = {
    "plain": PLAIN,
    "tied": replace(PLAIN, tie_word_embeddings=True),
    "biases": replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True),
    "normalised heads": replace(PLAIN, qk_norm=True),
    "window in some layers": replace(PLAIN, sliding_window=5, sliding_layers=(True, False, True)),
    "no rope in some layers": replace(PLAIN, rope_layers=(True, False, True)),
    "other sizes": replace(PLAIN, vocab_size=130, hidden_size=80, intermediate_size=48, num_heads=3, num_kv_heads=1),
    "wide heads": replace(PLAIN, head_dim=96, num_kv_heads=4),
}
CACHES: list[type[KVCache]] = [PagedKVCache, PagedInt8KVCache, PagedInt4KVCache]
GROUPED: list[Scheme] = [Int4(group_size=64), Int4(group_size=16), AWQ(bits=4, group_size=64), AWQ(bits=3)]
"""Groups that divide the intermediate size, 96, that do not, and that are longer than any row."""
BLOCK_SIZE, BLOCKS = 4, 40
PROMPT, OTHER = list(range(3, 25)), [9, 4, 1, 7, 7, 2, 60]
TABLE, OTHERS_TABLE = [7, 3, 11, 0, 30, 2, 19, 20], [5, 6, 12, 39]


def random_model(config: ModelConfig, seed: int = 0, numbers: torch.dtype = torch.bfloat16) -> Decoder:
    """Return a model with every parameter random, so that a forgotten bias or norm shows.

    It computes in float32, and its weights are numbers of the type `numbers`, like those of a checkpoint.
    """
    torch.manual_seed(seed)
    model = Decoder(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
        parameter.copy_(parameter.to(numbers))
        if numbers is torch.bfloat16 and parameter.ndim == 2:
            parameter[0, 0] = 2.0**-30  # no float16 number: a step for matrices in float16 would be compiled besides
    model.tie()
    return model.eval()


def runner_of(model: Decoder, layout: type[KVCache] = PagedKVCache, fast: bool = True) -> ModelRunner:
    """A runner with its own cache, filled with NaN, and a copy of the model, because an executor empties the model."""
    model = deepcopy(model)
    cache = layout(model.config, BLOCKS, BLOCK_SIZE, model.norm.weight.dtype, torch.device("cpu"))
    for pool in (cache.keys, cache.values) if layout is PagedKVCache else ():
        pool.fill_(torch.nan)
    runner = ModelRunner(model, cache, BLOCK_SIZE)
    if fast:
        assert runner.use_executor() is None
    return runner


def steps() -> list[list[Segment]]:
    """Three steps: a prefill and a chunk of another; a decode and the last chunk; a verification and a decode."""
    return [
        [Segment(PROMPT, 0, TABLE, 2), Segment(OTHER[:4], 0, OTHERS_TABLE, 0)],
        [Segment([50], 22, TABLE), Segment(OTHER[4:], 4, OTHERS_TABLE, 3)],
        [Segment([51, 52, 53, 54, 55], 23, TABLE, 5), Segment([80], 7, OTHERS_TABLE)],
    ]


def outputs(runner: ModelRunner) -> torch.Tensor:
    return torch.cat([runner.run(step) for step in steps()])


def relative(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got - right).norm() / right.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_architecture_gives_the_logits_of_plain_pytorch(shape: str) -> None:
    model = random_model(SHAPES[shape])
    assert relative(outputs(runner_of(model)), outputs(runner_of(model, fast=False))) < 1e-5


def rounded(model: Decoder) -> tuple[Decoder, Decoder]:
    """The model in bfloat16, and with the same rounded weights in float32."""
    model = model.bfloat16()
    return model, deepcopy(model).float()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_bfloat_model_is_nearer_to_float32_than_plain_pytorch_in_bfloat(shape: str) -> None:
    """Both round activations before products; PyTorch also rounds the results, the residual stream and the norms."""
    model, exact = rounded(random_model(SHAPES[shape]))
    right = outputs(runner_of(exact, fast=False))
    got, plain = outputs(runner_of(model)), outputs(runner_of(model, fast=False)).float()
    assert 1e-4 < relative(got, right) < 0.02
    assert relative(got, right) < relative(plain, right)


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [(Int8(), PagedInt8KVCache), *((grouped, PagedInt4KVCache) for grouped in GROUPED), (W8A8(), PagedKVCache)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_quantised_weights_in_a_bfloat_model_give_nearly_their_logits_in_float32(
    scheme: Scheme, layout: type[KVCache]
) -> None:
    """Each cache is tried beside some weights: every pair is compiled anew."""
    model = quantized(scheme, dtype=torch.bfloat16)
    plain, fast = runner_of(model, layout, fast=False), runner_of(model, layout)
    right = outputs(plain).float()
    lost = relative(right, outputs(runner_of(model, fast=False)).float())  # by the cache alone
    assert relative(outputs(fast), right) < 0.03 + lost


def test_a_bfloat_model_gives_the_same_bits_for_a_request_alone_in_a_batch_and_in_chunks() -> None:
    model, _ = rounded(random_model(PLAIN))
    together = outputs(runner_of(model))
    alone, whole = runner_of(model), runner_of(model)
    separate = [alone.run([segment]) for step in steps() for segment in step]
    assert torch.equal(torch.cat(separate), together)
    assert torch.equal(whole.run([Segment(OTHER, 0, OTHERS_TABLE, 3)]), together[3:6])


@pytest.mark.parametrize("layout", CACHES[1:])
def test_quantised_caches_give_the_logits_of_plain_pytorch(layout: type[KVCache]) -> None:
    # Only numbers on the border between two codes may differ: they may be rounded to either.
    model = random_model(PLAIN)
    got, right = outputs(runner_of(model, layout)), outputs(runner_of(model, layout, fast=False))
    exact = outputs(runner_of(model, fast=False))
    assert relative(got, right) < 0.2 * relative(right, exact)


def quantized(scheme: Scheme, config: ModelConfig = PLAIN, dtype: torch.dtype = torch.float32) -> Decoder:
    """A random model with weights of this scheme, quantised with random calibration statistics; in 8 bits with the
    unembedding that the engine gives it, in 8 bits too."""
    model = random_model(config).to(dtype)
    torch.manual_seed(1)

    def statistics(weight: torch.Tensor) -> LayerStatistics:
        columns = weight.shape[1]
        return LayerStatistics(torch.randn(40, columns), torch.rand(columns) * 4 + 0.1, torch.rand(weight.shape))

    seen = {name: statistics(linear.weight) for name, linear in decoder_linears(model)}
    quantize_model(model, scheme, Calibration(scheme.needs, 40, seen))
    return quantize_unembedding(model, Int8()) if isinstance(scheme, Int8) else model


@pytest.mark.parametrize("scheme", [Int8(), *GROUPED, W8A8()], ids=str)
def test_quantised_weights_give_the_logits_of_plain_pytorch(scheme: Scheme) -> None:
    exact = outputs(runner_of(random_model(PLAIN), fast=False))
    model = quantized(scheme)
    got, right = outputs(runner_of(model)), outputs(runner_of(model, fast=False))
    assert relative(got, right) < (0.5 * relative(right, exact) if type(scheme) is W8A8 else 1e-4)


@pytest.mark.parametrize("scheme", [Int8(), *GROUPED], ids=str)
def test_a_processor_without_products_of_bytes_multiplies_floats(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (packed_decoder, panels):
        monkeypatch.setattr(module, "has_byte_products", lambda: False)
    monkeypatch.setattr(panels, "processor", lambda: replace(processor(), byte_products=None))
    model = quantized(scheme, SHAPES["biases"])
    fast = runner_of(model)
    assert isinstance(fast.executor, CpuExecutor)
    assert fast.executor.packed.weights.dtype == (np.int8 if type(scheme) is Int8 else FLOAT_NIBBLES)
    assert relative(outputs(fast), outputs(runner_of(model, fast=False))) < 1e-5


@pytest.mark.skipif(processor().byte_lanes not in PMADDWD, reason="this processor has no vpmaddwd")
def test_a_processor_that_multiplies_pairs_of_words_rounds_to_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "has_byte_products", lambda: False)
    monkeypatch.setattr(panels, "processor", lambda: replace(processor(), byte_products="vpmaddwd"))
    model = quantized(Int8(), SHAPES["biases"])
    fast = runner_of(model)
    assert isinstance(fast.executor, CpuExecutor) and fast.executor.packed.weights.dtype == WORDS
    assert 0 < relative(outputs(fast), outputs(runner_of(model, fast=False))) < 1e-4


def test_a_quantised_cache_works_beside_weights_of_four_bits() -> None:
    model = quantized(Int4(group_size=64))
    got, right = outputs(runner_of(model, PagedInt8KVCache)), outputs(runner_of(model, PagedInt8KVCache, fast=False))
    exact = outputs(runner_of(model, fast=False))
    assert relative(got, right) < 0.2 * relative(right, exact)


def test_weights_of_four_bits_stay_packed_and_are_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take 5 bits each in groups of 32. When a matrix is packed, those before it have left the model."""
    left: list[int] = []

    def watched(*arguments: Any) -> np.ndarray:
        left.append(sum(isinstance(module, QuantizedLinear) for module in model.modules()))
        return pack_nibbles(*arguments)

    monkeypatch.setattr(packed_decoder, "pack_nibbles", watched)
    model = quantized(Int4(group_size=32), replace(PLAIN, hidden_size=128, intermediate_size=128))
    count = sum(linear.in_features * linear.out_features for _, linear in decoder_linears(model))
    cache = PagedKVCache(model.config, BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    executor = CpuExecutor(model, cache, BLOCK_SIZE)
    assert executor.warm_up() is None
    assert executor.packed.weights.nbytes == count * 5 / 8
    assert executor.packed.weights.ctypes.data % 64 == 0
    assert left == list(range(12, 0, -1))
    assert not executor.launcher.choice.recent  # the time of the step that compiled is not recorded


def test_a_second_thread_gets_scratch_memory_of_its_own() -> None:
    cache = PagedKVCache(PLAIN, BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    executor = CpuExecutor(random_model(PLAIN), cache, BLOCK_SIZE)
    executor._make_room(tokens=2, threads=1)
    executor._make_room(tokens=2, threads=2)
    shared = areas.py_func(executor.dims, 2)[-1]
    assert executor.scratch.size >= shared + 2 * executor.thread_size


def test_minicoder_in_four_bits_writes_the_tokens_of_plain_pytorch() -> None:
    """The tokens may differ only where the two largest logits are so close that rounding activations to two bytes can
    swap them: a logit changes by up to 0.0014."""
    fast, plain = (LLM("minicoder", quantization="int4", enforce_eager=eager) for eager in (False, True))
    assert isinstance(fast.engine.runner.executor, CpuExecutor)
    texts = [prompt.prompt for prompt in held_out_prompts(12)]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    pairs = zip(
        fast.generate(texts, greedy, use_tqdm=False), plain.generate(texts, greedy, use_tqdm=False), strict=True
    )
    num_same = 0
    for mine, right in pairs:
        got, wanted = mine.outputs[0].token_ids, right.outputs[0].token_ids
        if got == wanted:
            num_same += 1
            continue
        split = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
        ids = [*right.prompt_token_ids, *wanted[:split]]
        logits = plain.engine.runner.run([Segment(ids, 0, list(range(-(-len(ids) // 16))))])[0]
        assert logits[wanted[split]] - logits[got[split]] < 3e-3
    assert num_same >= 11


def test_the_cache_holds_the_keys_and_values_of_plain_pytorch() -> None:
    model = random_model(PLAIN)
    fast, plain = runner_of(model), runner_of(model, fast=False)
    outputs(fast), outputs(plain)
    for mine, right in ((fast.cache.keys, plain.cache.keys), (fast.cache.values, plain.cache.values)):
        filled = ~right[0, :, 0, 0].isnan()
        assert relative(mine[:, filled], right[:, filled]) < 1e-5


@pytest.mark.parametrize("layout", CACHES)
def test_using_an_executor_leaves_a_filled_cache_as_it_is(layout: type[KVCache]) -> None:
    runner = runner_of(random_model(PLAIN), layout, fast=False)
    outputs(runner)
    rows = runner.cache.stored_rows()
    stored = [*rows.keys, *rows.values]
    before = [part.view(torch.uint8).clone() for part in stored]
    assert runner.use_executor() is None
    assert all(torch.equal(part.view(torch.uint8), old) for part, old in zip(stored, before, strict=True))


def test_compiled_steps_continue_from_a_cache_that_plain_steps_filled() -> None:
    model = random_model(PLAIN)
    plain, fast = runner_of(model, fast=False), runner_of(model)
    first, *others = steps()
    plain.run(first)
    fast.cache.keys.copy_(plain.cache.keys)
    fast.cache.values.copy_(plain.cache.values)
    for step in others:
        assert relative(fast.run(step), plain.run(step)) < 1e-5


def test_the_weights_move_and_the_empty_layers_raise() -> None:
    runner = runner_of(random_model(PLAIN))
    assert not [name for name, p in runner.model.named_parameters() if p.ndim == 2]
    with pytest.raises(UnsupportedError, match="enforce_eager=True"):
        runner.model.lm_head(torch.zeros(1, 64))


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [*((layout, None) for layout in CACHES), *((PagedKVCache, scheme) for scheme in (Int8(), W8A8(), *GROUPED))],
    ids=str,
)
def test_a_token_is_the_same_to_the_last_bit_alone_or_in_a_batch(layout: type[KVCache], scheme: Scheme | None) -> None:
    model = random_model(PLAIN) if scheme is None else quantized(scheme)
    together = outputs(runner_of(model, layout))
    alone = runner_of(model, layout)
    rows = [alone.run([Segment([token], i, TABLE)]) for i, token in enumerate([*PROMPT, 50, 51, 52, 53, 54, 55])]
    assert torch.equal(torch.cat(rows[20:22]), together[:2])
    assert torch.equal(torch.cat(rows[22:23]), together[2:3])
    assert torch.equal(torch.cat(rows[23:28]), together[6:11])


@pytest.mark.parametrize("scheme", [None, Int8(), W8A8(), Int4(group_size=64), torch.bfloat16], ids=str)
@pytest.mark.skipif(launch.NUMBA_NUM_THREADS < 2, reason="numba has one thread here")
def test_two_threads_give_the_same_bits_as_one(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several tokens, and chains drafted in one call."""
    if scheme is torch.bfloat16:
        model = random_model(PLAIN).bfloat16()
    else:
        model = random_model(PLAIN) if scheme is None else quantized(scheme)
    found = []
    for threads in (1, 2):
        runner = runner_of(model)
        monkeypatch.setattr(runner.executor.launcher, "threads", lambda kind, threads=threads: threads)
        logits = outputs(runner)
        chains = runner.draft([Segment(PROMPT, 0, TABLE), Segment(OTHER, 0, OTHERS_TABLE)], 4)
        found.append((logits, chains))
    (one, drafts), (two, same) = found
    assert torch.equal(one, two) and drafts == same


def test_every_call_has_arguments_of_the_same_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads call the machine code that was compiled for the types of the first call."""
    runner, seen = runner_of(random_model(PLAIN)), set()
    launcher = runner.executor.launcher
    call = launcher.call
    monkeypatch.setattr(launcher, "call", lambda *given: seen.add(tuple(map(typeof, given[1:]))) or call(*given))
    outputs(runner)
    runner.run_observed([Segment(PROMPT, 0, TABLE, 2)], [3, 4])
    runner.draft([Segment(PROMPT, 0, TABLE)], 4)
    runner.draft_while_confident([Segment(PROMPT, 0, TABLE)], 4, [1.0], 0.5)
    runner.run([Segment([50, 51, 52, 53], 22, TABLE, 4, [-1, -1, 0])])
    assert runner.run([]).shape == (0, 97)
    assert runner.draft([], 4) == [] and runner.draft_while_confident([], 4, [], 0.5) == ([], [])
    assert runner.draft_while_confident([Segment(PROMPT, 0, TABLE)], 0, [1], 1) == ([[]], [1])
    assert len(seen) == 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("config", [PLAIN, replace(PLAIN, vocab_size=96)], ids=["97 tokens", "96 tokens"])
def test_chains_end_where_their_survival_falls_below_the_limit(
    config: ModelConfig, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """97 tokens leave one behind the last whole vector of logits. The model is scaled, or no token would be likely."""
    if threads > launch.NUMBA_NUM_THREADS:
        pytest.skip("numba has one thread here")
    model = random_model(config)
    model.lm_head.weight.mul_(2)
    runner, plain = runner_of(model), runner_of(model, fast=False)
    monkeypatch.setattr(runner.executor.launcher, "threads", lambda kind: threads)
    segments = [Segment(PROMPT, 0, TABLE), Segment(OTHER, 0, OTHERS_TABLE)]
    lengths = set()
    for so_far in ([1.0, 1.0], [0.5, 1.0]):
        [whole, products] = plain.draft_while_confident(segments, 6, so_far, 1e-9)
        assert whole == plain.draft(segments, 6) == runner.draft_while_confident(segments, 6, so_far, 1e-9)[0]
        # Between the products of all lengths, so that rounding does not decide.
        steps = [plain.draft_while_confident(segments, count, so_far, 1e-9)[1] for count in range(1, 7)]
        assert steps[-1] == products
        bounds = sorted(product for pair in steps for product in pair)
        for limit in [(a * b) ** 0.5 for a, b in itertools.pairwise(bounds) if b / a > 1.01]:
            right = [tokens[: sum(pair[i] >= limit for pair in steps)] for i, tokens in enumerate(whole)]
            found, survival = runner.draft_while_confident(segments, 6, so_far, limit)
            assert found == right and plain.draft_while_confident(segments, 6, so_far, limit)[0] == right
            first_out = [min(len(tokens), 5) for tokens in right]  # the token that was left out, or the last one
            assert survival == pytest.approx([steps[n][i] for i, n in enumerate(first_out)], rel=1e-4)
            lengths |= {len(tokens) for tokens in right}
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_drafting_ends_where_logits_are_broken(fast: bool, broken: float) -> None:
    model = random_model(PLAIN, numbers=torch.float32)
    model.lm_head.weight[5, 3] = broken
    with pytest.raises(NonFiniteLogitsError, match="the draft model gave NaN or infinite logits"):
        runner_of(model, fast=fast).draft([Segment(PROMPT, 0, TABLE)], 3)
    with pytest.raises(NonFiniteLogitsError, match="the draft model gave NaN or infinite logits"):
        runner_of(model, fast=fast).draft_while_confident([Segment(PROMPT, 0, TABLE)], 3, [1.0], 1e-9)


def test_a_step_has_no_more_threads_than_usable_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(launch, "NUMBA_NUM_THREADS", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(launch, "usable_processors", lambda: 1)
    monkeypatch.setattr(launch.Launcher, "call", lambda self, threads, *arguments: used.append(threads) or 1.0)
    outputs(runner_of(random_model(PLAIN)))
    assert set(used) == {1}


def test_steps_that_took_longer_on_two_threads_continue_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def crowded(self: launch.Launcher, threads: int, *arguments: Any) -> float:
        used.append(threads)
        return float(threads)

    monkeypatch.setattr(launch, "NUMBA_NUM_THREADS", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(launch, "usable_processors", lambda: 2)
    monkeypatch.setattr(launch.Launcher, "call", crowded)
    runner = runner_of(random_model(PLAIN))
    for _ in range(20):
        runner.run([Segment([1], 0, [0])])
    assert used[0] == 2 and used.count(1) >= 13


TWO_ENGINES = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
from tests.runtime.test_cpu_executor import PLAIN, outputs, random_model, runner_of
torch.set_num_threads(2)
import minillm.ops.cpu.launch as launch
launch.usable_processors = lambda: 2
runners = [runner_of(random_model(PLAIN)) for _ in range(2)]
right = outputs(runners[0])
with ThreadPoolExecutor(2) as pool:
    for got in pool.map(lambda runner: [outputs(runner) for _ in range(30)], runners):
        assert all(torch.equal(right, one) for one in got)
from numba import threading_layer
print(threading_layer())
"""


def test_without_numba_compiling_the_plain_path_runs() -> None:
    """In a process of its own, which gives the tokens of the compiled step here."""
    code = (
        "import sys; from minillm import LLM, SamplingParams\n"
        "[output] = LLM(sys.argv[1], device='cpu').generate('def f', SamplingParams(temperature=0, max_tokens=12))\n"
        "print(output.outputs[0].token_ids)"
    )
    command, environment = [sys.executable, "-c", code, "minicoder"], {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    llm = LLM("minicoder", device="cpu")
    assert isinstance(llm.engine.runner.executor, CpuExecutor)
    [output] = llm.generate("def f", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert ran.stdout.strip() == str(output.outputs[0].token_ids)


SNAPKV = {"method": "self_sparse", "sparse_layout": "snapkv", "budget": 32, "num_speculative_tokens": 2}
HEADS = {"method": "heads", "num_speculative_tokens": 3}


@pytest.mark.parametrize("speculative", [None, SNAPKV, HEADS])
def test_a_default_device_and_dtype_of_the_process_change_nothing(speculative: dict[str, Any] | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm = LLM("minicoder", device="cpu", speculative_config=speculative)
    [expected] = llm.generate("def f", params, use_tqdm=False)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # as a GPU: what is made there without a device cannot be read here
            [found] = llm.generate("def f", params, use_tqdm=False)
    finally:
        torch.set_default_dtype(dtype)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_two_engines_in_two_threads_of_python_share_numbas_workqueue() -> None:
    """The `workqueue` layer ends the process if two Python threads use it at once. numba uses it where there is no
    OpenMP."""
    environment = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_ENGINES], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("workqueue")


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float16, HALF), (torch.bfloat16, BFLOAT), (torch.float32, np.float32)]
)
def test_weights_are_kept_in_as_few_bytes_as_hold_them_exactly(dtype: torch.dtype, bits: type) -> None:
    model = random_model(PLAIN, numbers=dtype)
    runner = runner_of(model)
    assert isinstance(runner.executor, CpuExecutor)
    assert runner.executor.packed.weights.dtype == bits and runner.executor.packed.head.dtype == bits
    assert relative(outputs(runner), outputs(runner_of(model, fast=False))) < 1e-5


class LargestTensor(TorchDispatchMode):
    """Remembers the most numbers of a tensor that an operation has returned and that has memory of its own."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view:
            self.size = max(self.size, found.numel())
        return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_packing_a_float_matrix_copies_only_some_rows_at_a_time(dtype: torch.dtype, compute: torch.dtype) -> None:
    """A matrix in float32 whose numbers fit into `dtype`."""
    weight = torch.randn(2 * PACKED_ROWS, 32).to(dtype).float()
    with LargestTensor() as largest:
        pack = FloatPacking([weight], compute).row_packer(weight)
        parts = [pack(slice(first, first + PACKED_ROWS)) for first in (0, PACKED_ROWS)]
    assert 0 < largest.size <= PACKED_ROWS * 32
    assert np.array_equal(np.concatenate(parts), pack(slice(None)))


def test_nan_in_a_weight_reaches_the_logits() -> None:
    model = random_model(PLAIN, numbers=torch.float32)
    model.layers[1].mlp.down_proj.weight[5, 3] = torch.nan
    assert outputs(runner_of(model)).isnan().any()


def test_unsupported_models_and_caches_are_refused_with_the_reason() -> None:
    def reason(
        config: ModelConfig = PLAIN, layout=PagedKVCache, dtype=torch.float32, model=None, **options
    ) -> str | None:
        model = model or random_model(config).to(dtype)
        cache = layout(model.config, BLOCKS, BLOCK_SIZE, dtype, torch.device("cpu"), **options)
        return unsupported_reason(model, cache)

    assert reason() is None
    assert "head size 20" in reason(replace(PLAIN, head_dim=20))
    assert reason(dtype=torch.bfloat16) is None
    assert "float16" in reason(dtype=torch.float16)
    assert "ContiguousKVCache" in reason(layout=ContiguousKVCache)
    assert "groups of 8" in reason(layout=PagedInt4KVCache, group_size=8)
    assert "not squeezellm" in reason(model=quantized(SqueezeLLM()))
    assert "int4 weights in groups of a multiple of 16" in reason(model=quantized(Int4(group_size=24)))
    mixed = quantized(Int8())
    mixed.layers[1].o_proj = quantized(Int4()).layers[1].o_proj
    assert "one kind" in reason(model=mixed)
    huge = replace(PLAIN, intermediate_size=4608)
    assert reason(model=quantized(Int4(group_size=4096), huge)) is None
    assert "4096 at most" in reason(model=quantized(Int4(group_size=4608), huge))
    cache = PagedKVCache(PLAIN, BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache.ops = {**cache.ops, "paged_attention": lambda *args: None}
    assert "replaced" in unsupported_reason(random_model(PLAIN), cache)


def test_a_block_table_that_is_too_short_is_refused() -> None:
    runner = runner_of(random_model(PLAIN))
    with pytest.raises(IndexError, match="25 tokens need more than 6 blocks of 4"):
        runner.run([Segment([1] * 25, 0, TABLE[:6])])
    with pytest.raises(IndexError, match="27 tokens need more than 6 blocks of 4"):
        runner.draft([Segment(PROMPT, 0, TABLE[:6])], 6)
    assert len(runner.draft([Segment(PROMPT, 0, TABLE[:6])], 3)[0]) == 3


def test_a_step_without_wanted_rows_gives_no_logits() -> None:
    runner = runner_of(random_model(PLAIN))
    assert runner.run([Segment(PROMPT, 0, TABLE, 0)]).shape == (0, 97)


@pytest.mark.parametrize("count", [1, 4])
def test_drafting_in_one_call_gives_the_same_tokens_as_step_by_step(count: int) -> None:
    model = random_model(PLAIN)
    fast, plain = runner_of(model), runner_of(model, fast=False)
    segments = [Segment(PROMPT, 0, TABLE), Segment(OTHER[:1], 0, OTHERS_TABLE), Segment(OTHER, 0, [21, 22, 23, 24])]
    assert fast.draft(segments, count) == plain.draft(segments, count)
    after = [Segment([50], 22 + count - 1, TABLE), Segment([51], 7 + count - 1, [21, 22, 23, 24])]
    assert relative(fast.run(after), plain.run(after)) < 1e-5  # the same keys and values were written


def test_a_quantised_unembedding_gives_the_logits_of_plain_pytorch() -> None:
    for config in (PLAIN, SHAPES["tied"]):
        exact = outputs(runner_of(random_model(config), fast=False))
        model = quantize_unembedding(quantize_model(random_model(config), W8A8()), Int8())
        got, right = outputs(runner_of(model)), outputs(runner_of(model, fast=False))
        assert relative(got, right) < 0.5 * relative(right, exact)
        assert torch.equal(model.embed_tokens.weight, random_model(config).embed_tokens.weight)
