"""The engine on the kernels gives the same tokens as on PyTorch."""

from __future__ import annotations

import pytest

from minillm import LLM, SamplingParams
from minillm.ops.triton.paged_attention import paged_attention
from tests.conftest import TinyPair

PROMPTS = ["def add(a, b):", "for"]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
def test_the_engine_says_the_same_on_the_attention_kernel(tiny: TinyPair, kv_cache_dtype: str) -> None:
    options = {"block_size": 4, "kv_cache_dtype": kv_cache_dtype, "dtype": "float32"}
    options["speculative_config"] = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    calls = []

    def kernel(*args, **kwargs):
        calls.append(args[0].shape[0])
        return paged_attention(*args, **kwargs)

    said = []
    for ops in ({}, {"paged_attention": kernel}):
        llm = LLM(str(tiny.target), ops=ops, **options)
        said.append([out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert said[0] == said[1]
    assert len(calls) > 4
    assert max(calls) > min(calls)
