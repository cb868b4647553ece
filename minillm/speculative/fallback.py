"""Two drafters in turn: a cheap one first, and another where it finds too little. (Snowflake's Arctic Inference pairs
suffix decoding with a draft model, too, and chooses by how many drafts it expects to be accepted.)

    speculative_config = {"method": "suffix", "fallback": {"method": "draft_model", "model": "minicoder-draft"}}

Text that repeats itself is drafted by lookup, long and nearly for free; new text by the model. A draft model does not
see the rounds that it is not asked in. It computes what it has missed when it is asked next, in one forward.

Which draft is used never depends on the tokens that were drawn: so a sampled draft stays distributed as its q says. The
size of a sampled draft may depend on them (of a tree, or of a chain that ends where a token led to logits that are
NaN), so it is used unless it is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from minillm.request import Request
from minillm.speculative.drafter import NO_DRAFT, Draft, Drafter, checked_drafts
from minillm.speculative.rejection_sampler import Verdict


class FallbackDrafter(Drafter):
    """Asks `first`, then `second` for the requests for which `first` proposed fewer than `below` drafts."""

    runs_model = True  # so that an empty draft of either method stays what it is

    def __init__(self, first: Drafter, second: Drafter, max_first: int, max_second: int, below: int) -> None:
        self.first, self.second = first, second
        self.max_first, self.max_second = max_first, max_second
        """Most drafts per round of each."""
        self.below = below
        self.num_observed_queries = max(first.num_observed_queries, second.num_observed_queries)
        self.reads_target_cache = first.reads_target_cache or second.reads_target_cache
        self.observes_hidden = first.observes_hidden or second.observes_hidden
        self.limits: WeakKeyDictionary[Request, tuple[int, int]] = WeakKeyDictionary()
        """Most drafts of a request by each, if a draft policy (`FallbackDrafts`) says so."""
        self.made: WeakKeyDictionary[Request, tuple[int | None, int | None]] = WeakKeyDictionary()
        """How many drafts each had in the latest round of a request: 0 if it ran a model and had none. None if the
        round says nothing of it: it was not asked, had `NO_DRAFT`, or its draft was replaced. The time of a replaced
        draft counts as that of the other method, because what the draft was worth is not known."""

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        limits = [self.limits.get(request, (k, k)) for request, k in zip(requests, num_drafts, strict=True)]
        most_first = [min(k, self.max_first, most) for k, (most, _) in zip(num_drafts, limits, strict=True)]
        most_second = [min(k, self.max_second, most) for k, (_, most) in zip(num_drafts, limits, strict=True)]
        first = _propose(self.first, requests, most_first)
        for i, draft in enumerate(first):
            if not _is_short(draft, max(1, min(self.below, most_first[i]))):
                most_second[i] = 0
        second = _propose(self.second, requests, most_second)
        return [self._choose(*each) for each in zip(requests, first, second, strict=True)]

    def _choose(self, request: Request, first: Draft, second: Draft) -> Draft:
        """The draft that is used. Notes how many each had."""
        used = second if second.token_ids or first is NO_DRAFT else first
        self.made[request] = _num_made(first, used), _num_made(second, used)
        return used

    def observe(self, request: Request, queries: Tensor) -> None:
        """See `Drafter.observe`."""
        for drafter in (self.first, self.second):
            if drafter.num_observed_queries:
                drafter.observe(request, queries[:, -drafter.num_observed_queries :])

    def observe_hidden(self, requests: Sequence[Request], hidden: Tensor) -> None:
        """See `Drafter.observe_hidden`."""
        for drafter in (self.first, self.second):
            if drafter.observes_hidden:
                drafter.observe_hidden(requests, hidden)

    def judged(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        """See `Drafter.judged`. Only the drafter that proposed the draft is told."""
        proposer = self.second if self.made[request][1] else self.first
        proposer.judged(request, draft, verdict)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Drafter.copy_blocks`."""
        self.first.copy_blocks(pairs)
        self.second.copy_blocks(pairs)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """See `Drafter.free_blocks`."""
        self.first.free_blocks(block_ids)
        self.second.free_blocks(block_ids)

    def request_dropped(self, request: Request) -> None:
        """See `Drafter.request_dropped`."""
        self.first.request_dropped(request)
        self.second.request_dropped(request)

    def request_finished(self, request: Request) -> None:
        """See `Drafter.request_finished`."""
        self.first.request_finished(request)
        self.second.request_finished(request)


def _propose(drafter: Drafter, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
    """One draft per request; the drafter is asked only for those that may have one."""
    asked = [i for i, most in enumerate(num_drafts) if most]
    drafts = [NO_DRAFT] * len(requests)
    if asked:
        found = checked_drafts(drafter, [requests[i] for i in asked], [num_drafts[i] for i in asked])
        for i, draft in zip(asked, found, strict=True):
            drafts[i] = draft
    return drafts


def _num_made(draft: Draft, used: Draft) -> int | None:
    """See `FallbackDrafter.made`."""
    is_replaced = draft.token_ids and draft is not used
    return None if draft is NO_DRAFT or is_replaced else len(draft.token_ids)


def _is_short(draft: Draft, least: int) -> bool:
    """Whether a draft with fewer than `least` tokens is to be replaced."""
    return len(draft.token_ids) < (least if draft.probs is None else 1)
