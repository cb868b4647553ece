"""The state of one block for drawing: its owners, the states of its slots, and its changes in this step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SlotState = Literal["written", "fresh", "rolled_back", "empty", "cached", "free"]
PageState = Literal["used", "shared", "freed", "cached", "free"]


@dataclass(frozen=True)
class Freed:
    """A block that lost its last owner in this step."""

    request_id: str
    reason: str
    rolled_back: range
    """Slots of the block that held rejected drafts of this step."""


@dataclass(frozen=True)
class Page:
    """The state of one physical block."""

    block_id: int
    state: PageState
    owners: tuple[str, ...]
    """Request ids; several if the block is shared. For a block freed in this step: its last owner."""
    slots: tuple[tuple[SlotState, int], ...]
    """The states of the slots, from the first to the last: (state, number of slots in a row that have it)."""
    in_prefix_cache: bool = False
    """Whether the block is in the prefix cache."""
    reused: bool = False
    """Whether a request reused its contents in this step instead of computing them."""
    evicted: bool = False
    """Whether it was evicted from the prefix cache in this step."""
    copied_from: int | None = None
    """The block that was copied to it in this step."""
