"""The base of self-speculation: drafts are made from the target's own KV cache, without a second pool.

    slots of a request     [ committed ………………… | last | x₁ | x₂ | x₃ ]
    before the round         computed by the target
    a draft step                                  ✎      ✎    ✎          stored by the drafter: what it makes of them
    the verification                              ✎      ✎    ✎    ✎     overwritten by the target

Drafting computes the last committed token and the drafts, and stores their keys and values in the slots in which the
target will store its own. These slots belong to the request alone, because the scheduler copies shared blocks first.
The verification computes the same tokens again, the last committed one included, and overwrites every slot that
drafting wrote. So nothing that a draft step stored counts as computed, and no other request can find it: a block that
becomes full in this step is registered for sharing, but whoever shares it reads it after the verification's store.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from minillm.batch import Segment
from minillm.request import Request
from minillm.speculative.chain_drafter import ChainDrafter
from minillm.speculative.drafter import Draft


class SelfDrafter(ChainDrafter):
    """Drafts chains with a runner that reads and writes the target's cache."""

    needs_blocks = True

    @abstractmethod
    def first_segment(self, request: Request) -> Segment:
        """The segment that computes the request's last committed token, over the blocks that its drafts may read. Its
        block table ends with the blocks from that token's on."""

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        first = [self.first_segment(request) for request in requests]
        if self.is_greedy(requests):
            return [Draft(token_ids) for token_ids in self.draft_argmax(first, num_drafts)]

        def next_logits(active: list[int], drafted: list[list[int]]) -> Tensor:
            return self.runner.run(
                [replace(first[i], token_ids=drafted[i][-1:], start=first[i].start + len(drafted[i])) for i in active]
            )

        return self.draw_chains(requests, num_drafts, self.runner.run(first), next_logits)
