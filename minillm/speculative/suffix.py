"""Drafting without a model, from earlier occurrences of the text's suffix (SuffixDecoding: Oliaro et al. 2024).

Text repeats itself: edited code, an agent's tool calls, a small model in a loop. Take the longest suffix of the context
that occurred before, p tokens long, and look at what followed it there. Matches come from two sources: this request's
own prompt and output, and the outputs of earlier requests with the same `cache_salt`. So no draft shows a request the
text of another salt; how many drafts there are may depend on it (`adaptive` in `config.py`). A request that samples
with its own `seed` uses its own text alone: how many drafts there are decides which random numbers choose a token, and
its text should not depend on those of earlier requests.

The draft follows a greedy walk: of the C matches, take the token that most of them continue with, keep the c₁ matches
that agree, and go on with those. The probability that all drafts up to the j-th are accepted is estimated as

    P_j = Π (count / parent's count) = (c₁ / C) · (c₂ / c₁) · … = c_j / C

which is the share of matches that agree so far. The walk ends when P_j falls below `min_token_prob`, or after
⌊max_spec_factor · p⌋ tokens, so a longer match allows a longer draft. The score of a draft is Σ P_j, the expected
number of accepted tokens, and the source with the higher score is used.

    context  … for item in self.items : \n            3 matches of 11 tokens
             … for item in self.items : \n  print (       P = 1/3
             … for item in self.items : \n  yield item    P = 2/3, 2/3     ← the draft; score 4/3
             … for item in self.items : \n  yield item

Two things differ from the paper. The paper counts all occurrences in a suffix tree; here only the latest `MAX_MATCHES`
count, and a tie goes to the latest match, because a model's text resembles its most recent output most. In the paper, a
draft ends where the text ends; here it can continue into itself, so that a loop of three tokens that has occurred twice
gives drafts longer than three.

It wins where text repeats, and it costs no model forward. The lookup runs on the host: about 10 µs per request and
step, and 1 to 5 µs for each new token, the most when the text is in a loop. On new text it costs only this: without a
match there is no draft, and the step is a plain decode step. It loses time where text almost repeats, because rejected
drafts are verified, too; there a smaller `max_spec_factor` helps. Outputs of unrelated requests do not help.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.config import at_least, in_range
from minillm.request import Request
from minillm.speculative.drafter import Draft, DraftContext, Drafter
from minillm.speculative.suffix_trie import SuffixTrie

BOUNDARY = -1
"""Separates the outputs of earlier requests. It equals no token id, so no match crosses it."""


@dataclass(frozen=True)
class SuffixOptions:
    """vLLM's options of method `suffix`, with its defaults."""

    suffix_decoding_max_tree_depth: int = 24
    """Most tokens that are matched. (In vLLM most tokens of match and draft together.)"""
    suffix_decoding_max_cached_requests: int = 10_000
    """Most outputs of earlier requests that are kept, of all salts together, at about 100 bytes per token. 0: none, a
    request uses only its own text. See `OutputHistoryBySalt` for the eviction order."""
    suffix_decoding_max_spec_factor: float = 1.0
    """A match of p tokens gives at most ⌊factor · p⌋ drafts. With a factor below 1, a match shorter than 1 / factor
    gives none."""
    suffix_decoding_min_token_prob: float = 0.1
    """A draft ends before its estimated probability falls below this."""

    def __post_init__(self) -> None:
        at_least("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1)
        at_least("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        in_range("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, None)
        in_range("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 1)


class SuffixDrafter(Drafter):
    """Drafts from the longest match in the request itself or in the outputs of earlier requests with the same salt."""

    Options = SuffixOptions

    @classmethod
    def build(cls, context: DraftContext) -> SuffixDrafter:
        """See `Drafter.build`."""
        return cls(context.options)

    @classmethod
    def default_num_drafts(cls, options: SuffixOptions) -> int:
        """The length of the longest match."""
        return options.suffix_decoding_max_tree_depth

    def __init__(self, options: SuffixOptions) -> None:
        self.max_tree_depth = options.suffix_decoding_max_tree_depth
        self.max_spec_factor = options.suffix_decoding_max_spec_factor
        self.min_token_prob = options.suffix_decoding_min_token_prob
        self._own: dict[str, SuffixTrie] = {}
        """Request id → trie of a running request's prompt and output."""
        self._earlier = OutputHistoryBySalt(self.max_tree_depth, options.suffix_decoding_max_cached_requests)

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        return [Draft(self._draft(request, most)) for request, most in zip(requests, num_drafts, strict=True)]

    def request_dropped(self, request: Request) -> None:
        """See `Drafter.request_dropped`."""
        self._own.pop(request.request_id, None)

    def request_finished(self, request: Request) -> None:
        """See `Drafter.request_finished`. Later requests with the same salt can match the output."""
        self._own.pop(request.request_id, None)
        self._earlier.add(request.cache_salt, request.token_ids[request.num_prompt_tokens :])

    def _draft(self, request: Request, most: int) -> list[int]:
        draft, score = [], 0.0
        earlier = () if request.samples_with_own_seed else self._earlier.tries(request.cache_salt)
        for trie in (self._trie_of(request), *earlier):
            matched, matches = trie.longest_match(request.token_ids)
            # The factor may be a rounded fraction: 0.29 · 100 is 28.999…
            length = min(most, int(self.max_spec_factor * matched + 1e-6))
            if length > score:  # a draft's score is at most its length
                path, path_score = most_probable_path(continuations(trie.tokens, matches, length), self.min_token_prob)
                if path_score > score:
                    draft, score = path, path_score
        return draft

    def _trie_of(self, request: Request) -> SuffixTrie:
        trie = self._own.get(request.request_id)
        # An id can be reused, and an interrupt can skip `request_finished` of the previous request with this id.
        if trie is None or trie.tokens is not request.token_ids:
            trie = self._own[request.request_id] = SuffixTrie(request.token_ids, self.max_tree_depth)
        trie.catch_up()
        return trie


class OutputHistoryBySalt:
    """Outputs of finished requests, separate for each salt; at most `max_outputs` of all salts together.

    Beyond that, the salt whose last request finished longest ago loses all its outputs. So the amount of output of
    other salts can evict a salt's outputs, as in the prefix cache; the content of their outputs has no effect.
    """

    def __init__(self, max_depth: int, max_outputs: int) -> None:
        self._max_depth = max_depth
        self._max_outputs = max_outputs
        self._by_salt: OrderedDict[str, OutputHistory] = OrderedDict()
        """Ordered by when the last request with the salt finished, oldest first."""
        self.num_outputs = 0
        """Number of outputs kept, of all salts."""

    def tries(self, salt: str) -> tuple[SuffixTrie, ...]:
        """The tries that a request with this salt may search. Completes them first, in case of an earlier interrupt."""
        if salt not in self._by_salt:
            return ()
        self._by_salt[salt].catch_up()
        return self._by_salt[salt].tries

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Add one output, and evict others if there are too many."""
        if not self._max_outputs or not token_ids:
            return
        if salt not in self._by_salt:
            self._by_salt[salt] = OutputHistory(self._max_depth, self._max_outputs)
        self._by_salt.move_to_end(salt)
        outputs = self._by_salt[salt]
        before = outputs.num_outputs
        outputs.add(token_ids)
        self.num_outputs += outputs.num_outputs - before
        while self.num_outputs > self._max_outputs:
            _, dropped = self._by_salt.popitem(last=False)
            self.num_outputs -= dropped.num_outputs


class OutputHistory:
    """Outputs of finished requests, at most `max_outputs` (≥ 1) of them.

    They are stored in two tries, a young one and an old one. New outputs enter the young trie. When it holds half of
    `max_outputs`, it becomes the old trie, and the previous old trie is dropped as a whole. So at least the latest half
    is always kept, and eviction is cheap because nothing is ever removed from a trie.
    """

    def __init__(self, max_depth: int, max_outputs: int) -> None:
        self.tries: tuple[SuffixTrie, ...] = ()
        """The young trie, then the old one."""
        self._max_depth = max_depth
        self._max_outputs = max_outputs
        self._num_young = self._num_old = 0

    @property
    def num_outputs(self) -> int:
        """Number of outputs kept."""
        return self._num_young + self._num_old

    def add(self, token_ids: Sequence[int]) -> None:
        """Add one output to the young trie."""
        half = max(1, self._max_outputs // 2)
        if not self.tries or self._num_young >= half:
            old = self.tries[:1] if 2 * half <= self._max_outputs else ()
            self.tries = (SuffixTrie([BOUNDARY], self._max_depth), *old)
            self._num_young, self._num_old = 0, self._num_young if old else 0
        self._num_young += 1  # before the output: an interrupt must not allow one too many
        self.tries[0].tokens.extend((*token_ids, BOUNDARY))
        self.catch_up()

    def catch_up(self) -> None:
        """Insert tokens that are still missing after an interrupt."""
        for trie in self.tries:
            trie.catch_up()


def continuations(tokens: list[int], matches: list[int], length: int) -> list[list[int]]:
    """The `length` tokens from each place (token index) on. `matches` are in descending order.

    If a place is less than `length` tokens before the end of `tokens`, its continuation repeats from the place: the
    text is taken to be in a loop.
    """
    found = [tokens[place : place + length] for place in matches]
    for i, place in enumerate(matches):
        period = len(tokens) - place
        if period >= length:
            break  # this holds for all earlier places, too
        found[i] = (found[i] * (length // period + 1))[:length]
    return found


def most_probable_path(continuations: list[list[int]], min_token_prob: float) -> tuple[list[int], float]:
    """The greedy walk and its score. Each step takes the most frequent next token, the first on ties.

    There is at least one continuation, and all have the same length. The walk goes on with the continuations that have
    that token. It ends at the full length, before its probability would fall below `min_token_prob`, or where most of
    the remaining continuations end (`BOUNDARY`).
    """
    path: list[int] = []
    agreed = 0  # Σ c_j; divided only at the end, so that equal scores are equal floats
    alive = continuations
    while alive.count(alive[0]) < len(alive):  # otherwise all are identical
        votes: dict[int, list[list[int]]] = {}
        for tokens in alive:
            votes.setdefault(tokens[len(path)], []).append(tokens)
        token, alive = max(votes.items(), key=lambda vote: len(vote[1]))  # max returns the first on ties
        if token == BOUNDARY or len(alive) / len(continuations) < min_token_prob:
            return path, agreed / len(continuations)
        path.append(token)
        agreed += len(alive)
    rest = alive[0][len(path) :]
    if BOUNDARY in rest:
        rest = rest[: rest.index(BOUNDARY)]
    return path + rest, (agreed + len(rest) * len(alive)) / len(continuations)
