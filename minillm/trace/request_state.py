"""The cache state of one request: its number of tokens, its block table, and its changes in this step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RequestStatus = Literal["waiting", "prefill", "decode", "verify", "preempted", "finished"]
NOTHING = range(0)


@dataclass
class StepChanges:
    """The changes of one request in this step. Ranges are token positions in the request."""

    written: range = NOTHING
    """Tokens whose keys and values were written and are still valid."""
    rolled_back: range = NOTHING
    """Tokens whose keys and values were written for rejected drafts and are invalid."""
    num_drafts: int = 0
    num_accepted: int = 0
    allocated_blocks: list[int] = field(default_factory=list)
    """Blocks allocated to the request."""
    reused: int = 0
    """Tokens that need no prefill, because their keys and values were already in the cache."""
    reused_blocks: list[int] = field(default_factory=list)
    """Blocks appended to the block table that hold those tokens."""
    forked_from: int | None = None
    """Index of the request whose blocks a fork shares; `None` if they were found in the prefix cache."""
    copied: list[tuple[int, int]] = field(default_factory=list)
    """The copies on write, as (source, target)."""
    newly_cached_blocks: list[int] = field(default_factory=list)
    """Blocks that entered the prefix cache."""
    num_freed: int = 0
    """The number of blocks that left the block table."""
    num_freed_cached: int = 0
    """How many of those are now free and in the prefix cache."""
    num_freed_shared: int = 0
    """How many of those other requests still own."""
    preempted_tokens: int | None = None
    """The number of tokens discarded by a preemption; `None` if there was none."""
    finished: bool = False


@dataclass
class RequestState:
    """One request. The keys and values of its first `num_computed` tokens are in the blocks of `block_table`."""

    request_id: str
    index: int
    """Requests are numbered from 0 in the order they were added; determines the letter and colour in pictures."""
    prompt: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int = 0
    status: RequestStatus = "waiting"
    finish_reason: str | None = None
    block_table: list[int] = field(default_factory=list)
    former_table: list[int] = field(default_factory=list)
    """The block table at the end of the request."""
    marks: StepChanges = field(default_factory=StepChanges)
    computed_tokens: int = 0
    """Most tokens that it has had in the cache; a prefill of these is a recomputation."""
    starts_again: bool = False
    """Whether its latest work began with such a token."""

    @property
    def is_recomputed(self) -> bool:
        """Whether its prefill computes tokens again, after a preemption or an interrupt."""
        return self.status == "prefill" and self.starts_again

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    def reuse(self, block_ids: list[int], num_tokens: int, forked_from: int | None) -> None:
        """Append `block_ids`, which hold the first `num_tokens` tokens already computed by other requests."""
        self.block_table += block_ids
        self.num_computed = num_tokens
        self.marks.reused += num_tokens
        self.marks.reused_blocks += block_ids
        self.marks.forked_from = forked_from

    def write(self, start: int, num_tokens: int) -> None:
        """Record that keys and values of `num_tokens` tokens from `start` on were written."""
        self.num_computed = start + num_tokens
        self.marks.written = range(start, self.num_computed)
        self.starts_again = start < self.computed_tokens
        if self.status == "prefill":  # drafts may be rejected: `keep` says how many are not
            self.computed_tokens = max(self.computed_tokens, self.num_computed)

    def keep(self, num_computed: int) -> None:
        """Mark everything written beyond `num_computed` tokens as rolled back."""
        written = self.marks.written
        self.marks.written = range(written.start, min(written.stop, num_computed))
        self.marks.rolled_back = range(num_computed, max(written.stop, num_computed))
        self.num_computed = num_computed
        self.computed_tokens = max(self.computed_tokens, num_computed)

    def preempt(self, num_computed: int) -> None:
        """Record a preemption: the request lost its cached tokens, and `num_computed` tokens must be recomputed."""
        self.restart()
        self.marks.preempted_tokens = num_computed
        self.status = "preempted"

    def restart(self) -> None:
        """Record that the request lost all its keys and values, and waits."""
        self.marks.written = NOTHING
        self.num_computed = 0
        self.status = "waiting"
