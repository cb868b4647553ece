"""minillm as a system of a benchmark. Its name determines its options: `minillm eager fp32`, `minillm int8 + draft`,
`minillm int8 + suffix`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from minillm.bench.completion import Completion

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
QUANTIZED = ("int8", "w8a8", "int4")
DRAFT_QUANTIZATION = "w8a8"
"""Of the draft model beside the compiled step. Still lossless: the target verifies every draft."""
DRAFT_FREE_METHODS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
        "num_speculative_tokens": 4,
        "adaptive": False,
    },
    "suffix": {
        "method": "suffix",
        "suffix_decoding_max_cached_requests": 0,
        "num_speculative_tokens": 8,
        "adaptive": False,
    },
}
"""Drafting without a model, as benchmarks use it. Earlier requests are not cached, because each request is repeated."""


def options(name: str, draft: str | None, num_drafts: int) -> dict[str, Any]:
    """The options of `LLM` for `name`. With quantised weights all else is in float32.

    Prefix caching is off, so that a repeated prompt is computed again.
    """
    words, _, method = name.removeprefix("minillm ").partition(" + ")
    precision = words.removeprefix("eager ")
    found: dict[str, Any] = {
        "dtype": "float32" if precision in QUANTIZED else DTYPES[precision],
        "quantization": precision if precision in QUANTIZED else None,
        "enforce_eager": words != precision,
        "enable_prefix_caching": False,
        "device": "cpu",
    }
    if method == "draft":
        found["speculative_config"] = {
            "method": "draft_model",
            "model": draft,
            "quantization": DRAFT_QUANTIZATION if words == precision else None,
            "num_speculative_tokens": num_drafts,
            "adaptive": False,
        }
    elif method:
        found["speculative_config"] = dict(DRAFT_FREE_METHODS[method])
    return found


class OwnEngine:
    """minillm's engine, from token ids to token ids."""

    def __init__(self, model: str, **llm_options: Any) -> None:
        from minillm import LLM

        self.llm = LLM(model, **llm_options)
        kept = ("dtype", "quantization", "enforce_eager", "kv_cache_dtype", "speculative_config")
        self.details: dict[str, Any] = {key: value for key, value in llm_options.items() if key in kept}

    def complete(self, prompt: Sequence[int], new_tokens: int) -> Completion:
        """See `Completer`."""
        from minillm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        [output] = self.llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        seconds, metrics = time.perf_counter() - began, output.metrics
        return Completion(
            output.outputs[0].token_ids,
            metrics.ttft,
            seconds - metrics.ttft,
            num_forwards=metrics.num_decode_forwards,
            num_drafts=metrics.num_drafts,
            num_accepted=metrics.num_accepted,
        )
