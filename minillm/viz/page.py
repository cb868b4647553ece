"""One block of the pool as it is drawn: whose it is, what is in each of its slots, and what this step did to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SlotState = Literal["written", "fresh", "rolled_back", "empty", "cached", "free"]
PageState = Literal["used", "shared", "freed", "cached", "free"]


@dataclass(frozen=True)
class Freed:
    """A block that lost its last owner in this step, and what was in it."""

    request_id: str
    reason: str
    rolled_back: range
    """Slots of the block that held rejected drafts of this very step."""


@dataclass(frozen=True)
class Page:
    """One physical block as it is drawn."""

    block_id: int
    state: PageState
    owners: tuple[str, ...]
    """Request ids; several if the block is shared. Of a block freed in this step: who had it before."""
    slots: tuple[SlotState, ...]
    findable: bool = False
    """Whether the prefix cache knows the block by its contents."""
    reused: bool = False
    """Whether a request took it in this step as it was, instead of computing it."""
    evicted: bool = False
    """Whether the prefix cache forgot its contents in this step."""
    copied_from: int | None = None
    """The block it was copied from in this step."""
