"""Lesson 07, planted mistakes, each one edit of the reference, so that a check can name them."""

from __future__ import annotations

from minillm.teaching.exercises._l07_reference import admit, share_budget, static_steps
from minillm.teaching.source import wrong_versions

_ANY = "budget == 0 or len(shares) == seats or blocks > free_blocks"

STATIC = wrong_versions(
    static_steps,
    {
        "counts the first batch only": ("range(0, len(lengths), batch_size)", "range(0, min(1, len(lengths)))"),
        "has an empty range, so that no batch is counted": ("range(0, len(lengths)", "range(len(lengths), 0"),
    },
)

BUDGET = wrong_versions(
    share_budget,
    {
        "swaps the tokens of a request with the number of requests behind it": (
            "for behind, tokens",
            "for tokens, behind",
        ),
        "subtracts the budget from the number of requests behind instead of the reverse": (
            "budget - behind",
            "behind - budget",
        ),
        "sets the budget to the last share instead of subtracting it": ("budget -= ", "budget = "),
        "always subtracts the first share from the budget": ("shares[-1]", "shares[0]"),
        "stops after the first request": ("return shares", "return shares[:1]"),
        "returns no shares": ("return shares", "return []"),
    },
)

ADMIT = wrong_versions(
    admit,
    {
        "stops while budget is left, and continues when none is left": ("budget == 0", "budget != 0"),
        "stops while seats are free, and continues when none is free": ("len(shares) == seats", "len(shares) != seats"),
        "stops when nothing has run out, and continues when something has": (_ANY, f"not ({_ANY})"),
        "always subtracts the first share from the budget": ("shares[-1]", "shares[0]"),
        "multiplies the tokens by block_size instead of dividing": ("-tokens // block_size", "-tokens * block_size"),
        "never stops, whatever has run out": ("            break\n", "            pass\n"),
        "divides block_size by the tokens: the quotient is inverted": (
            "-tokens // block_size",
            "block_size // -tokens",
        ),
    },
)
