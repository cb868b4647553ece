"""Pictures of what the engine did, drawn from its trace and nothing else."""

from typing import TYPE_CHECKING, Any

from minillm.viz.acceptance import AcceptanceStrip
from minillm.viz.acceptance_state import AcceptanceState
from minillm.viz.cache_pages import CachePagesView
from minillm.viz.cache_state import CacheState
from minillm.viz.error_map import ErrorMap
from minillm.viz.live import LiveView
from minillm.viz.timeline import TimelineComparison, TimelineView

if TYPE_CHECKING:
    from minillm.viz.replay_widget import ReplayWidget

__all__ = [
    "AcceptanceState",
    "AcceptanceStrip",
    "CachePagesView",
    "CacheState",
    "ErrorMap",
    "LiveView",
    "ReplayWidget",
    "TimelineComparison",
    "TimelineView",
]


def __getattr__(name: str) -> Any:
    # Widgets are slow to import, and only notebooks need them.
    if name == "ReplayWidget":
        from minillm.viz.replay_widget import ReplayWidget

        return ReplayWidget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
