"""Speculative decoding in words: one round, the totals, and the whole strip for readers who cannot see it."""

from __future__ import annotations

from minillm.trace.acceptance_state import Acceptance, AcceptanceState, RequestAcceptance, Round
from minillm.viz.draw.colours import owner_letter
from minillm.viz.draw.glyphs import visible
from minillm.viz.draw.plural import plural


def round_words(judged: Round) -> str:
    """The result of one round: `2 of 4 drafts accepted, then the target said “·path” instead of “·f”`."""
    accepted = f"{judged.num_accepted} of {plural(len(judged.drafts), 'draft')} accepted"
    if judged.target_token is None:
        return f"{accepted}, then the text ended"
    added = f"“{visible(judged.target_token)}”"
    if judged.parents is not None:
        return _branch_words(judged, added)
    if "rejected" in judged.verdicts:
        refused = visible(judged.drafts[judged.verdicts.index("rejected")])
        return f"{accepted}, then the target said {added} instead of “{refused}”"
    return f"{accepted}, and the target added {added} as a bonus"


def _branch_words(judged: Round, added: str) -> str:
    """The result for a tree: `a tree of 14 drafts, 3 deep: 2 accepted, then “f” instead of “a” or “b”`."""
    size = (
        f"a tree of {plural(len(judged.drafts), 'draft')}, {judged.num_positions} deep: {judged.num_accepted} accepted"
    )
    refused = judged.candidates_by_position[judged.num_accepted :]
    if refused:
        words = " or ".join(f"“{visible(judged.drafts[i])}”" for i in refused[0])
        return f"{size}, then the target said {added} instead of {words}"
    return f"{size}, to the end of a branch, and the target added {added} as a bonus"


def total_words(acceptance: Acceptance) -> str:
    """The arithmetic behind τ: `12 of 16 drafts accepted (75%) + 4 added by the target = 16 tokens in 4 forwards: 4.00`
    tokens per forward.

    Forwards without a draft, if any, are added: `… + 4 added by the target + 2 without a draft = …`."""
    if not acceptance.rounds:
        return "No draft has been judged yet."
    alone = f" + {acceptance.undrafted_forwards} without a draft" if acceptance.undrafted_forwards else ""
    drafts, rate = plural(acceptance.drafted, "draft"), acceptance.acceptance_rate
    accepted = f"{acceptance.num_accepted} of {drafts} accepted ({rate:.0%})"
    gained = f"{accepted} + {acceptance.added} added by the target{alone} = {plural(acceptance.gained, 'token')}"
    forwards = plural(acceptance.forwards, "target forward")
    return f"{gained} in {forwards}: {acceptance.tokens_per_forward:.2f} tokens per forward."


def describe(state: AcceptanceState, request: RequestAcceptance | None, *, max_rounds: int | None = None) -> str:
    """The strip in words, one line per round; `max_rounds` keeps the last ones only."""
    if request is None:
        return "Token acceptance: no request yet."
    drafter = f", draft {state.engine.drafter}" if state.engine and state.engine.drafter else ""
    lines = [f"Token acceptance, request {owner_letter(request.index)}{drafter}. {total_words(request)}"]
    first = max(0, len(request.rounds) - max_rounds) if max_rounds is not None else 0
    for number, judged in enumerate(request.rounds[first:], start=first + 1):
        lines.append(f"Round {number}: {round_words(judged)}.")
    positions = enumerate(request.accepted_by_position(), start=1)
    if request.rounds:
        lines.append(
            "Accepted at position " + ", ".join(f"{i}: {accepted} of {all_}" for i, (accepted, all_) in positions) + "."
        )
    return "\n".join(lines)
