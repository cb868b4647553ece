"""llama.cpp as a peer, through its C functions. Between two tokens Python runs only one call and one argmax."""

from __future__ import annotations

import ctypes
import importlib.util
import time
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from minillm.bench.completion import Completion
from minillm.errors import UnsupportedError

NOT_INSTALLED = 'not installed: pip install "minillm-lessons[peers]"'
SETTINGS = ("flash attention, f16 cache", "fp32 attention and cache")
"""Settings of attention. The first is llama.cpp's default; it also rounds queries, so that logits would be off by about
a thousandth even with an fp32 cache. The second is exact to 1e-6."""


def installed() -> bool:
    """Whether the packages `llama_cpp` and `gguf` are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))


class LlamaCpp:
    """A GGUF file loaded by llama.cpp, which runs on the CPU, whatever it was built for."""

    def __init__(self, file: Path, context: int, threads: int, setting: str = SETTINGS[0]) -> None:
        """`context`: size of the KV cache in tokens. `setting`: one of `SETTINGS`.

        Raises `UnsupportedError` if llama.cpp is not installed or cannot load the file.
        """
        if not installed():
            raise UnsupportedError(f"llama.cpp is {NOT_INSTALLED}")
        self.lib = llama_cpp = _library()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0  # a build with CUDA or Metal would use the GPU
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), model_params)
        if not self.model:
            raise UnsupportedError(f"llama.cpp does not accept {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_threads = params.n_threads_batch = threads
        params.offload_kqv = params.op_offload = False  # of the GPU; a version without these fields ignores them
        if setting != SETTINGS[0]:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.close = weakref.finalize(self, _free, llama_cpp, self.context, self.model)
        """Frees llama.cpp's memory; called automatically when this object is garbage-collected."""
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.details: dict[str, Any] = {"setting": setting, "threads": threads}

    def complete(self, prompt: Sequence[int], new_tokens: int) -> Completion:
        """See `Completer`."""
        began = time.perf_counter()
        self.lib.llama_memory_clear(self.memory, False)
        tokens = [int(self.logits(prompt).argmax())]
        first = time.perf_counter()
        while len(tokens) < new_tokens:
            tokens.append(int(self.logits(tokens[-1:]).argmax()))
        return Completion(tokens, first - began, time.perf_counter() - first)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Append tokens. Returns the logits after the last one (`[vocab_size]`, fp32), valid until the next call."""
        ids = (ctypes.c_int32 * len(token_ids))(*token_ids)
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(ids, len(token_ids))):
            raise UnsupportedError(f"llama.cpp could not run {len(token_ids)} tokens")
        return np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, -1), (self.vocab_size,))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` from llama.cpp's own tokenizer. Control tokens in the text are recognised."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self.lib.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])


def _free(lib: Any, context: Any, model: Any) -> None:
    lib.llama_free(context)
    lib.llama_model_free(model)


@cache
def _library() -> Any:
    """llama.cpp's functions, with its log messages switched off."""
    import llama_cpp

    llama_cpp.llama_log_set(_say_nothing(llama_cpp), None)
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def _say_nothing(lib: Any) -> Any:
    """A C log callback that prints nothing. It is cached because it must outlive the library's calls."""
    return lib.llama_log_callback(lambda level, text, data: None)
