"""Pictures of what the engine did, drawn from its trace and nothing else."""

from minillm.viz.acceptance import AcceptanceStrip
from minillm.viz.acceptance_state import AcceptanceState
from minillm.viz.cache_pages import CachePagesView
from minillm.viz.cache_state import CacheState
from minillm.viz.live import LiveView

__all__ = ["CachePagesView", "AcceptanceStrip", "LiveView", "CacheState", "AcceptanceState"]
