"""Drafting without a model: what followed the last time the text ended like this? (Oliaro et al. 2024, SuffixDecoding)

Text repeats itself: code that is edited, an agent's tool calls, a loop a small model has fallen into. Take the longest
end of the context that occurred before, p tokens long, and look at what followed it there. Places where it occurred
are found in two sources: this request's own prompt and output, and the outputs of earlier requests with the same
`cache_salt`. Requests of different salts never learn of each other's text, neither by their drafts nor by their time.

The guess is walked greedily: of the C places that match, take the token that most of them continue with, keep the c₁
places that agree, and go on with those. The probability that the walk is right up to its j-th token is estimated as

    P_j = Π (count / parent's count) = (c₁ / C) · (c₂ / c₁) · … = c_j / C

so it is simply the share of places that agree so far. The walk ends when P_j falls below `min_token_prob`, or after
⌊max_spec_factor · p⌋ tokens: a longer match is trusted further. The score of a guess is Σ P_j, the number of tokens
it can expect to see accepted, and the source with the higher score is taken.

    context  … for item in self.items : \n            3 places match 11 tokens
             … for item in self.items : \n  print (       P = 1/3
             … for item in self.items : \n  yield item    P = 2/3, 2/3     ← the guess; score 4/3
             … for item in self.items : \n  yield item

Two things differ from the paper. It counts all occurrences in a suffix tree; here the latest `MOST_PLACES` count, and
on a tie the latest of all decides, as a model's text resembles what it has just written more than what it began with.
And a walk down a tree ends where the text does; here a guess copies on from itself, so that a loop of three tokens is
guessed further than three as soon as it has come round twice.

It wins where text repeats, and no forward of any model is spent on it. The look-up runs on the host: about 10 µs per
request and step, and 1 to 5 µs for each new token, most of it in a loop. On new text it loses no more than that: where
nothing matches nothing is proposed, and the step is a plain one. It loses time where text nearly repeats, for every
rejected guess has been verified; there a smaller `max_spec_factor` helps. Outputs of unrelated requests gain nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minillm.speculative.drafter import Draft, Drafter
from minillm.speculative.suffix_trie import SuffixTrie

if TYPE_CHECKING:
    from minillm.engine.request import Request

BOUNDARY = -1
"""Stands between the outputs of earlier requests. No token equals it, so no match reaches across."""


class SuffixDrafter(Drafter):
    """Guesses by the longest match, in the request itself and in the outputs of earlier ones of the same salt.

    The four options are vLLM's `suffix_decoding_*`, with its defaults:

    - `max_tree_depth`: the longest match that is looked for, in tokens.
    - `max_cached_requests`: the most outputs of ended requests that are kept, of all salts together, at about 100 bytes
      per token; 0: none, each request is on its own. See `SaltedOutputs` for what goes when there are more.
    - `max_spec_factor`: a match of p tokens is followed by at most ⌊factor · p⌋ guesses, so with a factor below 1 a
      match shorter than 1 / factor is not enough for even one.
    - `min_token_prob`: a guess ends before its estimated probability falls below this.
    """

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        self.max_tree_depth = max_tree_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self._own: dict[str, SuffixTrie] = {}
        """By request id: the trie of a running request's prompt and output."""
        self._earlier = SaltedOutputs(max_tree_depth, max_cached_requests)

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        return [Draft(self._guess(request, most)) for request, most in zip(requests, num_drafts, strict=True)]

    def request_finished(self, request: Request) -> None:
        """See `Drafter.request_finished`. What the request said is from now on a source for its salt."""
        self._own.pop(request.request_id, None)
        self._earlier.add(request.cache_salt, request.token_ids[request.num_prompt_tokens :])

    def _guess(self, request: Request, most: int) -> list[int]:
        guess, score = [], 0.0
        for trie in (self._trie_of(request), *self._earlier.tries(request.cache_salt)):
            matched, places = trie.longest_match(request.token_ids)
            # The factor may be a rounded fraction: 0.29 · 100 is 28.999…
            length = min(most, int(self.max_spec_factor * matched + 1e-6))
            if length > score:  # no guess scores more than its length
                path, path_score = likeliest_path(continuations(trie.tokens, places, length), self.min_token_prob)
                if path_score > score:
                    guess, score = path, path_score
        return guess

    def _trie_of(self, request: Request) -> SuffixTrie:
        trie = self._own.get(request.request_id)
        # An id can come back, and an interrupt can have swallowed the news that its first bearer ended.
        if trie is None or trie.tokens is not request.token_ids:
            trie = self._own[request.request_id] = SuffixTrie(request.token_ids, self.max_tree_depth)
        trie.catch_up()
        return trie


