"""Where the time of one completion goes: record its events, compare engines, time single steps."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.batch import Segment
from minillm.bench import timing
from minillm.errors import LessonError
from minillm.llm import LLM
from minillm.ops.cpu.panels import pack
from minillm.ops.cpu.simd import LANES
from minillm.outputs import RequestOutput
from minillm.sampling import SamplingParams
from minillm.teaching.drives.triton_kernels import interpreting
from minillm.teaching.submitted import submitted
from minillm.trace import Event, StepRan

Marks = list[tuple[float, str]]
"""(seconds, name of the event that has just happened), in order of time."""
Parts = dict[str, float]
"""Seconds of each part of a completion."""
CLOCK = timing.clock

# ------------------------------------------------------------------------------------------------ recording a request


class _Watched:
    """A detokenizer that marks when each call begins and ends."""

    def __init__(self, inner: Any, mark: Callable[[str], None]) -> None:
        self._inner, self._mark = inner, mark

    def append(self, token_id: int) -> str:
        """See `minillm.tokenizer.Detokenizer.append`."""
        self._mark("Committing")
        text: str = self._inner.append(token_id)
        self._mark("Detokenised")
        return text

    def flush(self) -> str:
        """See `minillm.tokenizer.Detokenizer.flush`."""
        self._mark("Committing")
        text: str = self._inner.flush()
        self._mark("Detokenised")
        return text

    def restart(self) -> None:
        """See `minillm.tokenizer.Detokenizer.restart`."""
        self._inner.restart()


def record_marks(
    llm: LLM, prompt: str, params: SamplingParams, clock: Callable[[], float] = time.perf_counter
) -> tuple[Marks, RequestOutput]:
    """Complete one prompt and record the time of each event of the engine.

    A mark is (seconds, event): `Start`; the names of the engine's events, `StepRan` with the kind of its work
    (`StepRan prefill`, `StepRan decode`, `StepRan verify`); `Committing` before and `Detokenised` after each token
    becomes text; `End`. If it is interrupted, its request is aborted.

    Raises:
        LessonError: the steps would belong to several completions: `n` above 1, or requests in the engine already.
    """
    if params.n != 1:
        raise LessonError(f"n={params.n} completions share their steps, so their times cannot be separated; use n=1")
    if others := list(llm.engine.requests):
        raise LessonError(
            f"the engine has other requests ({', '.join(others)}), whose steps would be timed too; run or abort them "
            "first"
        )
    marks: Marks = []

    def mark(name: str) -> None:
        marks.append((clock(), name))

    def note(event: Event) -> None:
        mark(f"StepRan {event.work[0].kind}" if isinstance(event, StepRan) else type(event).__name__)

    llm.engine.listeners.append(note)
    try:
        mark("Start")
        with submitted(llm, prompt, params) as group:
            [request] = group
            if request.detokenizer is not None:
                request.detokenizer = _Watched(request.detokenizer, mark)
            while not request.finished:
                llm.engine.step()
            output = llm.llm_engine.output(group)
            mark("End")
    finally:
        llm.engine.listeners.remove(note)
    return marks, output


# ---------------------------------------------------------------------------------------------------- racing engines


def race(
    engines: Mapping[str, LLM],
    prompt: str,
    params: SamplingParams,
    attribute: Callable[[Marks], Parts],
    warm: Iterable[str] = (),
    rounds: int = 5,
) -> dict[str, Parts]:
    """The parts of each engine's median run, by total time. In every round each engine completes the prompt once.

    Engines in `warm` have just completed the same prompt; the others start with an empty prefix cache. An engine that
    has not run yet completes the prompt once before the first round, which is not counted. Raises `LessonError` if the
    parts of a run do not sum to its time, the number of tokens is wrong, or an engine has other requests.
    """
    runs: dict[str, list[Parts]] = {name: [] for name in engines}
    for llm in engines.values():
        if not llm.engine.num_steps:
            llm.generate(prompt, params, use_tqdm=False)
    for _ in range(rounds):
        previous: LLM | None = None
        for name, llm in engines.items():
            if name not in warm:
                llm.reset_prefix_cache()
            elif llm is not previous:
                llm.generate(prompt, params, use_tqdm=False)
            marks, output = record_marks(llm, prompt, params, CLOCK)
            parts = attribute(marks)
            _check_run(name, marks, parts, output, params, name in warm)
            runs[name].append(parts)
            previous = llm
    return {name: sorted(each, key=lambda parts: sum(parts.values()))[rounds // 2] for name, each in runs.items()}


def _check_run(
    name: str, marks: Marks, parts: Parts, output: RequestOutput, params: SamplingParams, warm: bool
) -> None:
    missing = marks[-1][0] - marks[0][0] - sum(parts.values())
    if abs(missing) > 1e-9:
        wrong = f"leave out {missing:.6f} s of the run" if missing > 0 else f"are {-missing:.6f} s longer than the run"
        raise LessonError(f"{name}: the parts {wrong}; every second belongs to one part")
    if len(output.outputs[0].token_ids) != params.max_tokens or (output.num_cached_tokens > 0) != warm:
        raise LessonError(
            f"{name}: {len(output.outputs[0].token_ids)} tokens, {output.num_cached_tokens} cached; the race is for "
            f"{params.max_tokens} tokens, {'warm' if warm else 'cold'}"
        )


# ------------------------------------------------------------------------------------------------------ single steps


def seconds_of(run: Callable[[], object], repeats: int = 20, rounds: int = 7) -> float:
    """Seconds of one run: the median over `rounds` of the mean over `repeats`, after one run that is not counted."""
    run()
    taken = []
    for _ in range(rounds):
        began = CLOCK()
        for _ in range(repeats):
            run()
        taken.append((CLOCK() - began) / repeats)
    return statistics.median(taken)


def decode_step(llm: LLM, ids: list[int], width: int = 1) -> Callable[[], object]:
    """A function that runs one forward over the last `width` of `ids`, as if the KV cache already held the others.

    It overwrites the first blocks of the KV cache, where the engine may keep prompts: call `reset_prefix_cache` when
    done.
    """
    blocks = list(range(-(-len(ids) // llm.engine.runner.block_size)))
    segment = Segment(ids[-width:], len(ids) - width, blocks, num_logits=width)
    return lambda: llm.engine.runner.run([segment])


class _Calls(TorchDispatchMode):
    """Counts the PyTorch operations that are called while it is active, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations_called(run: Callable[[], object]) -> Counter[str]:
    """How often one run calls each PyTorch operation (`mm`, `add`, `view`, …).

    Counting makes PyTorch import Triton. `interpreting` keeps lessons 8 and 9 able to use Triton's interpreter.
    """
    with interpreting(), _Calls() as calls:
        run()
    return calls.names


