"""However a request is batched, chunked, paged, preempted or drafted for, its tokens are those of transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.models import bundled
from minillm.models.held_out import held_out_prompts
from minillm.trace import DraftProposed, RequestPreempted, StepRan

NUM_PROMPTS = 24
NEW_TOKENS = 24
DRAFT = {"method": "draft_model", "model": "minicoder-draft", "num_speculative_tokens": 4}
TREE = {"method": "draft_tree", "model": "minicoder-draft"}
STAGED = {**DRAFT, "method": "staged"}
MEASURED_TREE = {**TREE, "tree_shape": "measured"}
HEADS = {"method": "heads", "num_speculative_tokens": 4}
SUFFIX_THEN_DRAFT = {"method": "suffix", "fallback": DRAFT}
METHODS = {
    "plain": None,
    "drafted": DRAFT,
    "tree": TREE,
    "staged": STAGED,
    "measured tree": MEASURED_TREE,
    "suffix, then drafted": SUFFIX_THEN_DRAFT,
    "heads": HEADS,
}
ROUGH_DRAFT = {**DRAFT, "quantization": "w8a8"}
INT8_DRAFT = {**DRAFT, "quantization": "int8"}
"""Beside a target with the same weights and cache: what the target's steps are compiled to runs the draft's too."""
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


@cache
def prompts() -> list[str]:
    return [p.prompt for p in held_out_prompts(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy tokens of transformers, one prompt at a time, fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = bundled.path("minicoder")
    model = AutoModelForCausalLM.from_pretrained(path).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    out = []
    for prompt in prompts():
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(
                ids["input_ids"],
                attention_mask=ids["attention_mask"],
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        out.append(tokens[0, ids["input_ids"].shape[1] :].tolist())
    return out


def tokens_of(llm: LLM, texts: list[str]) -> list[list[int]]:
    outputs = llm.generate(texts, GREEDY, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.pool.num_used == 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("speculative", [None, DRAFT], ids=["plain", "drafted"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_together(expected: list[list[int]], block_size: int, speculative: dict | None) -> None:
    llm = LLM("minicoder", block_size=block_size, speculative_config=speculative)
    assert tokens_of(llm, prompts()) == expected


@pytest.mark.parametrize("options", [{"method": "ngram", "prompt_lookup_min": 2}, {"method": "suffix"}], ids=str)
def test_together_looking_back(expected: list[list[int]], options: dict) -> None:
    """The second time, `suffix` has every output to guess from; tokens stay what they are."""
    llm = LLM("minicoder", speculative_config=options)
    assert tokens_of(llm, prompts()) == expected
    steps = llm.engine.num_steps
    assert tokens_of(llm, prompts()) == expected
    assert options["method"] == "ngram" or llm.engine.num_steps - steps < steps


@pytest.mark.parametrize("speculative", [None, DRAFT, TREE], ids=["plain", "drafted", "tree"])
def test_in_plain_pytorch(expected: list[list[int]], speculative: dict | None) -> None:
    llm = LLM("minicoder", speculative_config=speculative, enforce_eager=True)
    assert llm.engine.runner.executor is None
    assert tokens_of(llm, prompts()) == expected


def test_a_draft_of_fewer_bits_changes_nothing(expected: list[list[int]]) -> None:
    llm = LLM("minicoder", speculative_config=ROUGH_DRAFT)
    assert tokens_of(llm, prompts()) == expected


@pytest.mark.parametrize(
    ("options", "draft"),
    [
        ({"quantization": "w8a8"}, ROUGH_DRAFT),
        ({"quantization": "int8", "kv_cache_dtype": "int8"}, INT8_DRAFT),
        ({"quantization": "int4"}, ROUGH_DRAFT),
        ({"dtype": "bfloat16"}, ROUGH_DRAFT),
    ],
    ids=str,
)
def test_rounded_numbers_give_the_same_tokens_alone_in_company_and_drafted(
    options: dict[str, str], draft: dict[str, Any]
) -> None:
    # Only the compiled step promises this: there a token is the same to the last bit whatever runs beside it.
    texts = prompts()[:16]
    together = tokens_of(LLM("minicoder", **options), texts)
    alone = LLM("minicoder", block_size=8, enable_prefix_caching=False, **options)
    assert alone.engine.runner.executor is not None
    assert [tokens_of(alone, [text])[0] for text in texts] == together
    assert tokens_of(LLM("minicoder", speculative_config=draft, **options), texts) == together


@pytest.mark.parametrize("speculative", [None, DRAFT], ids=["plain", "drafted"])
def test_one_by_one(expected: list[list[int]], speculative: dict | None) -> None:
    llm = LLM("minicoder", speculative_config=speculative)
    assert [tokens_of(llm, [prompt])[0] for prompt in prompts()] == expected


@pytest.mark.parametrize("speculative", [None, DRAFT, TREE], ids=["plain", "drafted", "tree"])
def test_chunked_prefill_of_seven_tokens(expected: list[list[int]], speculative: dict | None) -> None:
    llm = LLM("minicoder", max_num_seqs=4, max_num_batched_tokens=7, speculative_config=speculative)
    with llm.trace() as trace:
        assert tokens_of(llm, prompts()) == expected
    assert max(sum(work.num_tokens for work in step.work) for step in trace.of(StepRan)) == 7


@pytest.mark.parametrize("speculative", METHODS.values(), ids=METHODS)
def test_pool_so_small_that_requests_are_preempted(expected: list[list[int]], speculative: dict | None) -> None:
    llm = LLM("minicoder", block_size=4, num_kv_blocks=67, speculative_config=speculative)
    with llm.trace() as trace:
        assert tokens_of(llm, prompts()) == expected
    assert len(trace.of(RequestPreempted)) >= 5
    assert bool(trace.of(DraftProposed)) == (speculative is not None)