class SaltedOutputs:
    """Outputs of requests that have ended, each for its own salt only; at most `max_outputs` of all salts together.

    Beyond that, the salt whose last request ended longest ago loses all its outputs. So how much other salts say can
    make a salt forget, as in the prefix cache; what they say changes nothing.
    """

    def __init__(self, max_depth: int, max_outputs: int) -> None:
        self._max_depth = max_depth
        self._max_outputs = max_outputs
        self._by_salt: OrderedDict[str, EarlierOutputs] = OrderedDict()
        """In the order in which their last requests ended."""

    @property
    def num_outputs(self) -> int:
        """How many outputs are kept."""
        return sum(outputs.num_outputs for outputs in self._by_salt.values())

    def tries(self, salt: str) -> tuple[SuffixTrie, ...]:
        """Where a request with this salt may look, whole again if an interrupt left something out."""
        if salt not in self._by_salt:
            return ()
        self._by_salt[salt].catch_up()
        return self._by_salt[salt].tries

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Keep one output."""
        if not self._max_outputs or not token_ids:
            return
        if salt not in self._by_salt:
            self._by_salt[salt] = EarlierOutputs(self._max_depth, self._max_outputs)
        self._by_salt.move_to_end(salt)
        self._by_salt[salt].add(token_ids)
        while self.num_outputs > self._max_outputs:
            self._by_salt.popitem(last=False)


class EarlierOutputs:
    """Outputs of requests that have ended, at most `max_outputs` of them.

    They lie in two tries. Outputs enter the young one; when that holds half of what is allowed it becomes the old one,
    and the one that was old is dropped whole. So at least the latest half is always there, nothing is ever taken out
    of a trie, and dropping costs nothing.
    """

    def __init__(self, max_depth: int, max_outputs: int) -> None:
        self.tries: tuple[SuffixTrie, ...] = ()
        """Young, old."""
        self._max_depth = max_depth
        self._max_outputs = max_outputs
        self._num_young = self._num_old = 0

    @property
    def num_outputs(self) -> int:
        """How many outputs are kept."""
        return self._num_young + self._num_old

    def add(self, token_ids: Sequence[int]) -> None:
        """Keep one output; it is entered at once."""
        if not self._max_outputs or not token_ids:
            return
        half = max(1, self._max_outputs // 2)
        if not self.tries or self._num_young >= half:
            old = self.tries[:1] if 2 * half <= self._max_outputs else ()
            self.tries = (SuffixTrie([BOUNDARY], self._max_depth), *old)
            self._num_young, self._num_old = 0, self._num_young if old else 0
        self._num_young += 1  # first, for an interrupt must not let one more in
        self.tries[0].tokens.extend((*token_ids, BOUNDARY))
        self.catch_up()

    def catch_up(self) -> None:
        """Enter what an interrupt may have left out."""
        for trie in self.tries:
            trie.catch_up()


def continuations(tokens: list[int], places: list[int], length: int) -> list[list[int]]:
    """The `length` tokens from each place on; `places` fall.

    A place near the end of `tokens` is one end of a loop: what follows the end is what follows the place, so its
    continuation goes round.
    """
    found = [tokens[place : place + length] for place in places]
    for i, place in enumerate(places):
        period = len(tokens) - place
        if period >= length:
            break  # so it is for all places before this one
        found[i] = (found[i] * (length // period + 1))[:length]
    return found


def likeliest_path(continuations: list[list[int]], min_token_prob: float) -> tuple[list[int], float]:
    """The greedy walk: always on with the token that most continuations agree on, the first of equals; and its score.

    There is at least one continuation and all have one length. The walk ends there, or before its probability would
    fall below `min_token_prob`, or where most texts ended (`BOUNDARY`).
    """
    path: list[int] = []
    agreed = 0  # Σ c_j: divided once at the end, equal scores are equal floats
    alive = continuations
    while alive.count(alive[0]) < len(alive):  # else they are the same to the end
        votes: dict[int, list[list[int]]] = {}
        for tokens in alive:
            votes.setdefault(tokens[len(path)], []).append(tokens)
        token, alive = max(votes.items(), key=lambda vote: len(vote[1]))  # the first of equals
        if token == BOUNDARY or len(alive) / len(continuations) < min_token_prob:
            return path, agreed / len(continuations)
        path.append(token)
        agreed += len(alive)
    rest = alive[0][len(path) :]
    if BOUNDARY in rest:
        rest = rest[: rest.index(BOUNDARY)]
    return path + rest, (agreed + len(rest) * len(alive)) / len(continuations)
