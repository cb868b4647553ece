"""Where did a text end like this before? A trie over the contexts of a growing text, read from their ends.

A *place* is the index of a token; its context is all that stands before it. Two places share k tokens on the way from
the root if their contexts end in the same k. So going down with the last token of a text, the one before it and so on
leads to the places with which it has the longest end in common:

    text       a b c a b d a b          ends in …      places        there came
    index      0 1 2 3 4 5 6 7          b              2 5           c, d
                                        a b            2 5           c, d
                                        d a b          none          2 tokens match, and c or d may follow

Few nodes are needed for that. Up to `MOST_PLACES` places share a leaf and are compared token by token; one more makes
it branch, at the first token in which they differ. A node that has branched keeps its latest `MOST_PLACES`, so that a
look-up costs the same however long the text is; so does one whose places do not differ at all to the greatest depth.

    nodes      at most 2n for n tokens, as every branching parts some places; 0.4n for source code, some 100 bytes per
               token all in all, and next to none for a text in a loop or one that comes again and again
    entering   a dictionary look-up per branching on the way down

A suffix automaton (Blumer et al. 1985) also has at most 2n nodes, and takes one step per token. But its match knows its
first or its last place, and not the latest few, whose continuations are to be counted here.
"""

from __future__ import annotations

MOST_PLACES = 16
"""How many places of one context are remembered, the latest. More would only refine the estimated probabilities."""


class _Node:
    """Places whose contexts end alike."""

    __slots__ = ("children", "depth", "places")

    def __init__(self, places: list[int], depth: int = 0, children: dict[int, _Node] | None = None) -> None:
        self.places = places
        """Rising. In a leaf all of them, else the latest."""
        self.depth = depth
        """How many tokens the contexts have in common. Of no meaning in a leaf."""
        self.children = children
        """By the token before those. None: a leaf. A context that has no token there is in no child."""


class SuffixTrie:
    """The places of a text, found by what stands before them.

    `tokens` belongs to the caller and may only grow; `catch_up` enters what has been added. A trie broken off by an
    interrupt is right again after the next `catch_up`: to enter a place twice changes no answer.
    """

    def __init__(self, tokens: list[int], max_depth: int) -> None:
        self.tokens = tokens
        self.max_depth = max_depth
        self._root = _Node([])
        self._next_place = 1
        """The first place not entered yet. Place 0 has no context."""

    def catch_up(self) -> None:
        """Enter the places of all tokens that are not in the trie yet."""
        for place in range(self._next_place, len(self.tokens)):
            self._enter(place)
            self._next_place = place + 1

    def longest_match(self, context: list[int]) -> tuple[int, list[int]]:
        """The longest end of `context`, of at most `max_depth` tokens, that stands before a place; and those places.

        Returns its length p and the latest `MOST_PLACES` places, latest first: `context[-p:]` equals
        `tokens[place - p : place]` for each. `(0, [])` if not even the last token stands before any.
        """
        node, same, end = self._root, 0, len(context)
        while node.children is not None:
            if same < node.depth:
                same = self._alike(context, end, node.places[-1], same, node.depth)
            child = node.children.get(context[end - 1 - same]) if same == node.depth and same < end else None
            if child is None:
                return same, node.places[::-1] if same else []
            node, same = child, same + 1
        longest, found = same, []
        for place in reversed(node.places):
            length = self._alike(context, end, place, same, self.max_depth)
            if length > longest:
                longest, found = length, []
            if length == longest > 0:
                found.append(place)
        return longest, found

    def _enter(self, place: int) -> None:
        tokens, parent, node, same = self.tokens, None, self._root, 0
        while True:
            places = node.places
            if node.children is None:
                if places and places[-1] == place:
                    return
                if len(places) < MOST_PLACES:
                    places.append(place)
                    return
                # First the depth, which a leaf does not use, then the children: an interrupt leaves a leaf or a node.
                node.depth = self.max_depth
                for other in places:
                    node.depth = self._alike(tokens, place, other, same, node.depth)
                node.children = self._branches(places, node.depth)
            elif same < node.depth:
                known, same = same, self._alike(tokens, place, places[-1], same, node.depth)
                if same < node.depth:
                    above = self._part(node, place, same)
                    if parent is None:
                        self._root = above
                    else:
                        parent[tokens[place - known]] = above
                    return
            if places[-1] != place:
                places.append(place)
            if len(places) > MOST_PLACES:
                del places[0]
            same, parent = node.depth, node.children
            if same == self.max_depth:
                return
            # There is a token before those: an earlier place has as many in its context.
            child = parent.get(tokens[place - 1 - same])
            if child is None:
                parent[tokens[place - 1 - same]] = _Node([place])
                return
            node, same = child, same + 1

    def _branches(self, places: list[int], depth: int) -> dict[int, _Node]:
        """Leaves for places that have `depth` tokens in common."""
        children: dict[int, _Node] = {}
        for place in places if depth < self.max_depth else ():
            if depth < place:
                token = self.tokens[place - 1 - depth]
                if token in children:
                    children[token].places.append(place)
                else:
                    children[token] = _Node([place])
        return children

    def _part(self, node: _Node, place: int, depth: int) -> _Node:
        """A node above `node`, whose places have only `depth` tokens in common with `place`."""
        there, here = self.tokens[node.places[-1] - 1 - depth], self.tokens[place - 1 - depth]
        children = {there: node, here: _Node([place])}
        return _Node([*node.places, place][-MOST_PLACES:], depth, children)

    def _alike(self, context: list[int], end: int, place: int, known: int, most: int) -> int:
        """How many tokens, at most `most`, before `end` of `context` and before `place` are the same; `known` are."""
        tokens, most = self.tokens, min(most, end, place)
        if context[end - most : end - known] == tokens[place - most : place - known]:
            return most
        while context[end - 1 - known] == tokens[place - 1 - known]:
            known += 1
        return known
