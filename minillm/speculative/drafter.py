"""What every drafter is: something that guesses. Whether a guess stays is never its business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from minillm.engine.request import Request


@dataclass(frozen=True)
class Draft:
    """A chain of guesses for one request."""

    token_ids: list[int]
    """The next tokens, in order; may be empty."""
    probs: Tensor | None = None
    """`[len(token_ids), vocab]` fp32: the distribution each was sampled from; None: chosen without chance."""


class Drafter(ABC):
    """Proposes tokens; `speculative_config={"method": MyDrafter}` plugs in one of your own."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """For each request at most `num_drafts[i]` (≥ 1) guesses of what follows `requests[i].token_ids`.

        The request's block table already has room for all of them.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """The engine copies these blocks; a drafter that keeps keys and values under the same ids does so too."""

    def free_blocks(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """These blocks have become empty."""

    def request_finished(self, request: Request) -> None:  # noqa: B027
        """The request has ended, for whatever reason, and will not be seen again."""
