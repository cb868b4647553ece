"""Stage 2 of the GPU benchmark: every kernel against its reference, over random shapes, before anything is timed.

Floats are compared in norm with the reference in fp64: 1e-5 for fp32, 2e-2 for 16 bits, whose inputs are rounded
already. Integers (tokens, cache codes, slots) must be equal. `sample` and `rejection` may differ from their references
if a uniform is within rounding error of a border between two tokens, some 1e-15 and 1e-7. Over all examples here that
happens with a probability below 1e-4.

The ops take turns, one example at a time, so that too little time costs examples but leaves no op unchecked. A third of
the attention examples split the keys.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minillm.bench.kernel_cases import chain
from minillm.bench.on_gpu import ragged_steps
from minillm.bench.on_gpu.findings import Findings, Report, Target, failure_note
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.errors import UnsupportedError
from minillm.ops.dispatch import OPS, implementations, op
from minillm.quantization.base import Scheme
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.w8a8 import W8A8

FP32, HALF = 1e-5, 2e-2
SCHEMES: dict[str, Scheme] = {"int8_linear": Int8(), "w8a8_linear": W8A8(), "int4_linear": Int4(group_size=64)}
SHARES = {"paged_attention": 30.0, "tree_attention": 12.0, **dict.fromkeys(SCHEMES, 8.0)}
OTHER_SHARE = 4.0
"""The shares of the ops in the time of the stage, most of which is for compiling. Every dtype is checked once first."""
LAST_EXAMPLE_S = 8.0
"""With less time left to the stage, no example is begun after the first of each op."""
INFINITE = 1e9
"""Stands for an infinite error, which JSON cannot express."""

Example = tuple[float, float]
"""The error of a result, and the largest error allowed."""


@dataclass
class OpCheck:
    """The examples of one op so far."""

    name: str
    examples: int = 0
    worst: float = 0.0
    """The worst error, as a share of the error allowed."""
    has_failed: bool = False
    """Whether an example has raised an error. Then there are no more."""
    seconds: float = 0.0
    """In this process."""

    @classmethod
    def resumed(cls, name: str, found: Findings) -> OpCheck:
        """Return what a process before this one has written about an op."""
        for metric in found.metrics:
            if metric["name"] == _metric(name):
                failed = failure_note(name) in found.notes
                return cls(name, metric["config"]["examples"], metric["value"], failed)
        return cls(name)

    @property
    def share(self) -> float:
        """The share of the op in the time of the stage."""
        return SHARES.get(self.name, OTHER_SHARE)


def check(setup: StageSetup, report: Report) -> None:
    """Check all ops in turn, fp32 first. Each op has one metric: its worst error as a share of the error allowed.

    Raises `UnsupportedError` if no kernel runs here, `DeviceFault` after a CUDA error.
    """
    able = [name for name in OPS if "triton" in implementations(name, setup.device)]
    wanted = Target(at_least=len(_ops_for_this_gpu(setup)))
    report.counted("ops whose kernel runs here", len(able), "ops", wanted, all_ops=list(OPS))
    if not able:
        raise UnsupportedError(f"no kernel runs on {setup.device}: Triton is missing, or the GPU is too old")
    found = report.so_far()
    ops = [OpCheck.resumed(name, found) for name in able]
    share_s = (setup.seconds_left() - LAST_EXAMPLE_S) / sum(one.share for one in ops)
    dtypes = len(_dtypes(setup))
    for number in range(setup.size_for(90, 3)):
        for one in ops:
            is_due = one.examples == number and not one.has_failed
            has_share = number < dtypes or one.seconds < share_s * one.share
            has_time = number == 0 or (has_share and setup.seconds_left() > LAST_EXAMPLE_S)
            if is_due and has_time:
                _check_example(setup, report, ops, one)
        _write_wrong(report, ops)


def _ops_for_this_gpu(setup: StageSetup) -> list[str]:
    """Return the ops with a kernel for a GPU of this compute capability; in a rehearsal all."""
    if setup.device.type == "cpu":
        return list(OPS)
    capability = torch.cuda.get_device_capability(setup.device)
    return [name for name in OPS if OPS[name].oldest_gpu <= capability]


def _check_example(setup: StageSetup, report: Report, ops: Sequence[OpCheck], one: OpCheck) -> None:
    """Check the next example of an op, and write its worst error."""
    began = time.monotonic()
    try:
        off, limit = _example(setup, one.name, one.examples)
    except Exception as problem:  # the other ops are checked all the same
        one.worst, one.has_failed = INFINITE, True
        _write(report, one)
        _write_wrong(report, ops)
        report.failed(one.name, problem)
        return
    share = off / limit if limit else off * INFINITE
    one.worst, one.examples = max(one.worst, min(share, INFINITE)), one.examples + 1
    one.seconds += time.monotonic() - began
    _write(report, one)


def _write(report: Report, one: OpCheck) -> None:
    report.counted(_metric(one.name), one.worst, "of the limit", Target(at_most=1), examples=one.examples)


def _write_wrong(report: Report, ops: Sequence[OpCheck]) -> None:
    """Write which ops are wrong, as far as they have been checked."""
    wrong = [one.name for one in ops if one.worst > 1]
    report.counted("ops whose kernel is wrong or fails", len(wrong), "ops", Target(at_most=0), names=wrong)


def _metric(name: str) -> str:
    return f"{name}, worst error"


def _example(setup: StageSetup, name: str, number: int) -> Example:
    """Check one example of an op: fp32, then 16 bits, then fp32 again, …

    Compile-time arguments repeat, because compiling takes seconds; shapes and numbers are new each time.
    """
    makers: dict[str, Callable[..., Example]] = {
        "paged_attention": _attention,
        "tree_attention": _tree,
        "store_kv": _store,
        **dict.fromkeys(SCHEMES, _linear),
    }
    torch.manual_seed(number)
    dtypes = _dtypes(setup)
    rng = random.Random(f"{name} {number}")
    return makers.get(name, _plain)(setup, name, rng, dtypes[number % len(dtypes)], number // len(dtypes))


def _dtypes(setup: StageSetup) -> list[torch.dtype]:
    """Return the dtypes to check. The interpreter's bfloat16 products are wrong, its float16 products are right."""
    halves = [torch.float16] if setup.half != torch.bfloat16 else [torch.float16, torch.bfloat16]
    return [torch.float32, *halves]


