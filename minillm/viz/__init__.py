"""Pictures of what the engine did, drawn from its trace and nothing else."""

from minillm.viz.acceptance import AcceptanceStrip
from minillm.viz.acceptance_state import AcceptanceState
from minillm.viz.cache_pages import CachePagesView
from minillm.viz.cache_state import CacheState
from minillm.viz.error_map import ErrorMap
from minillm.viz.live import LiveView
from minillm.viz.output import show
from minillm.viz.replay_widget import ReplayWidget
from minillm.viz.timeline import TimelineComparison, TimelineView

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
    "show",
]
