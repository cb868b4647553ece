"""Requests that a lesson runs step by step; they leave the engine with the block that uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from minillm.input_processor import Prompt
from minillm.llm import LLM
from minillm.request import Request
from minillm.sampling import SamplingParams


@contextmanager
def submitted(
    llm: LLM, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> Iterator[list[Request]]:
    """Queue prompts, one request per completion. At the end of the block, also after an error or the stop button, those
    that still run are aborted, and their metrics discarded.

    Raises what `LLM.submit` raises.
    """
    requests = llm.submit(prompts, params)
    try:
        yield requests
    finally:
        llm.llm_engine.discard(requests)
