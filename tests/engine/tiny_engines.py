"""The smallest engines that can go wrong in every way: two layers, and tokens to compare with, made alone.

In plain PyTorch they compute in float64, because the same request in another batch differs in its last bits: in float32
about one token in 10^5 has a rival that close, and thousands of steps would meet one. The compiled step runs in
float32: there a token is the same to the last bit in any company, and thousands of steps say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from minillm.batch import Segment
from minillm.cache.paged import PagedKVCache
from minillm.config import EngineArgs
from minillm.llm_engine import LLMEngine
from minillm.models.decoder import Decoder
from minillm.models.loading import save_llama
from minillm.runtime.runner import ModelRunner
from minillm.sampling import Draw, SamplingParams, SamplingRow, probs_from_logits, sample, uniform
from minillm.training.train_tokenizer import save_tokenizer, train_tokenizer
from tests.conftest import TEXTS, random_model

VOCAB = 272
LONGEST = 64
"""Most tokens of a request of these tests."""
_FOLDER = TemporaryDirectory(prefix="minillm-tiny-")
"""Removed when the process ends."""


@cache
def pair(compiled: bool = False) -> dict[str, tuple[Path, Decoder]]:
    """Folder and model of a target and of a draft that is right about half the time; float64, unless `compiled`."""
    root = Path(_FOLDER.name) / ("compiled" if compiled else "plain")
    tokenizer = train_tokenizer(TEXTS, VOCAB)
    size = 32 if compiled else 16
    target, draft = (random_model(4, 32, 2, 2, 1, tokenizer.get_vocab_size(), size) for _ in range(2))
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.randn_like(parameter) * 0.08 * parameter.std())
    for name, model in (("target", target), ("draft", draft)):
        save_llama(model, root / name, torch.float32)
        save_tokenizer(tokenizer, root / name, 256)
    dtype = torch.float32 if compiled else torch.float64
    return {n: (root / n, m.to(dtype).requires_grad_(False).eval()) for n, m in (("target", target), ("draft", draft))}


def engine(num_speculative_tokens: int = 0, compiled: bool = False, **options: Any) -> LLMEngine:
    """An `LLMEngine` of the pair: plain PyTorch in float64, or the compiled step."""
    speculative, models = None, pair(compiled)
    if num_speculative_tokens:
        speculative = {"model": str(models["draft"][0]), "num_speculative_tokens": num_speculative_tokens}
    args = EngineArgs(str(models["target"][0]), device="cpu", speculative_config=speculative, **options)
    llm = LLMEngine.from_engine_args(args)
    runners = [("target", llm.engine.runner)]
    if llm.engine.drafter is not None:
        runners.append(("draft", llm.engine.drafter.runner))
    for name, runner in runners:
        if compiled:
            assert runner.executor is not None
            runner.draft = partial(draft_step_by_step, runner)  # so that a shadow sees every forward
            continue
        runner.model = models[name][1]
        size = runner.block_size
        runner.cache = PagedKVCache(runner.model.config, llm.engine.pool.num_blocks, size, torch.float64, runner.device)
    return llm


def draft_step_by_step(runner: ModelRunner, segments: Sequence[Segment], count: int) -> list[list[int]]:
    """`ModelRunner.draft` without a compiled loop."""
    return runner.draft_step_by_step(segments, count, [1.0] * len(segments), 0.0)[0]


@cache
def _alone(compiled: bool) -> ModelRunner:
    """A runner for one request, with a cache of one block."""
    dtype = torch.float32 if compiled else torch.float64
    model = deepcopy(pair(compiled)["target"][1])
    runner = ModelRunner(model, PagedKVCache(model.config, 1, LONGEST, dtype, torch.device("cpu")), LONGEST)
    if compiled:
        assert runner.use_executor() is None
    return runner


@cache
def alone(
    prompt: tuple[int, ...], params: SamplingParams, seed: int, count: int, compiled: bool = False
) -> tuple[int, ...]:
    """`count` tokens after `prompt`, by the plainest way there is: all tokens through the model for each new one.

    Nothing of the engine takes part: no scheduler, no cache that outlives a token, no draft, no stop.
    """
    runner, tokens = _alone(compiled), list(prompt)
    for _ in range(count):
        probs = probs_from_logits(runner.run([Segment(tokens, 0, [0])]), [SamplingRow(params)])
        tokens += sample(probs, torch.tensor([uniform(seed, len(tokens), Draw.SAMPLE)])).tolist()
    return tuple(tokens[len(prompt) :])
