"""The systems in benchmarks of one request at a time: their names, their requirements, and how each is loaded.

A name fully describes a system: `minillm int8 + draft`, `transformers fp32 assisted`, `llama.cpp Q8_0`. All complete
the same prompts greedily with the same number of threads.

- `minillm int8`: 8-bit weights, the unembedding's too; the inputs of products are rounded to 16 bits.
- `minillm w8a8`: the inputs of the layers' products have 8 bits as well. llama.cpp's `Q8_0` does so for all products.
- `minillm int4`: 4-bit weights in the layers, in groups of 128; the unembedding is not quantised.

Activations, KV cache and unquantised weights of these three are in fp32.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from minillm.bench import llama_cpp, own_engine, transformers_peers
from minillm.bench.completion import Completer, Completion, completion_metrics
from minillm.bench.harness import Counted, System, peak_memory_of
from minillm.errors import ConfigError
from minillm.models.held_out import held_out_prompts
from minillm.models.hub import resolve
from minillm.training.compiling import has_compiler

GGUF_TYPES = {"llama.cpp f32": "f32", "llama.cpp bf16": "bf16", "llama.cpp Q8_0": "q8_0"}
WINDOWS_CRASH = 0xC0000000
"""On Windows the least exit code of a process that crashed. Elsewhere that of one that a signal ended is negative."""
TRIALS, TRIAL_TOKENS = 5, 32
"""Timed completions with each setting of a peer, and their most new tokens: enough to find the fastest setting."""


@dataclass(frozen=True)
class Workload:
    """The input of all systems of one benchmark. Its `repr` is Python code that recreates it."""

    model: str
    """A bundled name, a folder or a hub id."""
    draft: str | None
    prompts: list[list[int]]
    new_tokens: int
    num_drafts: int = 4
    """Draft tokens per round of the draft model. Methods without a model have numbers of their own
    (`own_engine.DRAFT_FREE_METHODS`)."""
    gguf: dict[str, str] = field(default_factory=dict)
    """Type of a GGUF file → its path."""
    settings: dict[str, str] = field(default_factory=dict)
    """Name of a peer → its fastest setting."""
    tried: dict[str, dict[str, float]] = field(default_factory=dict)
    """Name of a peer with several settings → setting → milliseconds per token (per prompt if only one is generated),
    the median of short trials."""

    @property
    def context(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return max(map(len, self.prompts)) + self.new_tokens


def draft_for(model: str, draft: str | None) -> str | None:
    """The draft model to use: `draft` if given, else the bundled one if the model is bundled, else None.

    Raises what `resolve` raises for a draft model that does not exist, before anything is measured.
    """
    if draft is not None:
        resolve(draft)
    return draft or {"minicoder": "minicoder-draft"}.get(model)


def choose(known: Sequence[str], wanted: Sequence[str] | None, what: str = "system") -> list[str]:
    """The names of the systems (or `what` they are) to run, in the order of `known`. Raises `ConfigError` for an
    unknown name.

    `wanted`: None for all. A name with a comma may be in parts: those of a list that was split at its commas.
    """
    names = _joined(wanted or (), known)
    for name in names:
        if name not in known:
            raise ConfigError(f"no {what} {name!r} in this benchmark; there are: {', '.join(known)}")
    return [name for name in known if not names or name in names]


def _joined(parts: Sequence[str], known: Sequence[str]) -> list[str]:
    """`parts`, where neighbours that together are a known name are one: the longest such name."""
    names: list[str] = []
    while parts:
        count = next((n for n in range(len(parts), 1, -1) if ", ".join(parts[:n]) in known), 1)
        names.append(", ".join(parts[:count]))
        parts = parts[count:]
    return names


def left_out(names: Iterable[str], draft: str | None) -> dict[str, str]:
    """Name → reason, for each system that cannot run here."""
    reasons = {}
    for name in names:
        if name in GGUF_TYPES and not llama_cpp.installed():
            reasons[name] = llama_cpp.NOT_INSTALLED
        elif name.endswith(("+ draft", "assisted")) and draft is None:
            reasons[name] = "there is no draft model for it"
        elif name.endswith("compiled") and not has_compiler():
            reasons[name] = "there is no C++ compiler"
    return reasons


def prompt_ids(model: str, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Token ids of the first `count` held-out prompts with at least `shortest` tokens, cut off after `longest`.

    Raises `ConfigError` if there are fewer, or if `longest` is less than `shortest`.
    """
    if not 1 <= shortest <= longest:
        raise ConfigError(f"prompts of {shortest} to {longest} tokens were requested; the former must be 1 or more")
    from minillm.models.hub import resolve
    from minillm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve(model))
    encoded = (tokenizer.encode(prompt.prompt) for prompt in held_out_prompts())
    found = [ids[:longest] for ids in encoded if len(ids) >= shortest]
    if not 1 <= count <= len(found):
        raise ConfigError(f"{count} prompts of {shortest} tokens or more were requested; there are 1 to {len(found)}")
    return found[:count]


def room_for_prompt(model: str, new_tokens: int, shortest: int, option: str = "--new-tokens") -> int:
    """Most prompt tokens that leave room for `new_tokens`, which `option` gives.

    Raises `ConfigError` if these are fewer than `shortest`.
    """
    from minillm.models.hub import resolve
    from minillm.models.loading import load_config

    context = load_config(resolve(model)).max_position_embeddings
    if context - new_tokens < shortest:
        raise ConfigError(
            f"{option} {new_tokens} leaves {max(0, context - new_tokens)} of {context} tokens for a prompt of "
            f"{shortest}; give at most {context - shortest}"
        )
    return context - new_tokens


