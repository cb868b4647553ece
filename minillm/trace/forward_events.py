"""Events of lessons that run a model without the engine: what one forward computed, and what it wrote to the cache."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.errors import TraceError
from minillm.trace.events import Event, Size


@dataclass(frozen=True)
class RowsWritten(Event):
    """What one forward did to the cache of one layer under one growth policy."""

    policy: str
    past: Size
    """Valid rows before the step."""
    written: Size
    copied: Size
    """Rows moved into a new buffer before writing: `past` or 0."""
    capacity: Size
    """Rows of the buffer after growing."""

    @property
    def empty(self) -> int:
        """Rows without a token: padding for a kernel that works on the whole buffer."""
        return self.capacity - self.past - self.written

    def spans(self) -> list[tuple[str, int, int]]:
        """(state, first row, number of rows) from row 0 down, without empty spans."""
        before = "copied" if self.copied else "kept"
        end = self.past + self.written
        parts = [(before, 0, self.past), ("written", self.past, self.written), ("empty", end, self.empty)]
        return [part for part in parts if part[2] > 0]


@dataclass(frozen=True)
class ForwardWork(Event):
    """One forward for one text: the last `num_rows` of its `num_tokens` tokens went through the model.

    Raises `TraceError` unless 0 < `num_new` <= `num_rows` <= `num_tokens`.
    """

    num_tokens: Size
    num_rows: Size
    num_new: Size
    """How many of the rows were not computed by an earlier forward."""

    def __post_init__(self) -> None:
        if not 0 < self.num_new <= self.num_rows <= self.num_tokens:
            raise TraceError(
                f"{self.num_new} new of {self.num_rows} rows of {self.num_tokens} tokens: "
                "give at least one new row, and no more rows than tokens"
            )

    @property
    def pairs(self) -> int:
        """Pairs of a computed query and a key that it attends to, including its own."""
        return pairs_of(self.num_rows, self.num_tokens)

    @property
    def new_pairs(self) -> int:
        """The pairs of the new rows."""
        return pairs_of(self.num_new, self.num_tokens)

    def spans(self) -> list[tuple[str, int, int]]:
        """(state, first row, row after the last) from row 0 down, without empty spans."""
        first_run, first_new = self.num_tokens - self.num_rows, self.num_tokens - self.num_new
        parts = [("remembered", 0, first_run), ("redone", first_run, first_new), ("new", first_new, self.num_tokens)]
        return [(state, first, end) for state, first, end in parts if end > first]


def pairs_of(num_rows: int, num_tokens: int) -> int:
    """The keys that the last `num_rows` of `num_tokens` tokens attend to under a causal mask, summed."""
    return num_rows * (2 * num_tokens - num_rows + 1) // 2
