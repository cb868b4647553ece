"""Who takes part in a benchmark of one request at a time: names, what they need, and how each is loaded.

A name says everything: `minillm int8 + draft`, `transformers fp32 assisted`, `llama.cpp Q8_0`. All complete the same
prompts greedily on the same number of threads. `minillm int8` keeps weights in 8 bits, those of the unembedding too,
and the inputs of products in 16; `w8a8` has 8 for the inputs of its layers as well, as llama.cpp's `Q8_0` has for all;
`int4` has 4 for the weights of the layers, in groups of 128, and leaves the unembedding as it is.
Whatever precision such a name does not settle is `Workload.dtype`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from minillm.bench import llama_cpp, own_engine, transformers_peers
from minillm.bench.completion import Completer, Completion, figures
from minillm.bench.harness import Counted, System, peak_memory_of
from minillm.bench.prompts import held_out_prompts
from minillm.errors import ConfigError

GGUF_TYPES = {"llama.cpp f32": "f32", "llama.cpp bf16": "bf16", "llama.cpp Q8_0": "q8_0"}
TRIAL_TOKENS = 32
"""Enough to tell which setting of a peer is the fastest."""


@dataclass(frozen=True)
class Workload:
    """What all contestants of one benchmark are given. Its `repr` is Python that makes it again."""

    model: str
    """A bundled name, a folder or a hub id."""
    draft: str | None
    prompts: list[list[int]]
    new_tokens: int
    num_drafts: int = 4
    """Drafted tokens a round, for everyone who drafts."""
    dtype: str = "fp32"
    """Activations, KV cache and whatever is not quantised in `minillm int8` and `w8a8`."""
    gguf: dict[str, str] = field(default_factory=dict)
    """Type of a GGUF file → the file."""
    settings: dict[str, str] = field(default_factory=dict)
    """Name of a peer that can be run in several ways → the fastest of them."""
    tried: dict[str, dict[str, float]] = field(default_factory=dict)
    """Name of such a peer → each way → milliseconds per token in a short trial."""

    @property
    def context(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return max(map(len, self.prompts)) + self.new_tokens


def draft_for(model: str, draft: str | None) -> str | None:
    """The draft model to use: the one asked for, else the bundled one if the model is bundled, else none."""
    return draft or {"minicoder": "minicoder-draft"}.get(model)


def choose(known: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """The contestants to run, in the usual order. Raises `ConfigError` for a name that is none of them."""
    for name in wanted or ():
        if name not in known:
            raise ConfigError(f"no system {name!r} in this benchmark; there are: {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def left_out(names: Iterable[str], draft: str | None) -> dict[str, str]:
    """Name → why it cannot take part here, for those that cannot."""
    reasons = {}
    for name in names:
        if name in GGUF_TYPES and not llama_cpp.installed():
            reasons[name] = llama_cpp.NOT_INSTALLED
        elif name.endswith(("+ draft", "assisted")) and draft is None:
            reasons[name] = "there is no draft model for it"
        elif name.endswith("compiled") and not transformers_peers.can_compile():
            reasons[name] = "there is no C++ compiler"
    return reasons


def prompt_ids(model: str, count: int, shortest: int, longest: int) -> list[list[int]]:
    """The first `count` held-out prompts of at least `shortest` tokens, cut off after `longest`, as ids.

    Raises `ConfigError` if there are not so many.
    """
    from minillm.models.loading import resolve
    from minillm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve(model))
    encoded = (tokenizer.encode(prompt.prompt) for prompt in held_out_prompts())
    found = [ids[:longest] for ids in encoded if len(ids) >= shortest]
    if not 1 <= count <= len(found):
        raise ConfigError(f"{count} prompts of {shortest} tokens or more were asked for; there are 1 to {len(found)}")
    return found[:count]


@contextmanager
def prepared(workload: Workload, names: Sequence[str]) -> Iterator[Workload]:
    """`workload` with what these contestants need: GGUF files, which last as long as the block, and tried settings."""
    from minillm.export.gguf import export_gguf

    with tempfile.TemporaryDirectory() as folder:
        gguf = {GGUF_TYPES[name]: str(Path(folder, f"{GGUF_TYPES[name]}.gguf")) for name in names if name in GGUF_TYPES}
        for kind, file in gguf.items():
            export_gguf(workload.model, Path(file), kind)
        workload = replace(workload, gguf=gguf)
        tried = {name: _try_settings(name, workload) for name in names if _settings(name)}
        settings = {name: min(times, key=lambda setting: times[setting]) for name, times in tried.items()}
        yield replace(workload, tried=tried, settings=settings)


def load(name: str, workload: Workload) -> Completer:
    """The contestant of that name."""
    if name in workload.settings:
        return _load_peer(name, workload, workload.settings[name])
    llm_options = own_engine.options(name, workload.draft, workload.num_drafts, workload.dtype)
    return own_engine.OwnEngine(workload.model, **llm_options)


def decode_system(name: str, workload: Workload, baseline: str | tuple[str, ...] | None = None) -> System:
    """The contestant of that name for `harness.compare`; what counts is the time after the first tokens."""
    completer = load(name, workload)
    last: list[Completion] = []

    def run() -> list[list[int]]:
        last[:] = [completer.complete(prompt, workload.new_tokens) for prompt in workload.prompts]
        return [completion.token_ids for completion in last]

    def counted() -> Counted:
        return Counted(sum(c.decode_s for c in last), sum(c.num_decoded for c in last))

    def extra() -> dict[str, object]:
        tried = {"tried_ms_per_token": workload.tried[name]} if name in workload.tried else {}
        return {**completer.about, **tried, **figures(workload.prompts, last)}

    return System(name, run, baseline, extra, counted)


def peak_memory(name: str, workload: Workload) -> int | None:
    """Peak resident bytes of a process of its own that loads the contestant and completes every prompt once."""
    module = __name__
    return peak_memory_of(f"from {module} import Workload, decode_system; decode_system({name!r}, {workload!r}).run()")


def _try_settings(name: str, workload: Workload) -> dict[str, float]:
    """Setting → milliseconds per token, after a warm-up, of a short completion of the first prompt."""
    tried = {}
    for setting in _settings(name):
        peer = _load_peer(name, workload, setting)
        for _ in range(2):
            found = peer.complete(workload.prompts[0], min(workload.new_tokens, TRIAL_TOKENS))
        tried[setting] = 1000 * (found.decode_s / found.num_decoded if found.num_decoded else found.prefill_s)
    return tried


def _settings(name: str) -> Iterable[str]:
    if name in GGUF_TYPES:
        return llama_cpp.SETTINGS
    if not name.startswith("transformers"):
        return ()
    ways = {"assisted": transformers_peers.ASSISTED, "compiled": transformers_peers.COMPILED}
    return ways.get(name.split()[-1], transformers_peers.PLAIN)


def _load_peer(name: str, workload: Workload, setting: str) -> Completer:
    import torch

    from minillm.models.loading import resolve

    if name in GGUF_TYPES:
        file = Path(workload.gguf[GGUF_TYPES[name]])
        return llama_cpp.LlamaCpp(file, workload.context, torch.get_num_threads(), setting)
    draft = resolve(workload.draft) if name.endswith("assisted") and workload.draft else None
    dtype = own_engine.DTYPES[name.split()[1]]
    return transformers_peers.Transformers(
        resolve(workload.model), dtype, setting, workload.context, draft, workload.num_drafts
    )
