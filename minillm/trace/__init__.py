"""The engine's events (`events`), and states and metrics computed from them. The engine only emits events.

`request_metrics`, `step_metrics` and `run_metrics` count. Pictures are drawn from `cache_state`, `acceptance_state` and
`timeline_state`. `replay` computes the state after any step of a trace. `of_vllm` records a trace of a real vLLM.
`forward_events` are those of lessons that run a model without the engine.
"""

from minillm.trace.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    DraftProposed,
    DraftReason,
    DraftsPlanned,
    EngineStarted,
    Event,
    Listeners,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    StepRan,
    StepStarted,
    TokenOrigin,
    TokensCommitted,
    Trace,
    Work,
    WorkKind,
    token_origins,
)
from minillm.trace.forward_events import ForwardWork, RowsWritten
from minillm.trace.vllm_trace import of_vllm

__all__ = [
    "BlockCopied",
    "BlocksAllocated",
    "BlocksCached",
    "BlocksEvicted",
    "BlocksFreed",
    "BlocksShared",
    "DraftProposed",
    "DraftReason",
    "DraftsPlanned",
    "EngineStarted",
    "Event",
    "ForwardWork",
    "Listeners",
    "RequestAdded",
    "RequestFinished",
    "RequestPreempted",
    "RowsWritten",
    "StepFinished",
    "StepRan",
    "StepStarted",
    "TokenOrigin",
    "TokensCommitted",
    "Trace",
    "Work",
    "WorkKind",
    "of_vllm",
    "token_origins",
]
