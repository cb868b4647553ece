"""One script, two engines: everything below is what a user of vLLM could write, and only the import differs.

    python script.py minillm FOLDER        python script.py vllm FOLDER

prints one JSON of what a user gets to see. What is greedy, or sampled without a choice (`top_k=1`), is told in full;
of what depends on chance only the shape is. FOLDER holds the bundled `minicoder`: the cases are made for its tokens.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import sys
from typing import Any

DTYPE = "float32"
CONTEXT = 256
BLOCK = 32
"""Tokens per cache block: vLLM on a CPU wants a multiple of 32."""

FIB = "def fib(n):"
MAIN = "import os\nimport sys\n\n\ndef main(argv=None):\n"
LICENCE = '# Licensed under the Apache License, Version 2.0 (the "License");\n# you may not use this file except in'
ENDS = "try:\n    from . import _distributor_init_local  # noqa: F401\nexcept ImportError:\n    pass\n"
"""The bundled model ends the file here: its first token is the end of text."""
UNICODE = "# ümläut é\nnames = ['Zoë', '日本']\n"
STARTS_LATE = 40
"""Where the long prompts of ids start in the text they are made from: no other prompt has their blocks."""
END_OF_TEXT = 0
CALL = 725
"""The token `(n`, the seventh after FIB."""

GREEDY = {"temperature": 0, "max_tokens": 12}
FORCED = {"temperature": 1.0, "top_k": 1, "max_tokens": 6}
"""Sampled, but from one token."""

CASES: dict[str, tuple[Any, Any]] = {
    # what a prompt may be, and how prompts and params pair up
    "greedy": ([FIB, MAIN, LICENCE], GREEDY),
    "one string": (FIB, {"temperature": 0}),
    "token ids": ([{"prompt_token_ids": [5, 9, 21, 300]}], GREEDY),
    "text in a mapping": ([{"prompt": FIB}, {"prompt_token_ids": [5, 9]}], GREEDY),
    "one params each": ([FIB, MAIN, LICENCE], [GREEDY, {"temperature": 0, "max_tokens": 3}, FORCED]),
    "no prompts": ([], GREEDY),
    # when it ends
    "up to the context": (LICENCE, {"temperature": 0, "max_tokens": None}),
    "end of text": (ENDS, GREEDY),
    "end of text shown": (ENDS, {**GREEDY, "skip_special_tokens": False}),
    "end of text shown as a stop": (
        ENDS,
        {**GREEDY, "skip_special_tokens": False, "include_stop_str_in_output": True},
    ),
    "end of text ignored": (ENDS, {**GREEDY, "ignore_eos": True}),
    "end of text ignored and shown": (ENDS, {**GREEDY, "ignore_eos": True, "skip_special_tokens": False}),
    "end of text put off": (ENDS, {**GREEDY, "min_tokens": 5}),
    "end of text put off and ignored": (ENDS, {**GREEDY, "min_tokens": 5, "ignore_eos": True}),
    "end of text as a stop token": (ENDS, {**GREEDY, "stop_token_ids": [END_OF_TEXT]}),
    "end of text ignored, but a stop token": (
        ENDS,
        {**GREEDY, "stop_token_ids": [END_OF_TEXT], "ignore_eos": True},
    ),
    "stop string": (FIB, {**GREEDY, "stop": "\n        r"}),
    "stop string kept": (FIB, {**GREEDY, "stop": "\n        r", "include_stop_str_in_output": True}),
    "stop string inside a token": (LICENCE, {**GREEDY, "stop": ["icen"]}),
    "stop string inside a token kept": (LICENCE, {**GREEDY, "stop": ["icen"], "include_stop_str_in_output": True}),
    "stop string over two tokens": (LICENCE, {**GREEDY, "stop": ["pli"]}),
    "stop strings, one never comes": (FIB, {**GREEDY, "stop": ["zebra", "fib"]}),
    "stop strings in one token, one in the other": (LICENCE, {**GREEDY, "stop": ["icens", "cen"]}),
    "stop strings in one token, with one end": (LICENCE, {**GREEDY, "stop": ["cens", "icens"]}),
    "stop string put off": (FIB, {**GREEDY, "stop": "eturn", "min_tokens": 10}),
    "stop string complete before min_tokens": (LICENCE, {**GREEDY, "stop": "ance", "min_tokens": 4}),
    "stop string complete at min_tokens": (LICENCE, {**GREEDY, "stop": "ance", "min_tokens": 3}),
    "stop string complete after min_tokens": (LICENCE, {**GREEDY, "stop": "ance", "min_tokens": 2}),
    "stop string at the last token": (LICENCE, {"temperature": 0, "max_tokens": 3, "stop": "ance"}),
    "stop token": (FIB, {**GREEDY, "stop_token_ids": [CALL]}),
    "stop token kept": (FIB, {**GREEDY, "stop_token_ids": [CALL], "include_stop_str_in_output": True}),
    "stop token put off": (FIB, {**GREEDY, "stop_token_ids": [CALL], "min_tokens": 9, "logprobs": 1}),
    "stop token at the last token": (FIB, {"temperature": 0, "max_tokens": 7, "stop_token_ids": [CALL]}),
    "stop token before a stop string": (FIB, {**GREEDY, "stop_token_ids": [CALL], "stop": "def"}),
    "stop token that is a stop string": (FIB, {**GREEDY, "stop_token_ids": [CALL], "stop": "(n"}),
    "stop token without text": (FIB, {**GREEDY, "stop_token_ids": [CALL], "detokenize": False}),
    # penalties bend the choice and leave the log-probabilities alone
    "presence penalty": (LICENCE, {**GREEDY, "presence_penalty": 1.5, "logprobs": 1}),
    "frequency penalty": (MAIN, {**GREEDY, "frequency_penalty": 1.2, "max_tokens": 24, "logprobs": 1}),
    "repetition penalty": (FIB, {**GREEDY, "repetition_penalty": 1.3, "logprobs": 1}),
    "all penalties below zero": (
        FIB,
        {**GREEDY, "presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    ),
    # so do biases and forbidden tokens
    "logit bias": (FIB, {**GREEDY, "logit_bias": {CALL: 6.5, 200: -3.0}, "logprobs": 1}),
    "logit bias for all": (LICENCE, {**GREEDY, "logit_bias": {435: 100.0}}),
    "logit bias and penalties": (MAIN, {**GREEDY, "logit_bias": {CALL: 5.0}, "repetition_penalty": 1.4, "logprobs": 1}),
    "allowed tokens": (FIB, {**GREEDY, "allowed_token_ids": [CALL, 435, 717, 200, CALL], "logprobs": 1}),
    "one allowed token": (FIB, {"max_tokens": 4, "allowed_token_ids": [CALL]}),
    "bad words": (FIB, {**GREEDY, "bad_words": ["return", "if", " n"], "logprobs": 1}),
    "bad words of several tokens": (LICENCE, {**GREEDY, "bad_words": ["compliance", "with the", "isinstance", "the"]}),
    "bad words at the end of text": (ENDS, {**GREEDY, "bad_words": ["def", "import"], "min_tokens": 5}),
    "no bad words": (FIB, {**GREEDY, "bad_words": [], "logit_bias": {}}),
    "all of them": (
        MAIN,
        {
            **GREEDY,
            "bad_words": ["=", "("],
            "logit_bias": {717: 4.0},
            "allowed_token_ids": list(range(0, 4096, 3)),
            "frequency_penalty": 0.5,
            "logprobs": 1,
        },
    ),
    # log-probabilities
    "logprobs 0": (FIB, {**GREEDY, "logprobs": 0}),
    "logprobs 3": (FIB, {**GREEDY, "logprobs": 3}),
    "logprobs of a token that is not likely": (FIB, {**GREEDY, "repetition_penalty": 2.0, "logprobs": 2}),
    "logprobs of an end of text": (ENDS, {**GREEDY, "logprobs": 2}),
    "logprobs with a stop string": (FIB, {**GREEDY, "logprobs": 1, "stop": "ret"}),
    "prompt logprobs 0": (FIB, {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0}),
    "prompt logprobs 2": ([UNICODE, LICENCE], {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 2}),
    "prompt logprobs of one token": (
        [{"prompt_token_ids": [5]}],
        {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 1},
    ),
    "both logprobs": (MAIN, {**GREEDY, "logprobs": 1, "prompt_logprobs": 1}),
    # text
    "no text": (FIB, {**GREEDY, "detokenize": False}),
    "no text, with logprobs": (FIB, {**GREEDY, "detokenize": False, "logprobs": 1, "prompt_logprobs": 1}),
    # chance without a choice
    "top_k 1": (FIB, {**FORCED, "logprobs": 1}),
    "top_p tiny": (FIB, {"temperature": 1.0, "top_p": 1e-6, "max_tokens": 6}),
    "min_p 1": (FIB, {"temperature": 1.0, "min_p": 1.0, "max_tokens": 6}),
    "top_k -1": (FIB, {**GREEDY, "top_k": -1}),
    "temperature near 0": (FIB, {"temperature": 1e-7, "max_tokens": 6}),
    "several forced": ([FIB, MAIN], {**FORCED, "n": 3, "logprobs": 0}),
}
"""Name → prompts and the fields of SamplingParams. Every field here is left no choice."""

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}{{ m.tool_calls[0].function.arguments.n if m.tool_calls }}"
    "{{ '\\n' }}{% endfor %}{{ tools | length if tools }}{{ mood }}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
USER: dict[str, Any] = {"role": "user", "content": "def fib(n):"}
HALF: dict[str, Any] = {"role": "assistant", "content": "    return fib"}
CALLED: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "fib", "arguments": '{"n": 5}'}}

CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": ([USER], {}),
    "two": ([[USER], [USER, HALF, USER]], {}),
    "none": ([], {}),
    "no beginning of an answer": ([USER], {"add_generation_prompt": False}),
    "the last message goes on": ([USER, HALF], {"add_generation_prompt": False, "continue_final_message": True}),
    "parts": ([{**USER, "content": [{"type": "text", "text": "def"}, {"type": "text", "text": "fib"}]}], {}),
    "a call": ([USER, {"role": "assistant", "content": None, "tool_calls": [CALLED]}], {}),
    "no calls": ([USER, {**HALF, "tool_calls": []}], {}),
    "variables and tools": (
        [USER],
        {"chat_template_kwargs": {"mood": "calm"}, "tools": [{"type": "function", "function": {"name": "fib"}}]},
    ),
}
"""Name → conversations and the other arguments of `LLM.chat`; all are greedy and written by TEMPLATE."""

BAD_CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no template": ([USER], {"chat_template": None}),
    "an empty conversation": ([[]], {}),
    "no role": ([{"content": "a"}], {}),
    "an image": ([{**USER, "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], {}),
    "a template that is no Jinja": ([USER], {"chat_template": "{% if %}"}),
    "a template that refuses": ([USER], {"chat_template": "{{ raise_exception('no') }}"}),
    "goes on and begins an answer": ([USER, HALF], {"continue_final_message": True}),
    "a call of another type": ([{**HALF, "tool_calls": [{**CALLED, "type": "custom"}]}], {}),
    "more params than conversations": ([[USER]], {"sampling_params": [GREEDY, GREEDY]}),
    "a variable that is an argument": ([USER], {"chat_template_kwargs": {"tokenize": True}}),
}
"""What `LLM.chat` may refuse."""

SAMPLED: dict[str, tuple[Any, Any]] = {
    "sampled": ([FIB, MAIN], {"seed": 7, "max_tokens": 20, "ignore_eos": True}),
    "sampled in turn": (FIB, {"n": 3, "seed": 7, "max_tokens": 20, "ignore_eos": True, "logprobs": 2}),
    "sampled by default": ([FIB], None),
    "sampled, engine's seed": (FIB, {"seed": -1, "max_tokens": 4, "ignore_eos": True}),
}

BAD_PARAMS: dict[str, dict[str, Any]] = {
    "n 0": {"n": 0},
    "n negative": {"n": -1},
    "n no integer": {"n": 1.5},
    "n too large": {"n": 16385},
    "n 2 and greedy": {"n": 2, "temperature": 0},
    "n 2 and nearly greedy": {"n": 2, "temperature": 1e-7},
    "temperature negative": {"temperature": -0.1},
    "temperature over 2": {"temperature": 2.1},
    "temperature nan": {"temperature": math.nan},
    "temperature infinite": {"temperature": math.inf},
    "temperature text": {"temperature": "hot"},
    "temperature None": {"temperature": None},
    "top_p 0": {"top_p": 0.0},
    "top_p over 1": {"top_p": 1.1},
    "top_k -2": {"top_k": -2},
    "top_k no integer": {"top_k": 1.5},
    "min_p negative": {"min_p": -0.1},
    "min_p over 1": {"min_p": 1.1},
    "presence_penalty over 2": {"presence_penalty": 2.1},
    "frequency_penalty below -2": {"frequency_penalty": -2.1},
    "repetition_penalty 0": {"repetition_penalty": 0.0},
    "repetition_penalty infinite": {"repetition_penalty": math.inf},
    "max_tokens 0": {"max_tokens": 0},
    "min_tokens negative": {"min_tokens": -1},
    "min_tokens over max_tokens": {"min_tokens": 5, "max_tokens": 4},
    "logprobs -2": {"logprobs": -2},
    "logprobs True": {"logprobs": True},
    "prompt_logprobs -2": {"prompt_logprobs": -2},
    "stop empty": {"stop": ""},
    "stop with an empty string": {"stop": ["a", ""]},
    "stop no text": {"stop": 5},
    "stop without text": {"stop": "a", "detokenize": False},
    "stop_token_ids text": {"stop_token_ids": ["a"]},
    "stop_token_ids one number": {"stop_token_ids": 5},
    "bad_words empty": {"bad_words": [""]},
    "an option that nobody has": {"no_such_option": 1},
}
"""What SamplingParams itself may refuse."""

BAD_REQUESTS: dict[str, tuple[Any, Any]] = {
    "empty text": ("", GREEDY),
    "no ids": ({"prompt_token_ids": []}, GREEDY),
    "id over the vocabulary": ({"prompt_token_ids": [5, 4096]}, GREEDY),
    "prompt as long as the context": ({"prompt_token_ids": [5] * CONTEXT}, {"temperature": 0, "max_tokens": 1}),
    "prompt longer than the context": ({"prompt_token_ids": [5] * (CONTEXT + 1)}, {"temperature": 0, "max_tokens": 1}),
    "prompt and max_tokens over the context": ({"prompt_token_ids": [5] * (CONTEXT - 4)}, GREEDY),
    "min_tokens over the context": (FIB, {"temperature": 0, "max_tokens": None, "min_tokens": CONTEXT}),
    "more params than prompts": ([FIB], [GREEDY, GREEDY]),
    "fewer params than prompts": ([FIB, FIB], [GREEDY]),
    "prompt is a number": (5, GREEDY),
    "prompt is a mapping of nothing": ({}, GREEDY),
    "prompt with half a surrogate pair": ("a\ud800", GREEDY),
    "stop token over the vocabulary": (FIB, {**GREEDY, "stop_token_ids": [4096]}),
    "stop token negative": (FIB, {**GREEDY, "stop_token_ids": [-1]}),
    "no allowed token": (FIB, {**GREEDY, "allowed_token_ids": []}),
    "allowed token over the vocabulary": (FIB, {**GREEDY, "allowed_token_ids": [4096]}),
    "allowed token negative": (FIB, {**GREEDY, "allowed_token_ids": [-1]}),
    "logit bias over the vocabulary": (FIB, {**GREEDY, "logit_bias": {4096: 1.0}}),
    "logit bias negative": (FIB, {**GREEDY, "logit_bias": {-1: 1.0}}),
    "bad word without tokens": (FIB, {**GREEDY, "bad_words": [" "]}),
    "logprobs 21": (FIB, {"temperature": 0, "max_tokens": 1, "logprobs": 21}),
    "logprobs of all": (FIB, {"temperature": 0, "max_tokens": 1, "logprobs": -1}),
    "prompt_logprobs of all": (FIB, {"temperature": 0, "max_tokens": 1, "prompt_logprobs": -1}),
    "prompt is a list of ids": ([[5, 9, 21, 300]], GREEDY),
    "one prompt, a list of ids": ([5, 9, 21, 300], GREEDY),
    "prompt with a key that nobody has": ({"prompt": FIB, "promt": FIB}, GREEDY),
    "id negative": ({"prompt_token_ids": [5, -1]}, GREEDY),
}
"""What `generate` may refuse."""

BAD_ENGINES: dict[str, dict[str, Any]] = {
    "an option that nobody has": {"no_such_option": 1},
    "dtype unknown": {"dtype": "float31"},
    "max_model_len over the model's": {"max_model_len": 8192},
    "max_model_len 0": {"max_model_len": 0},
    "gpu_memory_utilization over 1": {"gpu_memory_utilization": 1.5},
    "max_num_seqs 0": {"max_num_seqs": 0},
    "quantization unknown": {"quantization": "no such method"},
    "scheduling_policy unknown": {"scheduling_policy": "last come"},
}
"""What `LLM` may refuse."""


class Script:
    """The engine's public names, a model, and what they say."""

    def __init__(self, engine: str, folder: str) -> None:
        self.engine = importlib.import_module(engine)
        self.folder = folder
        self.llm = self.engine.LLM(folder, dtype=DTYPE, max_model_len=CONTEXT, block_size=BLOCK)

    def params(self, options: Any) -> Any:
        """SamplingParams from their fields; a list of them from a list."""
        if isinstance(options, list):
            return [self.params(one) for one in options]
        return None if options is None else self.engine.SamplingParams(**options)

    def generate(self, prompts: Any, options: Any) -> list[Any]:
        """What `LLM.generate` returns."""
        return self.llm.generate(prompts, self.params(options), use_tqdm=False)

    def chat(self, messages: Any, options: dict[str, Any]) -> list[Any]:
        """What `LLM.chat` returns."""
        options = {"chat_template": TEMPLATE, **options}
        params = self.params(options.pop("sampling_params", GREEDY))
        return self.llm.chat(messages, params, False, **options)

    def answers(self) -> dict[str, Any]:
        """Everything. The caches fill in this order, so the number of cached tokens follows from it."""
        first = self.generate([FIB, MAIN], {"temperature": 0, "max_tokens": 1, "logprobs": 1})
        answers = {
            "signatures": self.signatures(),
            "objects": self.objects(first),
            "request ids": [output.request_id for output in first],
            "tokenizer": self.tokenizer(),
            "cached": self.cached(),
            "cases": {name: [told(output) for output in self.generate(*case)] for name, case in CASES.items()},
            "chats": {name: [told(output) for output in self.chat(*case)] for name, case in CHATS.items()},
            "cut characters": self.cut_characters(),
            "sampled": {name: [shape(output) for output in self.generate(*case)] for name, case in SAMPLED.items()},
            "seeds": self.seeds(),
            "refused": self.refused(),
            "after the refusals": [told(output) for output in self.generate([FIB, MAIN], GREEDY)],
        }
        answers["refused"]["LLM"] = self.refused_engines()  # last: vLLM may end the process's groups with a refused one
        return answers

    def signatures(self) -> dict[str, Any]:
        """Names and defaults of every option."""
        engine = self.engine
        made = engine.SamplingParams()
        params = defaults(engine.SamplingParams)
        changed = engine.SamplingParams(stop="a", stop_token_ids=[5, 5], seed=-1, temperature=0, top_k=7, top_p=0.5)
        return {
            "SamplingParams": params,
            "SamplingParams()": {name: plain(getattr(made, name)) for name in params if not name.startswith("_")},
            "SamplingParams, normalised": {
                **{n: plain(getattr(changed, n)) for n in ("stop", "stop_token_ids", "seed", "top_k", "top_p")},
                "temperature": engine.SamplingParams(temperature=0.005).temperature,
            },
            "LLM": defaults(engine.LLM),
            "EngineArgs": defaults(engine.EngineArgs),
            "generate": defaults(self.llm.generate),
            "chat": defaults(self.llm.chat),
        }

    def objects(self, outputs: list[Any]) -> dict[str, Any]:
        """Fields and methods of what comes back, and the types of those fields."""
        [output, *_] = outputs
        completion = output.outputs[0]
        logprob = next(iter(completion.logprobs[0].values()))
        found = {"LLM": self.llm, "SamplingParams": self.engine.SamplingParams()}
        found |= {"RequestOutput": output, "CompletionOutput": completion, "Logprob": logprob}
        return {
            kind: {name: type_of(getattr(thing, name)) for name in dir(thing) if not name.startswith("_")}
            for kind, thing in found.items()
        }

    def tokenizer(self) -> dict[str, Any]:
        """What `get_tokenizer` gives."""
        tokenizer = self.llm.get_tokenizer()
        return {
            "ids": tokenizer.encode(UNICODE),
            "text": tokenizer.decode(tokenizer.encode(UNICODE)),
            "end of text": tokenizer.eos_token_id,
            "size": len(tokenizer),
        }

    def cached(self) -> dict[str, list[int]]:
        """How many prompt tokens the prefix cache had, for prompts that come twice."""
        ids = self.llm.get_tokenizer().encode(LICENCE + MAIN * 12)[STARTS_LATE:]
        counts = {}
        for length in (BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1):
            prompt = {"prompt_token_ids": ids[:length]}
            counts[f"{length} tokens"] = [
                self.generate([prompt], {"temperature": 0, "max_tokens": 1})[0].num_cached_tokens for _ in range(2)
            ]
        asked = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0}
        counts["with prompt logprobs"] = [self.generate([prompt], asked)[0].num_cached_tokens]
        for salt in ("a", "b", "a"):
            [output] = self.generate([{**prompt, "cache_salt": salt}], {"temperature": 0, "max_tokens": 1})
            counts.setdefault("salted a, b, a", []).append(output.num_cached_tokens)
        self.llm.reset_prefix_cache()
        counts["after a reset"] = [self.generate([prompt], GREEDY)[0].num_cached_tokens]
        return counts

    def cut_characters(self) -> dict[str, Any]:
        """Texts whose prompt ends, or which end themselves, inside a character."""
        ids = self.llm.get_tokenizer().encode("# 日本語日本語日本語日本語")
        options = {"temperature": 0, "max_tokens": 4, "logprobs": 1}
        return {
            f"{length} ids": [told(o) for o in self.generate([{"prompt_token_ids": ids[:length]}], options)]
            for length in range(len(ids) - 3, len(ids) + 1)
        }

    def seeds(self) -> dict[str, bool]:
        """Whether chance is the same where it has to be, and not elsewhere."""
        options = {"max_tokens": 24, "ignore_eos": True}
        seven, again, eight = (
            [tuple(c.token_ids) for c in self.generate(FIB, {**options, "n": 3, "seed": seed})[0].outputs]
            for seed in (7, 7, 8)
        )
        return {"same seed": seven == again, "other seed": seven == eight, "all of n differ": len(set(seven)) == 3}

    def refused(self) -> dict[str, Any]:
        """Which parameters and requests are refused, where, and whether `except ValueError` catches it."""
        params = {name: verdict(lambda bad=bad: self.params(bad)) for name, bad in BAD_PARAMS.items()}
        requests = {name: verdict(lambda bad=bad: self.generate(*bad)) for name, bad in BAD_REQUESTS.items()}
        assigned = verdict(lambda: setattr(self.params(GREEDY), "max_tokens", 3))
        chats = {name: verdict(lambda bad=bad: self.chat(*bad)) for name, bad in BAD_CHATS.items()}
        return {"SamplingParams": params, "generate": requests, "chat": chats, "assigning to a field": assigned}

    def refused_engines(self) -> dict[str, Any]:
        """Which options of `LLM` are refused."""
        make = self.engine.LLM
        return {name: verdict(lambda bad=bad: make(self.folder, **bad)) for name, bad in BAD_ENGINES.items()}


