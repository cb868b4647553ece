"""Small drafts that read the target's cache, and what every such drafter must keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.models.decoder import Decoder
from minillm.models.loading import save_llama
from minillm.request import Request
from minillm.speculative.drafter import Drafter
from minillm.speculative.long import LongDrafter
from minillm.speculative.long_model import LongModel, LongShape
from minillm.speculative.reading_drafter import ReadingDrafter
from minillm.speculative.spire import SpireDrafter
from minillm.speculative.spire_model import SpireModel, SpireShape
from minillm.speculative.target_parts import TargetParts
from minillm.speculative.trained_drafter import TrainedOptions
from minillm.trace import BlocksShared, RequestPreempted
from minillm.training.train_tokenizer import save_tokenizer, train_tokenizer
from tests.conftest import TEXTS, random_model
from tests.speculative.self_drafting import PROMPTS

Method = type[Drafter]


def spire_of(target: Decoder, **shape: Any) -> SpireModel:
    """The draft with the target's own blocks, nothing trained."""
    model = SpireModel(SpireShape(target.config.hidden_size, **shape), TargetParts(target))
    model.copy_blocks_of(target)
    return model.requires_grad_(False)


def long_of(target: Decoder, **shape: Any) -> LongModel:
    """The draft with the target's own last block, nothing trained."""
    torch.manual_seed(3)
    model = LongModel(LongShape(target.config.hidden_size, **shape), TargetParts(target))
    model.copy_block_of(target)
    return model.requires_grad_(False)


def spire(cls: type[SpireDrafter] = SpireDrafter, last_input: bool = False, **shape: Any) -> Method:
    """A method whose draft is made of the target's blocks. `last_input`: its memory of a token is the embedding, which
    for a target of one block is what that block's keys and values are made of."""

    def make(target: Decoder) -> nn.Module:
        model = spire_of(target, **shape)
        if last_input:
            model.mixture.copy_(torch.tensor([50.0, *[-50.0] * (len(model.mixture) - 1)]))
        return model

    return method(cls, make)


def long(cls: type[LongDrafter] = LongDrafter, **shape: Any) -> Method:
    """A method whose draft is made of the target's last block."""
    return method(cls, lambda target: long_of(target, **shape))


def method(cls: type[ReadingDrafter], make: Callable[[Decoder], nn.Module]) -> Method:
    """`cls` with the draft that `make` makes of the target."""

    def build(own: Any, context: Any) -> Drafter:
        return own(context.target, make(context.target.model), context.options.draft_sample_method == "greedy")

    # Nothing is loaded, so there is no folder to be checked.
    return type(cls.__name__, (cls,), {"build": classmethod(build), "Options": TrainedOptions})


def target_of(folder: Path, layers: int, sliding_window: int | None = None) -> str:
    """The folder of a random target with so many blocks, with or without a sliding window."""
    save_llama(random_model(0, 48, layers, 4, 2), folder, torch.float32)
    save_tokenizer(train_tokenizer(TEXTS, 300), folder, 256)
    if sliding_window is not None:
        file = folder / "config.json"
        mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": sliding_window}
        file.write_text(json.dumps(json.loads(file.read_text()) | mistral))
    return str(folder)


def a_request(token_ids: list[int], block_table: list[int]) -> Request:
    """A greedy request of which the target has verified all but the last token."""
    request = Request("a", "", token_ids, 1, SamplingParams(temperature=0), 99, 0)
    request.block_table, request.num_computed_tokens = block_table, len(token_ids) - 1
    return request


def record_drafts(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Let the engine's drafter note, for each draft, the text that it follows."""
    found: list[tuple[list[int], list[int]]] = []
    propose = llm.engine.drafter.propose

    def noting(requests: Any, num_drafts: Any) -> Any:
        drafts = propose(requests, num_drafts)
        found.extend((list(r.token_ids), d.token_ids) for r, d in zip(requests, drafts, strict=True))
        return drafts

    llm.engine.drafter.propose = noting
    return found


def zeroed(llm: LLM) -> LLM:
    """`llm` with zeros in its cache, in which a planted mistake would otherwise read whatever was there."""
    for pool in (llm.engine.runner.cache.keys, llm.engine.runner.cache.values):
        pool.zero_()
    return llm


def drafts_follow_from_the_text(target: str, method: Method, **options: Any) -> int:
    """Each draft of a busy engine is what an engine that has just read the same text would draft: nothing is left of
    rejected drafts, preempted requests or other owners of a block. Returns how many texts were compared."""
    speculative = {"method": method}
    llm = zeroed(LLM(target, speculative_config=speculative, block_size=4, max_num_seqs=6, **options))
    found = record_drafts(llm)
    params = SamplingParams(temperature=0.7, top_k=1, seed=2, max_tokens=14, ignore_eos=True, n=2)
    with llm.trace() as trace:
        for _ in range(2):  # the second time, the prompts are found in the prefix cache
            llm.generate(PROMPTS, params, use_tqdm=False)
    assert trace.of(BlocksShared) and (trace.of(RequestPreempted) or "num_kv_blocks" not in options)
    fresh = zeroed(LLM(target, speculative_config=speculative, block_size=4))
    known: dict[tuple[int, ...], list[int]] = {}
    for text, drafted in found:
        if tuple(text) not in known:
            table = list(range(-(-(len(text) + 4) // 4)))
            fresh.engine.runner.run([Segment(text[:-1], 0, table)])
            [again] = fresh.engine.drafter.propose([a_request(text, table)], [4])
            known[tuple(text)] = again.token_ids
        assert drafted == known[tuple(text)][: len(drafted)], f"after {len(text)} tokens"
    return len(known)
