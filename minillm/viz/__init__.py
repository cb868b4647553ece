"""Pictures for notebooks: some are drawn from a trace of the engine, others from numbers that they are given."""

from minillm.trace.cache_state import CacheState
from minillm.viz.draw.output import show
from minillm.viz.live.live_view import LiveView
from minillm.viz.live.replay_widget import ReplayWidget
from minillm.viz.pages.cache_pages import CachePagesView
from minillm.viz.speculation.acceptance import AcceptanceStrip
from minillm.viz.speculation.budget_acceptance import BudgetAcceptance, BudgetLine
from minillm.viz.speculation.draft_decision import DraftDecision
from minillm.viz.speculation.position_acceptance import PositionAcceptance
from minillm.viz.speculation.speed_up_surface import SpeedPoint, SpeedUpSurface
from minillm.viz.speculation.viewed_blocks import BlockView, ViewedBlocks
from minillm.viz.tensors.codebook_cells import CodebookCells, PointCloud
from minillm.viz.tensors.error_map import ErrorMap
from minillm.viz.tensors.kept_cache import KeptCache, KeptPart
from minillm.viz.tensors.loss_tiles import LossTiles
from minillm.viz.tensors.moved_suffix import MovedSuffix
from minillm.viz.tensors.split_layer import SplitLayer
from minillm.viz.timeline.timeline_view import TimelineComparison, TimelineView
from minillm.viz.timeline.transfer_timeline import TimedPart, TransferRow, TransferTimeline

__all__ = [
    "AcceptanceStrip",
    "BlockView",
    "BudgetAcceptance",
    "BudgetLine",
    "CachePagesView",
    "CacheState",
    "CodebookCells",
    "DraftDecision",
    "ErrorMap",
    "KeptCache",
    "KeptPart",
    "LiveView",
    "LossTiles",
    "MovedSuffix",
    "PointCloud",
    "PositionAcceptance",
    "ReplayWidget",
    "SpeedPoint",
    "SpeedUpSurface",
    "SplitLayer",
    "TimedPart",
    "TimelineComparison",
    "TimelineView",
    "TransferRow",
    "TransferTimeline",
    "ViewedBlocks",
    "show",
]
