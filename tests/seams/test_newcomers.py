"""What a newcomer adds in one file: a cache layout, a drafter, a model family. Slow and right; no fast path changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Batch
from minillm.cache.paged import PagedKVCache
from minillm.errors import UnsupportedError
from minillm.models import families
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.families import Family
from minillm.request import Request
from minillm.speculative.drafter import Draft, DraftContext, Drafter
from tests.conftest import TinyPair

PROMPTS = ["def add(a, b):\n    return a\n", "for line in lines:\n    print(line)\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]


# ---------------------------------------------------------------------------------------- a layout: keys in eight bits


class Fp8KeysCache(PagedKVCache):
    """Keys in float8 (e4m3), values as they are."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device)
        self.keys = torch.empty(self.keys.shape, dtype=torch.float8_e4m3fn, device=device)

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        return config.num_layers * block_size * config.kv_size * (1 + dtype.itemsize)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        self.keys[layer].view(torch.uint8)[batch.slot_mapping] = k.to(torch.float8_e4m3fn).view(torch.uint8)
        self.values[layer].index_copy_(0, batch.slot_mapping, v)
        keys = self.keys[layer].to(q.dtype)
        return self.ops["paged_attention"](q, keys, self.values[layer], batch, self.windows[layer])


def test_a_layout_with_keys_in_fp8(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), kv_cache_config={"layout": Fp8KeysCache})
    assert llm.engine.runner.executor is None  # it stores in a way of its own, so nobody reads it but `attend`
    compiled = LLM("minicoder", num_kv_blocks=8, kv_cache_config={"layout": Fp8KeysCache}).engine.runner
    assert "Fp8KeysCache stores them in its own way" in (compiled.unsupported_reason() or "")
    plain = LLM(str(tiny.target))
    assert llm.engine.runner.cache.num_bytes < 0.65 * plain.engine.runner.cache.num_bytes
    whole = tokens(llm)
    assert whole == tokens(LLM(str(tiny.target), kv_cache_config={"layout": Fp8KeysCache}, block_size=4))
    drafted = {"method": "draft_model", "model": str(tiny.draft)}
    assert tokens(LLM(str(tiny.target), kv_cache_config={"layout": Fp8KeysCache}, speculative_config=drafted)) == whole
    with pytest.raises(UnsupportedError, match="tree"):  # its `attend` does not know trees, though its parent's does
        LLM(
            str(tiny.target),
            kv_cache_config={"layout": Fp8KeysCache},
            speculative_config={**drafted, "method": "draft_tree"},
        )


# ----------------------------------------------------------------------------------- a drafter: the last line again


@dataclass(frozen=True)
class RepeatOptions:
    newline: int = 10
    """The token that ends a line."""


class RepeatLastLine(Drafter):
    """Guesses that the line before this one comes again."""

    Options = RepeatOptions

    def __init__(self, newline: int) -> None:
        self.newline = newline

    @classmethod
    def build(cls, context: DraftContext) -> RepeatLastLine:
        return cls(context.options.newline)

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        return [Draft(self._guess(request.token_ids, most)) for request, most in zip(requests, num_drafts, strict=True)]

    def _guess(self, token_ids: list[int], most: int) -> list[int]:
        ends = [i for i, token in enumerate(token_ids) if token == self.newline]
        if len(ends) < 2:
            return []
        done = len(token_ids) - ends[-1] - 1
        return token_ids[ends[-2] + 1 + done : ends[-1] + 1][:most]


def test_a_drafter_that_repeats_the_last_line(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), speculative_config={"method": RepeatLastLine, "newline": 10})
    plain = LLM(str(tiny.target))
    newline = plain.get_tokenizer().encode("\n")[-1]
    assert llm.engine.drafter.newline == 10
    llm = LLM(str(tiny.target), speculative_config={"method": RepeatLastLine, "newline": newline})
    with llm.trace() as trace:
        assert tokens(llm) == tokens(plain)
    assert any(type(event).__name__ == "DraftProposed" and event.token_ids for event in trace)


# ---------------------------------------------------------------------------------------- a family: logits soft-capped


class SoftCapDecoder(Decoder):
    """Gemma 2's final soft-capping: c · tanh(logits / c)."""

    def logits(self, hidden: Tensor) -> Tensor:
        cap = self.config.extra["final_logit_softcapping"]
        return cap * torch.tanh(super().logits(hidden) / cap)


SOFT_CAP = Family("softcap", decoder=SoftCapDecoder, own_fields={"final_logit_softcapping": 30.0})


@pytest.fixture
def soft_capped(tiny: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(families.FAMILIES, "SoftCapForCausalLM", SOFT_CAP)
    folder = tmp_path / "softcap"
    shutil.copytree(tiny.target, folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["SoftCapForCausalLM"], "model_type": "softcap", "final_logit_softcapping": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_family_with_capped_logits(tiny: TinyPair, soft_capped: Path) -> None:
    llm, plain = LLM(str(soft_capped)), LLM(str(tiny.target))
    assert type(llm.engine.runner.model) is SoftCapDecoder and llm.engine.runner.executor is None
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    assert tokens(llm, params) == tokens(plain, params)  # tanh keeps the order
    capped, free = (m.generate(PROMPTS, params, use_tqdm=False)[0].outputs[0].logprobs for m in (llm, plain))
    assert max(next(iter(row.values())).logprob for row in capped) < max(next(iter(r.values())).logprob for r in free)
    drafted = LLM(str(soft_capped), speculative_config={"model": str(tiny.draft)})
    assert tokens(drafted) == tokens(llm)
    assert tokens(LLM(str(soft_capped), quantization="int8")) == tokens(LLM(str(tiny.target), quantization="int8"))


def test_a_decoder_that_builds_its_layers_itself_runs_and_is_not_quantised_as_it_loads(
    soft_capped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnLayers(SoftCapDecoder):
        def __init__(self, config: ModelConfig) -> None:
            super().__init__(config)

    before = tokens(LLM(str(soft_capped)))
    monkeypatch.setitem(families.FAMILIES, "SoftCapForCausalLM", replace(SOFT_CAP, decoder=OwnLayers))
    assert tokens(LLM(str(soft_capped))) == before
    with pytest.raises(UnsupportedError, match=r"OwnLayers builds its layers itself.*; leave out quantization"):
        LLM(str(soft_capped), quantization="int8")
