"""A trie that finds earlier occurrences of the longest suffix of a text. The text may grow.

A *place* is the index of a token; its context is all tokens before it. The trie stores contexts in reverse: the paths
of two places share k tokens from the root if their contexts end in the same k tokens. So walking down with the last
token of a text, then the one before it, and so on, leads to the places whose contexts share the longest suffix with it:

    text       a b c a b d a b          suffix         places        next token
    index      0 1 2 3 4 5 6 7          b              2 5           c, d
                                        a b            2 5           c, d
                                        d a b          none          so 2 tokens match, and c or d may follow

The trie needs few nodes. Up to `MAX_MATCHES` places share a leaf and are compared token by token. One more place makes
the leaf branch at the first token in which the contexts differ. A node that has branched keeps only its latest
`MAX_MATCHES`, so that the cost of a lookup does not depend on the length of the text; so does a node whose contexts are
equal down to the maximum depth.

    nodes      at most 2n for n tokens, because every branching separates places; 0.4n for source code, some
               100 bytes per token in total; almost none for a text in a loop or one that is repeated many times
    inserting  a dictionary lookup per branching on the way down

A suffix automaton (Blumer et al. 1985) also has at most 2n nodes and takes one step per token. But its states store
only the first or the last place of a match; here the continuations of the latest few are counted.
"""

from __future__ import annotations

MAX_MATCHES = 16
"""Places kept per node, the latest ones. More would only refine the estimated probabilities."""


class _Node:
    """Places whose contexts end in the same tokens."""

    __slots__ = ("children", "depth", "places")

    def __init__(self, places: list[int], depth: int = 0, children: dict[int, _Node] | None = None) -> None:
        self.places = places
        """In ascending order. All of them in a leaf, else the latest."""
        self.depth = depth
        """Number of tokens that the contexts have in common. Not used in a leaf."""
        self.children = children
        """Token before the common ones → child. None: a leaf. A context without such a token is in no child."""


class SuffixTrie:
    """Finds places in a text by the tokens before them.

    `tokens` belongs to the caller and may only grow; `catch_up` inserts the new places. If an interrupt stops an
    insertion, the next `catch_up` repairs the trie: inserting a place twice changes no result.
    """

    def __init__(self, tokens: list[int], max_depth: int) -> None:
        self.tokens = tokens
        self.max_depth = max_depth
        self._root = _Node([])
        self._next_place = 1
        """The first place not inserted yet. Place 0 has no context."""

    def catch_up(self) -> None:
        """Insert the places of all tokens that are not in the trie yet."""
        for place in range(self._next_place, len(self.tokens)):
            self._insert(place)
            self._next_place = place + 1

    def longest_match(self, context: list[int]) -> tuple[int, list[int]]:
        """Find the longest suffix of `context`, of at most `max_depth` tokens, that occurs before a place.

        Returns its length p and at most `MAX_MATCHES` of those places, latest first: `context[-p:]` equals
        `tokens[place - p : place]` for each. `(0, [])` if not even the last token occurs before a place.
        """
        node, matched, end = self._root, 0, len(context)
        while node.children is not None:
            if matched < node.depth:
                matched = self._common_suffix(context, end, node.places[-1], matched, node.depth)
            child = node.children.get(context[end - 1 - matched]) if matched == node.depth and matched < end else None
            if child is None:
                return matched, node.places[::-1] if matched else []
            node, matched = child, matched + 1
        longest, found = matched, []
        for place in reversed(node.places):
            length = self._common_suffix(context, end, place, matched, self.max_depth)
            if length > longest:
                longest, found = length, []
            if length == longest > 0:
                found.append(place)
        return longest, found

    def _insert(self, place: int) -> None:
        tokens, parent, node, matched = self.tokens, None, self._root, 0
        while True:
            places = node.places
            if node.children is None:
                if places and places[-1] == place:
                    return
                if len(places) < MAX_MATCHES:
                    places.append(place)
                    return
                # Set the depth, which a leaf does not use, before the children: so an interrupt leaves a valid node.
                node.depth = self.max_depth
                for other in places:
                    node.depth = self._common_suffix(tokens, place, other, matched, node.depth)
                node.children = self._branches(places, node.depth)
            elif matched < node.depth:
                known, matched = matched, self._common_suffix(tokens, place, places[-1], matched, node.depth)
                if matched < node.depth:
                    above = self._split(node, place, matched)
                    if parent is None:
                        self._root = above
                    else:
                        parent[tokens[place - known]] = above
                    return
            if places[-1] != place:
                places.append(place)
            if len(places) > MAX_MATCHES:
                del places[0]
            matched, parent = node.depth, node.children
            if matched == self.max_depth:
                return
            # The context of `place` has this token: that of an earlier place, which is shorter, has `matched` tokens.
            child = parent.get(tokens[place - 1 - matched])
            if child is None:
                parent[tokens[place - 1 - matched]] = _Node([place])
                return
            node, matched = child, matched + 1

    def _branches(self, places: list[int], depth: int) -> dict[int, _Node]:
        """Leaves for places whose contexts have `depth` tokens in common, by the token before those."""
        children: dict[int, _Node] = {}
        for place in places if depth < self.max_depth else ():
            if depth < place:
                token = self.tokens[place - 1 - depth]
                if token in children:
                    children[token].places.append(place)
                else:
                    children[token] = _Node([place])
        return children

    def _split(self, node: _Node, place: int, depth: int) -> _Node:
        """A new parent of `node` and of a leaf for `place`, which has only `depth` tokens in common with `node`."""
        token_of_node, token = self.tokens[node.places[-1] - 1 - depth], self.tokens[place - 1 - depth]
        children = {token_of_node: node, token: _Node([place])}
        return _Node([*node.places, place][-MAX_MATCHES:], depth, children)

    def _common_suffix(self, context: list[int], end: int, place: int, known: int, most: int) -> int:
        """Number of equal tokens, at most `most`, before `end` in `context` and before `place`. `known` are known to be
        equal."""
        tokens, most = self.tokens, min(most, end, place)
        if context[end - most : end - known] == tokens[place - most : place - known]:
            return most
        while context[end - 1 - known] == tokens[place - 1 - known]:
            known += 1
        return known