def _both(setup: StageSetup, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return op(name, setup.device, "triton"), op(name, setup.device, "reference")


def _layout(dtype: torch.dtype, number: int) -> ragged_steps.Layout:
    """Return one of five layouts; every dtype is checked with all of them."""
    rows = [
        (0, (32, 8), 128, 16, None),
        (8, (32, 8), 128, 16, None),
        (4, (6, 2), 64, 16, None),
        (0, (5, 1), 80, 3, 7),
        (8, (2, 2), 32, 64, None),
    ]
    return ragged_steps.Layout(dtype, *rows[number % len(rows)])  # type: ignore[arg-type]


def _attention(setup: StageSetup, name: str, rng: random.Random, dtype: torch.dtype, number: int) -> Example:
    kernel, reference = _both(setup, name)
    longest = setup.size_for(150, 21)
    lengths = [rng.choice((1, 1, 2, 5, 21, longest)) for _ in range(rng.choice((1, setup.size_for(7, 2))))]
    layout = _layout(dtype, number)
    s = ragged_steps.step(rng, setup.device, layout, lengths)
    exact = s.exact()
    if (number - _dtypes(setup).index(dtype)) % 3 == 1:  # each dtype in turn
        _split_keys(s, rng.choice((2, 3, 5)))
    right = reference(exact.q, exact.keys, exact.values, exact.batch, layout.window)
    return error(kernel(s.q, s.keys, s.values, s.batch, layout.window), right, dtype)


def _split_keys(s: ragged_steps.Step, splits: int) -> None:
    """Make a step split its keys. The kernel itself does so only for contexts longer than those here."""
    from minillm.ops.triton.tiling import Tiling  # imports Triton

    chosen = Tiling.of(s.batch, s.q, s.keys.shape[1])
    s.batch.set_plan(replace(chosen, splits=splits))


def _tree(setup: StageSetup, name: str, rng: random.Random, dtype: torch.dtype, number: int) -> Example:
    kernel, reference = _both(setup, name)
    lengths = [rng.randint(1, setup.size_for(64, 9)) for _ in range(rng.choice((1, 3)))]
    s = ragged_steps.step(rng, setup.device, _layout(dtype, number % 3), lengths)
    tree = torch.cat([chain(length, str(setup.device)) for length in lengths])
    exact = s.exact()
    right = reference(exact.q, exact.keys, exact.values, exact.batch, tree=tree)
    return error(kernel(s.q, s.keys, s.values, s.batch, tree=tree), right, dtype)


def _linear(setup: StageSetup, name: str, rng: random.Random, dtype: torch.dtype, number: int) -> Example:
    """Compare with the reference on a CPU: PyTorch on a GPU multiplies by an inverse to divide; codes may differ."""
    kernel, reference = op(name, setup.device, "triton"), op(name, "cpu", "reference")
    rows = rng.choice((1, 2, 5, 17, setup.size_for(300, 17)))
    outputs, columns = rng.randint(1, setup.size_for(600, 40)), 2 * rng.randint(1, setup.size_for(700, 40))
    tensors = SCHEMES[name].quantize(torch.randn(outputs, columns))
    kept = [tensors[key] for key in ("qweight", "scales", "qzeros") if key in tensors]
    group = [SCHEMES[name].group_size] if isinstance(SCHEMES[name], Int4) else []
    bias = torch.randn(outputs).to(dtype) if number % 2 else None
    x = torch.randn(rows, columns).to(dtype)
    right = reference(x.double(), *kept, *group, bias if bias is None else bias.double())
    there = [tensor.to(setup.device) for tensor in kept]
    found = kernel(x.to(setup.device), *there, *group, bias if bias is None else bias.to(setup.device))
    return error(found.cpu(), right, dtype)


def _store(setup: StageSetup, name: str, rng: random.Random, dtype: torch.dtype, number: int) -> Example:
    """Compare codes and scales bit for bit with those of a CPU, where divisions are exactly rounded."""
    kernel, reference = op(name, setup.device, "triton"), op(name, "cpu", "reference")
    bits, tokens = (0, 8, 4)[number % 3], rng.choice((1, 5, 40))
    k, v = (torch.randn(tokens, 2, 64) * 10.0 ** rng.randint(-6, 3) for _ in "kv")
    slots = torch.tensor(rng.sample(range(50), tokens))
    slots[rng.randrange(tokens)] = -1
    zeros = torch.zeros(50, 2, 64)
    empty = ragged_steps.cache_like(k, bits, dtype).encode(zeros) if bits else (zeros.to(dtype),)
    pools = [[pool.clone() for pool in empty] for _ in "kv"]
    there = [[pool.clone().to(setup.device) for pool in part] for part in pools]
    reference(k.to(dtype), v.to(dtype), *pools, slots)
    kernel(k.to(setup.device, dtype), v.to(setup.device, dtype), *there, slots.to(setup.device))
    pairs = [(a, b.cpu()) for own, other in zip(pools, there, strict=True) for a, b in zip(own, other, strict=True)]
    return float(sum(not torch.equal(a, b) for a, b in pairs)), 0.0


def _plain(setup: StageSetup, name: str, rng: random.Random, dtype: torch.dtype, number: int) -> Example:
    """Ops on activations and logits."""
    kernel, reference = _both(setup, name)
    arguments = INPUTS[name](setup, rng, dtype)
    found, right = kernel(*arguments), reference(*_doubled(name, arguments))
    found, right = (list(x) if isinstance(x, tuple) else [x] for x in (found, right))
    if not right[0].is_floating_point():
        return float(sum(not torch.equal(a, b) for a, b in zip(found, right, strict=True))), 0.0
    errors = [error(a, b, dtype) for a, b in zip(found, right, strict=True)]
    return max(errors, key=lambda example: example[0])


def _doubled(name: str, arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments for the reference: in fp64 for an op whose result is floats."""
    if name not in ("rms_norm", "add_rms_norm", "rope", "silu_gate"):
        return list(arguments)
    return [x.double() if isinstance(x, Tensor) else x for x in arguments]


def error(found: Tensor, right: Tensor, dtype: torch.dtype) -> Example:
    """Return the error of `found`, relative in norm, and the error allowed. NaN counts as an infinite error."""
    found, right = found.double(), right.double()
    off = float((found - right).norm() / right.norm().clamp_min(1e-300))
    return (off if off == off else float("inf")), (FP32 if dtype == torch.float32 else HALF)


def _norm(setup: StageSetup, rng: random.Random, dtype: torch.dtype, tensors: int) -> list[Any]:
    rows, size = rng.randint(1, 9), rng.choice((64, 96, 384, setup.size_for(4096, 100)))
    x = [torch.randn(rows, size, device=setup.device).to(dtype) for _ in range(tensors)]
    return [*x, torch.randn(size, device=setup.device).to(dtype), 1e-5]


def _rope(setup: StageSetup, rng: random.Random, dtype: torch.dtype) -> list[Any]:
    tokens, heads, dim = rng.randint(1, 9), rng.randint(1, 20), rng.choice((32, 64, 80, 128))
    x, table = torch.randn(tokens, heads, dim, device=setup.device), torch.rand(2, tokens, 1, dim, device=setup.device)
    return [x.to(dtype), *table.to(dtype)]


def _gate(setup: StageSetup, rng: random.Random, dtype: torch.dtype) -> list[Any]:
    return [torch.randn(rng.randint(1, 9), 2 * rng.randint(1, setup.size_for(5000, 90)), device=setup.device).to(dtype)]


def _logits(setup: StageSetup, rng: random.Random, dtype: torch.dtype) -> list[Any]:
    x = torch.randn(rng.randint(1, 5), rng.randint(2, setup.size_for(130_000, 90)), device=setup.device).to(dtype)
    if rng.random() < 0.2:
        x[0, -1] = torch.nan
    return [x]


def _numbers(setup: StageSetup, rng: random.Random, dtype: torch.dtype) -> list[Any]:
    """Logits without NaN: with NaN the token is meaningless."""
    return [_logits(setup, rng, dtype)[0].nan_to_num()]


def _probs(setup: StageSetup, rows: int, vocab: int) -> Tensor:
    return torch.rand(rows, vocab, device=setup.device) ** 3 * (torch.rand(rows, vocab, device=setup.device) > 0.3)


def _sampled(setup: StageSetup, rng: random.Random, dtype: torch.dtype) -> list[Any]:
    rows = rng.randint(1, 5)
    probs = _probs(setup, rows, rng.randint(2, setup.size_for(130_000, 90)))
    probs[:, 0] += 1e-3
    return [probs, torch.rand(rows, dtype=torch.float64, device=setup.device)]


def _judged(setup: StageSetup, rng: random.Random, dtype: torch.dtype) -> list[Any]:
    counts, vocab = [rng.randint(0, 5) for _ in range(rng.randint(1, 6))], rng.randint(2, setup.size_for(130_000, 60))
    drafts, requests = sum(counts), len(counts)
    p, q = (_probs(setup, n, vocab) + 1e-6 for n in (drafts + requests, drafts))
    ids = torch.tensor([rng.randrange(vocab) for _ in range(drafts)], dtype=torch.int64, device=setup.device)
    start = torch.tensor([sum(counts[:i]) for i in range(requests + 1)], dtype=torch.int32, device=setup.device)
    uniforms = [torch.rand(n, dtype=torch.float64, device=setup.device) for n in (drafts, drafts + requests)]
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return [ids, start, rng.choice((q, None)), p, *uniforms]


def _advanced(setup: StageSetup, rng: random.Random, dtype: torch.dtype) -> list[Any]:
    requests, block_size = rng.randint(2, 9), rng.choice((1, 3, 16))
    lengths = torch.tensor([0, *(rng.randint(0, 60) for _ in range(requests - 1))], dtype=torch.int32).to(setup.device)
    tables = torch.randperm(requests * 61, device=setup.device).view(requests, 61).to(torch.int32)
    return [lengths, tables, block_size]


INPUTS: dict[str, Callable[[StageSetup, random.Random, torch.dtype], list[Any]]] = {
    "rms_norm": lambda setup, rng, dtype: _norm(setup, rng, dtype, 1),
    "add_rms_norm": lambda setup, rng, dtype: _norm(setup, rng, dtype, 2),
    "rope": _rope,
    "silu_gate": _gate,
    "argmax": _numbers,
    "all_finite": _logits,
    "advance": _advanced,
    "sample": _sampled,
    "rejection": _judged,
}
"""Makers of an op's arguments."""
