"""Lesson 14: stores with one mistake each in what they take for the same. A docstring names the mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from minillm.teaching.workshop.l14_store import Find, Key, SpanStore, digest

Found = tuple[int, int, bool] | None


def right(find: Find) -> SpanStore:
    """No mistake."""
    return SpanStore(find)


def without_the_model(find: Find) -> SpanStore:
    """The key has no fingerprint of the model: entries of any weights are used."""

    def careless(entries: Sequence[Key], wanted: Key) -> Found:
        return find([replace(entry, model=wanted.model) for entry in entries], wanted)

    return SpanStore(careless)


def first_tokens_only(find: Find) -> SpanStore:
    """The hash of a text covers its first 16 tokens."""
    return SpanStore(find, hash_text=lambda token_ids: digest(token_ids[:16]))


def without_rotation(find: Find) -> SpanStore:
    """Keys are not moved."""

    def careless(entries: Sequence[Key], wanted: Key) -> Found:
        found = find(entries, wanted)
        return found and (found[0], 0, found[2])

    return SpanStore(careless)


def all_exact(find: Find) -> SpanStore:
    """What was moved is called exact, so it is published for everyone."""

    def careless(entries: Sequence[Key], wanted: Key) -> Found:
        found = find(entries, wanted)
        return found and (found[0], found[1], True)

    return SpanStore(careless)


MISTAKES: dict[str, Callable[[Find], SpanStore]] = {
    "right": right,
    "no model in the key": without_the_model,
    "hash of the first tokens": first_tokens_only,
    "keys are not moved": without_rotation,
    "moved is called exact": all_exact,
}
"""By what they do; the first is none."""
