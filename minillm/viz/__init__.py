"""Pictures of what the engine did, drawn from its trace alone."""

from minillm.trace.acceptance_state import AcceptanceState
from minillm.trace.cache_state import CacheState
from minillm.viz.draw.output import show
from minillm.viz.live.live_view import LiveView
from minillm.viz.live.replay_widget import ReplayWidget
from minillm.viz.pages.cache_pages import CachePagesView
from minillm.viz.speculation.acceptance import AcceptanceStrip
from minillm.viz.tensors.error_map import ErrorMap
from minillm.viz.timeline.timeline_view import TimelineComparison, TimelineView

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
