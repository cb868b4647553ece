"""Pictures of what the engine did, drawn from its trace alone."""

from minillm.trace.acceptance_state import AcceptanceState
from minillm.trace.cache_state import CacheState
from minillm.viz.draw.output import show
from minillm.viz.live.live_view import LiveView
from minillm.viz.live.replay_widget import ReplayWidget
from minillm.viz.pages.cache_pages import CachePagesView
from minillm.viz.speculation.acceptance import AcceptanceStrip
from minillm.viz.speculation.draft_decision import DraftDecision
from minillm.viz.speculation.position_acceptance import PositionAcceptance
from minillm.viz.speculation.speed_up_surface import SpeedPoint, SpeedUpSurface
from minillm.viz.tensors.error_map import ErrorMap
from minillm.viz.timeline.timeline_view import TimelineComparison, TimelineView

__all__ = [
    "AcceptanceState",
    "AcceptanceStrip",
    "CachePagesView",
    "CacheState",
    "DraftDecision",
    "ErrorMap",
    "LiveView",
    "PositionAcceptance",
    "ReplayWidget",
    "SpeedPoint",
    "SpeedUpSurface",
    "TimelineComparison",
    "TimelineView",
    "show",
]