def told(output: Any) -> dict[str, Any]:
    """A RequestOutput in full."""
    rows = output.prompt_logprobs
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": rows if rows is None else [row if row is None else row_of(row) for row in rows],
        "finished": output.finished,
        "outputs": [completion_of(completion) for completion in output.outputs],
    }


def completion_of(completion: Any) -> dict[str, Any]:
    """A CompletionOutput in full."""
    rows = completion.logprobs
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "cumulative_logprob": rounded(completion.cumulative_logprob),
        "logprobs": rows if rows is None else [row_of(row) for row in rows],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def row_of(row: dict[int, Any]) -> dict[str, Any]:
    """The log-probabilities of one position, by rank; `order` is that of the mapping, which JSON need not keep."""
    entries = sorted(row.items(), key=lambda item: item[1].rank)
    return {
        "order": list(row),
        "ids": [token for token, _ in entries],
        "logprob": [rounded(entry.logprob) for _, entry in entries],
        "rank": [entry.rank for _, entry in entries],
        "decoded_token": [entry.decoded_token for _, entry in entries],
    }


def rounded(value: float | None) -> float | None:
    """A log-probability with five decimals."""
    return value if value is None else round(value, 5)


def shape(output: Any) -> dict[str, Any]:
    """What of a sampled RequestOutput does not depend on chance."""
    return {
        "finished": output.finished,
        "index": [completion.index for completion in output.outputs],
        "length": [len(completion.token_ids) for completion in output.outputs],
        "finish_reason": [completion.finish_reason for completion in output.outputs],
        "logprob rows": [None if c.logprobs is None else len(c.logprobs) for c in output.outputs],
    }