class PanelLinear(nn.Module):
    """A linear layer without bias that gives a single row to `kernel(panels, x, y)`, and more rows to PyTorch."""

    def __init__(self, linear: nn.Linear, kernel: Callable[[np.ndarray, np.ndarray, np.ndarray], None]) -> None:
        super().__init__()
        self.linear, self.kernel = linear, kernel
        self.panels = pack(linear.weight.detach().numpy())
        self.y = np.empty(-(-linear.out_features // LANES) * LANES, np.float32)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`."""
        if len(x) > 1:
            return self.linear(x)
        self.calls += 1
        self.kernel(self.panels, x[0].numpy(), self.y)
        return torch.from_numpy(self.y[: self.linear.out_features].copy())[None]


def with_panel_products(llm: LLM, weights: nn.Module, kernel: Callable[..., None]) -> list[PanelLinear]:
    """Replace the linear layers of an eager `llm` by `kernel`, with the weights of another instance of its model."""
    model = llm.engine.runner.model
    names = [name for name, m in model.layers.named_modules() if isinstance(m, nn.Linear) and m.bias is None]
    layers = [PanelLinear(weights.layers.get_submodule(name), kernel) for name in names]
    for name, layer in zip(names, layers, strict=True):
        model.layers.set_submodule(name, layer)
    return layers
