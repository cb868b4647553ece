"""Stage 4 of the GPU benchmark: an 8B shape with random weights in decode, verification, batches and prefill.

MBU (model bandwidth utilisation) is (bytes of weights + bytes of the keys and values read) / (time · measured bandwidth
of a copy). The time of a step includes all that an engine needs: launch, forward, argmax, reading the token on the
host. The same step without reading is reported as well.

16 bits come first and are reported at once. Each INT8 variant is then timed in turn with them. On an H100 they were
slower there than by themselves, so a gain is reported over both times, and the target counts for the smaller gain. A
part that fails leaves a note, and the others still run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from minillm.batch import Segment
from minillm.bench.device_clock import TimedFunction, Timing, ratios
from minillm.bench.on_gpu.findings import Report, Target
from minillm.bench.on_gpu.random_models import (
    CONFIGS,
    fast_runner,
    kv_bytes,
    product_weights,
    random_model,
    read_tokens,
    segments,
    target_name,
    weight_bytes,
)
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.models.decoder import Decoder
from minillm.models.quantize import quantize_model, quantize_unembedding
from minillm.quantization.int8 import Int8
from minillm.runtime.runner import ModelRunner

MBU, INT8_GAIN, VERIFY_COST = Target(at_least=0.8), Target(at_least=1.6), Target(at_most=1.15)
VERIFIED = 5
INT8: dict[str, type[KVCache]] = {"int8": PagedKVCache, "int8 + int8 KV": PagedInt8KVCache}
"""The variants with INT8 weights, and their caches."""

Step = tuple[ModelRunner, list[Segment]]


def decode(setup: StageSetup, report: Report) -> None:
    """Measure batch 1, verification, batches and prefill in 16 bits, then batch 1 in INT8."""
    name, past = target_name(setup), setup.size_for(512, 20)
    report.note("model", name)
    report.note("context", past)
    report.note("half", str(setup.half).removeprefix("torch."))
    length = past + setup.size_for(64, 16)
    bandwidth = setup.bandwidth()
    half = fast_runner(setup, random_model(setup, name), PagedKVCache, _most_requests(setup, name, length), length)
    one = partial(segments, 1, past=past, length=length, vocab=CONFIGS[name].vocab_size)
    decoding, verifying = one(1), one(VERIFIED)
    beside = {"half decode": (half, decoding)}
    _bandwidth_used(report, "half decode", _timed(setup, beside), half, past, bandwidth)
    report.part("half verify", _verify, setup, report, "half", {**beside, "half verify": (half, verifying)})
    report.part("half decode, nothing read", _nothing_read, setup, report, beside, past, bandwidth)
    _batches(setup, report, half, past, length)
    report.part("prefill", _prefill, setup, report, half, length)
    report.note("int8", "weights of the layers and the unembedding")
    model = report.part("int8 weights", _int8_model, setup, name)
    for key, layout in INT8.items() if model is not None else ():
        runner = report.part(key, fast_runner, setup, model, layout, 1, length)
        if runner is None:
            continue
        own = {f"{key} decode": (runner, decoding)}
        report.part(f"{key} decode", _int8_gain, setup, report, key, beside | own, past, bandwidth)
        if key == "int8":
            report.part("int8 verify", _verify, setup, report, key, own | {"int8 verify": (runner, verifying)})


def _timed(setup: StageSetup, steps: dict[str, Step]) -> dict[str, Timing]:
    """Time steps in turn, with reading their tokens."""
    return setup.time(*(TimedFunction(key, _read_each(runner, step)) for key, (runner, step) in steps.items()))


def _verify(setup: StageSetup, report: Report, key: str, steps: dict[str, Step]) -> None:
    """Compare verifying with decoding."""
    costs = [1 / r for r in ratios(_timed(setup, steps), f"{key} verify", f"{key} decode")]
    target = VERIFY_COST if key == "half" else None
    report.measured(f"{key} verify {VERIFIED} / decode 1", costs, "times", target, "1, if bound by the weights")


def _nothing_read(setup: StageSetup, report: Report, steps: dict[str, Step], past: int, bandwidth: float) -> None:
    """Time decoding in 16 bits without reading the tokens."""
    name, (runner, step) = "half decode, nothing read", steps["half decode"]
    timings = setup.time(TimedFunction(name, _launch_each(runner, step)))
    _bandwidth_used(report, name, timings, runner, past, bandwidth)


def _int8_model(setup: StageSetup, name: str) -> Decoder:
    """The model with all matrices that an engine quantises to INT8 (`minillm.engine.placement`)."""
    rounded = quantize_unembedding(quantize_model(random_model(setup, name), Int8()), Int8())
    setup.clock.free()
    return rounded


def _int8_gain(
    setup: StageSetup, report: Report, key: str, steps: dict[str, Step], past: int, bandwidth: float
) -> None:
    """Compare decoding in an INT8 variant with 16 bits."""
    timings, runner = _timed(setup, steps), steps[f"{key} decode"][0]
    _bandwidth_used(report, f"{key} decode", timings, runner, past, bandwidth)
    report.measured(f"half decode, beside {key}", [1e3 * s for s in timings["half decode"].seconds], "ms per token")
    most = f"{_least_bytes(steps['half decode'][0], past) / _least_bytes(runner, past):.2f}, the ratio of their bytes"
    found = ratios(timings, f"{key} decode", "half decode")
    target = INT8_GAIN if key == "int8" else None
    report.gain(f"{key} over half", found, ("half decode", f"{key} decode"), target, most)


def _bandwidth_used(
    report: Report, name: str, timings: dict[str, Timing], runner: ModelRunner, past: int, bandwidth: float
) -> None:
    num_bytes, seconds = _least_bytes(runner, past), timings[name].seconds
    floor = f"{1e3 * num_bytes / bandwidth:.3g} ms: {num_bytes / 1e9:.2f} GB at {bandwidth / 1e9:.0f} GB/s"
    report.measured(name, [1e3 * s for s in seconds], "ms per token", bound=floor)
    target = MBU if name == "half decode" else None
    report.measured(f"{name}, MBU", [num_bytes / (s * bandwidth) for s in seconds], "of bandwidth", target)


def _batches(setup: StageSetup, report: Report, runner: ModelRunner, past: int, length: int) -> None:
    most = runner.executor.max_num_seqs  # type: ignore[union-attr]
    for requests in setup.size_for((1, 8, 32, 128), (1, 2)):
        if requests > most:
            report.note(f"batch {requests}", f"no room: the cache holds {most} requests")
            continue
        report.part(f"batch {requests}", _batch, setup, report, runner, requests, past, length)


def _batch(setup: StageSetup, report: Report, runner: ModelRunner, requests: int, past: int, length: int) -> None:
    step = segments(requests, 1, past, length, runner.model.config.vocab_size)
    timing = setup.time(TimedFunction("batch", _read_each(runner, step)), rounds=5)["batch"]
    report.measured(f"half batch {requests}", [requests / s for s in timing.seconds], "tokens/s", batch=requests)


def _prefill(setup: StageSetup, report: Report, runner: ModelRunner, length: int) -> None:
    rate, c = setup.product_rate(), runner.model.config
    for tokens in setup.size_for((512, 2048), (9, 30)):
        if tokens > length * runner.executor.max_num_seqs:  # type: ignore[union-attr]
            report.note(f"prefill {tokens}", "no room in the cache")
            continue
        step = segments(1, tokens, 0, tokens, c.vocab_size)
        timing = setup.time(TimedFunction("prefill", _read_each(runner, step)), rounds=5)["prefill"]
        work = 2 * tokens * product_weights(runner.model) + 2 * tokens**2 * c.num_heads * c.head_dim * c.num_layers
        report.measured(f"half prefill {tokens}", [tokens / s for s in timing.seconds], "tokens/s", tokens=tokens)
        shares = [work / (s * rate) for s in timing.seconds]
        report.measured(f"half prefill {tokens}, MFU", shares, "of the rate of a matrix product", tokens=tokens)


def _least_bytes(runner: ModelRunner, past: int) -> int:
    return weight_bytes(runner.model) + kv_bytes(runner, past)


def _most_requests(setup: StageSetup, name: str, length: int) -> int:
    """Return the largest batch wanted, or a smaller one if its cache would take more than a third of free memory."""
    config = CONFIGS[name]
    each = PagedKVCache.bytes_per_block(config, 1, setup.half) * (length + 16)
    return max(1, min(setup.size_for(128, 2), int(setup.free_bytes() / 3 / each)))


def _read_each(runner: ModelRunner, step: list[Segment]) -> Callable[[int], Any]:
    def run(count: int) -> None:
        for _ in range(count):
            read_tokens(runner.run(step))

    return run


def _launch_each(runner: ModelRunner, step: list[Segment]) -> Callable[[int], Any]:
    def run(count: int) -> None:
        for _ in range(count):
            runner.run(step)

    return run