@contextmanager
def prepared(workload: Workload, names: Sequence[str]) -> Iterator[Workload]:
    """Add to `workload` what `exported` and `with_best_settings` add."""
    with exported(workload, names) as ready:
        yield with_best_settings(ready, names)


@contextmanager
def exported(workload: Workload, names: Sequence[str]) -> Iterator[Workload]:
    """Add to `workload` the GGUF files of these systems, which are deleted after the block.

    Raises `ConfigError` if llama.cpp crashes on one of them.
    """
    from minillm.export.gguf import export_gguf

    with tempfile.TemporaryDirectory() as folder:
        gguf = {GGUF_TYPES[name]: str(Path(folder, f"{GGUF_TYPES[name]}.gguf")) for name in names if name in GGUF_TYPES}
        for kind, file in gguf.items():
            export_gguf(workload.model, Path(file), kind)
        workload = replace(workload, gguf=gguf)
        for name in names:
            if name in GGUF_TYPES and _crashes(name, workload):
                raise ConfigError(f"{name} crashes on this processor; name the others with --systems")
        yield workload


def with_best_settings(workload: Workload, names: Sequence[str]) -> Workload:
    """Add to `workload` the fastest setting of each peer in `names` on its longest prompt."""
    peers = {name: _settings(name, workload) for name in names if _settings(name, workload)}
    tried = {name: _try_settings(name, workload, settings) for name, settings in peers.items() if len(settings) > 1}
    fastest = {name: min(times, key=lambda setting: times[setting]) for name, times in tried.items()}
    return replace(workload, tried=tried, settings={name: settings[0] for name, settings in peers.items()} | fastest)


def load(name: str, workload: Workload) -> Completer:
    """Load the system of that name."""
    if name in workload.settings:
        return _load_peer(name, workload, workload.settings[name])
    llm_options = own_engine.options(name, workload.draft, workload.num_drafts)
    return own_engine.OwnEngine(workload.model, **llm_options)


def decode_system(name: str, workload: Workload, baseline: str | tuple[str, ...] | None = None) -> System:
    """Load the system of that name for `harness.compare`. The time after the first tokens is measured."""
    completer = load(name, workload)
    last: list[Completion] = []
    every: list[Completion] = []

    def run() -> list[list[int]]:
        last[:] = [completer.complete(prompt, workload.new_tokens) for prompt in workload.prompts]
        return [completion.token_ids for completion in last]

    def counted() -> Counted:
        every.extend(last)
        num_tokens = sum(c.num_decoded for c in last)
        if num_tokens == 0:  # a round of assisted generation may give them all
            raise ConfigError(
                f"{name} gave all {workload.new_tokens} new tokens of each prompt at once, so there is no decoding "
                "to measure; raise --new-tokens"
            )
        return Counted(sum(c.decode_s for c in last), num_tokens)

    def extra() -> dict[str, object]:
        tried = {"tried_ms_per_token": workload.tried[name]} if name in workload.tried else {}
        return {**completer.details, **tried, **completion_metrics(workload.prompts, every)}

    return System(name, run, baseline, extra, counted)


def peak_memory(name: str, workload: Workload) -> int | None:
    """Peak resident bytes of a new process that loads the system and completes every prompt once."""
    module = __name__
    return peak_memory_of(f"from {module} import Workload, decode_system; decode_system({name!r}, {workload!r}).run()")


def _crashes(name: str, workload: Workload) -> bool:
    """Whether a new process crashes in which a llama.cpp system completes a prompt. In this process that would end the
    benchmark, and what was measured would be lost."""
    call = f"_try_settings({name!r}, {workload!r}, {llama_cpp.SETTINGS!r}, trials=1)"
    command = [sys.executable, "-c", f"from {__name__} import Workload, _try_settings; {call}"]
    code = subprocess.run(command, capture_output=True, check=False).returncode
    return code < 0 or code >= WINDOWS_CRASH


def _try_settings(name: str, workload: Workload, settings: Iterable[str], trials: int = TRIALS) -> dict[str, float]:
    """Setting → median milliseconds per token of short completions of the longest prompt, in turn, after a warm-up."""
    peers = {setting: _load_peer(name, workload, setting) for setting in settings}
    prompt, new_tokens = max(workload.prompts, key=len), min(workload.new_tokens, TRIAL_TOKENS)
    seconds: dict[str, list[float]] = {setting: [] for setting in peers}
    for _ in range(1 + trials):
        for setting, peer in peers.items():
            found = peer.complete(prompt, new_tokens)
            seconds[setting].append(found.decode_s / found.num_decoded if found.num_decoded else found.prefill_s)
    return {setting: 1000 * statistics.median(each[1:]) for setting, each in seconds.items()}


def _settings(name: str, workload: Workload) -> Sequence[str]:
    """The settings to try for a peer; none for a system of minillm."""
    if name in GGUF_TYPES:
        return tuple(llama_cpp.SETTINGS)
    if not name.startswith("transformers"):
        return ()
    if workload.new_tokens == 1:
        return transformers_peers.PREFILL
    special = {"assisted": transformers_peers.ASSISTED, "compiled": transformers_peers.COMPILED}
    return tuple(special.get(name.split()[-1], transformers_peers.PLAIN))


def _load_peer(name: str, workload: Workload, setting: str) -> Completer:
    import torch

    from minillm.models.hub import resolve

    if name in GGUF_TYPES:
        file = Path(workload.gguf[GGUF_TYPES[name]])
        return llama_cpp.LlamaCpp(file, workload.context, torch.get_num_threads(), setting)
    draft = resolve(workload.draft) if name.endswith("assisted") and workload.draft else None
    dtype = own_engine.DTYPES[name.split()[1]]
    return transformers_peers.Transformers(
        resolve(workload.model), dtype, setting, workload.context, draft, workload.num_drafts
    )
