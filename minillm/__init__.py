"""minillm: an LLM inference engine small enough to read, complete enough to serve, and made to be watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Not lazy like the others: importing the subpackage `minillm.doctor` later would overwrite the function of that name.
from minillm.doctor.doctor import doctor
from minillm.version import __version__

if TYPE_CHECKING:
    from minillm.async_llm import AsyncLLM
    from minillm.config import EngineArgs
    from minillm.llm import LLM
    from minillm.llm_engine import LLMEngine
    from minillm.outputs import CompletionOutput, RequestOutput
    from minillm.sampling import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "LLMEngine",
    "AsyncLLM",
    "EngineArgs",
    "CompletionOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
    "doctor",
]

_HOMES = {
    "LLM": "minillm.llm",
    "LLMEngine": "minillm.llm_engine",
    "AsyncLLM": "minillm.async_llm",
    "EngineArgs": "minillm.config",
    "CompletionOutput": "minillm.outputs",
    "RequestOutput": "minillm.outputs",
    "RequestOutputKind": "minillm.sampling",
    "SamplingParams": "minillm.sampling",
}


def __getattr__(name: str) -> Any:
    """Load each public name on first use, so that `import minillm` and the command line start at once."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