def verdict(attempt: Any) -> dict[str, Any]:
    """Whether `attempt` raises, and if so what."""
    try:
        attempt()
    except Exception as problem:
        return {"refused": True, "ValueError": isinstance(problem, ValueError), "class": type(problem).__name__}
    return {"refused": False}


def defaults(function: Any) -> dict[str, Any]:
    """Parameter → default; one without is `required`."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    return {p.name: "required" if p.default is p.empty else plain(p.default) for p in parameters}


def plain(value: Any) -> Any:
    """A default as JSON has it; anything larger by the name of its type."""
    if isinstance(value, (list, tuple)) and all(isinstance(v, (str, int)) for v in value):
        return list(value)
    return value if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def type_of(value: Any) -> str:
    """The name of a value's type; `method` for what can be called."""
    return "method" if callable(value) else type(value).__name__


def main() -> None:
    """Run it and print the JSON; whatever else is printed goes to stderr, so that the JSON stays alone."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine, folder = sys.argv[1:]
    script = Script(engine, folder)
    import torch  # for its version alone

    about = {"engine": engine, "version": script.engine.__version__, "torch": torch.__version__, "dtype": DTYPE}
    json.dump({"about": about, **script.answers()}, answer, allow_nan=False)


if __name__ == "__main__":
    main()
