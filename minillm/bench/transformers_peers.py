"""transformers as a peer with its best settings: each setting is tried briefly, and the fastest is measured.

Greedy `generate`, batch 1: with the growing cache (`dynamic`), with the preallocated one (`static`), and with a draft
model (assisted generation), once with transformers' default settings and once with a fixed number of drafts. `compiled`
is a system of its own: the preallocated cache and decode through torch.compile, which needs a C++ compiler and most of
a minute before the first token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minillm.bench.completion import Completion

PLAIN = ("dynamic", "static")
PREFILL = ("forward",)
"""The one setting for a single new token: a forward without `generate`, with a new growing cache."""
COMPILED = ("compiled",)
ASSISTED: dict[str, dict[str, Any]] = {
    "its own number of drafts": {},
    "as many drafts as minillm": {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0},
}


class FirstTokens:
    """A streamer for `generate` that records when the first new tokens arrive, and how many arrive together."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.count = 0
        self._prompt_is_due = True

    def put(self, token_ids: Any) -> None:
        """Called with the prompt, then with new tokens."""
        if self._prompt_is_due:
            self._prompt_is_due = False
        elif self.at is None:
            self.at, self.count = time.perf_counter(), token_ids.numel()

    def end(self) -> None:
        """Called when the text is complete."""


class Transformers:
    """A checkpoint loaded by transformers, optionally with a draft model."""

    def __init__(
        self, folder: Path, dtype: str, setting: str, context: int, draft: Path | None = None, drafts: int = 4
    ) -> None:
        """`setting`: one of `PLAIN`, `PREFILL` or `COMPILED`, or of `ASSISTED` if there is a draft. `dtype` is torch's
        name.

        `context`: size of the preallocated cache in tokens. All completions share one cache, because another size would
        trigger a recompilation.
        """
        import torch

        self.model = _load(folder, dtype)
        self.options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
        self.details: dict[str, Any] = {"setting": setting, "threads": torch.get_num_threads()}
        self.cache: Any = None
        if setting in ("static", "compiled"):
            from transformers import StaticCache

            self.cache = self.options["past_key_values"] = StaticCache(config=self.model.config, max_cache_len=context)
        if setting in COMPILED:
            self.options["compile_config"] = _compile_config("cpu")
        if setting in ASSISTED and draft is not None:
            self.options["assistant_model"] = _assistant(draft, dtype, setting, drafts)

    def complete(self, prompt: Sequence[int], new_tokens: int) -> Completion:
        """See `Completer`. With the setting of `PREFILL`, it generates one token, whatever is asked for."""
        import torch

        if self.details["setting"] in PREFILL:
            return self._first_token(prompt)
        ids = torch.tensor([list(prompt)])
        first = FirstTokens()
        began = time.perf_counter()
        with torch.inference_mode():
            if self.cache is not None:
                self.cache.reset()
            found = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, streamer=first, **self.options
            )
        ended = time.perf_counter()
        tokens = found[0, ids.shape[1] :].tolist()
        return Completion(tokens, first.at - began, ended - first.at, first.count)

    def _first_token(self, prompt: Sequence[int]) -> Completion:
        """Time one forward without `generate`, whose overhead would dominate for a short prompt."""
        import torch

        began = time.perf_counter()
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1).logits
            token = int(logits[0, -1].argmax())
        return Completion([token], time.perf_counter() - began, 0.0)


def _load(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None  # end of text does not stop it: all run to the full length
    return model


def _assistant(folder: Path, dtype: str, setting: str, drafts: int) -> Any:
    assistant = _load(folder, dtype)
    for name, value in ASSISTED[setting].items():
        setattr(assistant.generation_config, name, value)
    if ASSISTED[setting]:
        assistant.generation_config.num_assistant_tokens = drafts
    return assistant


def _compile_config(device: str) -> Any:
    """`device`: "cpu" or "cuda". On a GPU it is transformers' default, which records CUDA graphs."""
    from transformers import CompileConfig

    if device != "cpu":
        return CompileConfig()
    config = CompileConfig(fullgraph=False, mode="default", dynamic=False)
    config._compile_all_devices = True  # without it `generate` compiles for GPUs only
    return config
