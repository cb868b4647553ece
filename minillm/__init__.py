"""minillm: an LLM inference engine small enough to read, complete enough to serve, and made to be watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Not on first use like the others: importing the module of the same name would then put it in the function's place.
from minillm.doctor import doctor

if TYPE_CHECKING:
    from minillm.llm import LLM
    from minillm.llm_engine import EngineArgs, LLMEngine
    from minillm.outputs import CompletionOutput, RequestOutput
    from minillm.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "EngineArgs", "CompletionOutput", "RequestOutput", "SamplingParams", "doctor"]

_HOMES = {
    "LLM": "minillm.llm",
    "LLMEngine": "minillm.llm_engine",
    "EngineArgs": "minillm.llm_engine",
    "CompletionOutput": "minillm.outputs",
    "RequestOutput": "minillm.outputs",
    "SamplingParams": "minillm.sampling",
}


def __getattr__(name: str) -> Any:
    """Load each public name on first use, so that `import minillm` and the command line start at once."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
