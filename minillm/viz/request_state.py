"""One request as the pool sees it: its tokens, its block table, and what this step did to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RequestStatus = Literal["waiting", "prefill", "decode", "verify", "preempted", "finished"]
NOTHING = range(0)


@dataclass
class StepMarks:
    """What happened to one request since the step started. Ranges count tokens from the start of the request."""

    written: range = NOTHING
    """Tokens whose keys and values were written and are still valid."""
    rolled_back: range = NOTHING
    """Tokens that were written for rejected drafts and are void."""
    num_drafts: int = 0
    num_accepted: int = 0
    took: list[int] = field(default_factory=list)
    """Blocks appended to the block table that nobody else had."""
    reused: int = 0
    """Tokens that need not be computed, for their keys and values were there already."""
    reused_blocks: list[int] = field(default_factory=list)
    """Blocks appended to the block table that hold those tokens."""
    forked_from: int | None = None
    """Number of the request whose blocks a fork took over; `None` if they were found in the prefix cache."""
    copied: list[tuple[int, int]] = field(default_factory=list)
    """Copies on write: (source, target) of each."""
    remembered: list[int] = field(default_factory=list)
    """Blocks that can be found by their contents from now on."""
    gave_back: int = 0
    """Blocks that left the block table."""
    left_cached: int = 0
    """How many of those are free and keep their contents for now."""
    left_shared: int = 0
    """How many of those other requests still own."""
    preempted_tokens: int | None = None
    """Tokens thrown away by a preemption; `None` if there was none."""
    finished: bool = False


@dataclass
class RequestState:
    """`num_computed` of the request's `num_tokens` tokens have their keys and values in the blocks of `block_table`."""

    request_id: str
    index: int
    """Requests are numbered from 0 in the order they were added; letter and colour follow from it."""
    prompt: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int = 0
    status: RequestStatus = "waiting"
    finish_reason: str | None = None
    block_table: list[int] = field(default_factory=list)
    former_table: list[int] = field(default_factory=list)
    """The block table it had when it ended."""
    marks: StepMarks = field(default_factory=StepMarks)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    def reuse(self, block_ids: list[int], num_tokens: int, forked_from: int | None) -> None:
        """`num_tokens` tokens are in `block_ids`, which others filled: nothing of them has to be computed."""
        self.block_table += block_ids
        self.num_computed = num_tokens
        self.marks.reused += num_tokens
        self.marks.reused_blocks += block_ids
        self.marks.forked_from = forked_from

    def write(self, start: int, num_tokens: int) -> None:
        """Keys and values of `num_tokens` tokens from `start` on were written."""
        self.num_computed = start + num_tokens
        self.marks.written = range(start, self.num_computed)

    def keep(self, num_computed: int) -> None:
        """Everything written beyond `num_computed` tokens is void from now on."""
        written = self.marks.written
        self.marks.written = range(written.start, min(written.stop, num_computed))
        self.marks.rolled_back = range(num_computed, max(written.stop, num_computed))
        self.num_computed = num_computed

    def preempt(self, num_computed: int) -> None:
        """The request lost everything it had in the cache; `num_computed` tokens have to be computed again."""
        self.marks.preempted_tokens = num_computed
        self.marks.written = NOTHING
        self.num_computed = 0
        self.status = "preempted"
