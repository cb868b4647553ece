"""Lesson 10, mistakes that learners make, planted so that a check can name them."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.sampling import sample
from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l10_reference import accept_rule, residual, rollback, verify_chain

# -------------------------------------------------------------------------------------------------------- accept_rule


def _at(rows: Tensor, x: Tensor) -> Tensor:
    return rows.gather(-1, x[:, None]).squeeze(-1)


def _without_limit(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return torch.where(_at(q, x) > 0, _at(p, x) / _at(q, x), torch.nan)


def _no_nan(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return (_at(p, x) / _at(q, x)).clamp(max=1.0)


def _target_alone(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return _at(p, x)


def _draft_alone(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return _at(q, x)


def _yes_or_no(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return torch.where(_at(q, x) > 0, (_at(p, x) >= _at(q, x)).to(p.dtype), torch.nan)


def _if_argmax(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return (p.argmax(-1) == x).to(p.dtype)


def _same_row(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return accept_rule(p[:1].expand_as(q), q, x)


def _all_tokens(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def _capped_p_over_one(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    return torch.minimum(_at(p, x), _at(q, x))


ACCEPT = (
    WrongVersion("inverts the ratio: q(x) / p(x)", lambda p, q, x: accept_rule(q, p, x)),
    WrongVersion("has no upper limit: a probability above 1 where the target likes x more", _without_limit),
    WrongVersion(
        "gives 1 or another number for a draft with q(x) = 0, which cannot have been drawn from q; it must be NaN",
        _no_nan,
    ),
    WrongVersion(
        "accepts with p(x) and ignores q: with sampled drafts, far fewer are accepted than could be", _target_alone
    ),
    WrongVersion("accepts with q(x): the target has no say", _draft_alone),
    WrongVersion("accepts only if p(x) is at least q(x), instead of with probability p(x) / q(x)", _yes_or_no),
    WrongVersion("accepts the target's argmax and nothing else, which is right at temperature 0 only", _if_argmax),
    WrongVersion("judges every draft by the target's first row", _same_row),
    WrongVersion("gives Σ min(p, q), the mean over all drafts, instead of the chance of this draft x", _all_tokens),
    WrongVersion("gives min(p(x), q(x)) instead of min(1, p(x) / q(x)): divide by q(x)", _capped_p_over_one),
)

# ----------------------------------------------------------------------------------------------------------- residual


def _not_normalised(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).clamp(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _zero_over_zero(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).clamp(min=0.0)
    return left / left.sum(-1, keepdim=True)


def _guard_for_all_rows(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).clamp(min=0.0)
    total = left.sum(-1, keepdim=True)
    return left / total if bool((total > 0).all()) else p


def _uniform_if_nothing(p: Tensor, q: Tensor) -> Tensor:
    found = residual(p, q)
    nothing = (p - q).clamp(min=0.0).sum(-1, keepdim=True) == 0
    return torch.where(nothing, torch.full_like(p, 1 / p.shape[-1]), found)


def _zeros_if_nothing(p: Tensor, q: Tensor) -> Tensor:
    return _zero_over_zero(p, q).nan_to_num(0.0)


def _absolute(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).abs()
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def _no_limit(p: Tensor, q: Tensor) -> Tensor:
    left, total = p - q, (p - q).clamp(min=0.0).sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def _softmax(p: Tensor, q: Tensor) -> Tensor:
    return torch.softmax((p - q).clamp(min=0.0), dim=-1)


def _argmax(p: Tensor, q: Tensor) -> Tensor:
    left = residual(p, q)
    return torch.zeros_like(left).scatter_(-1, left.argmax(-1, keepdim=True), 1.0)


def _over_all_rows(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).clamp(min=0.0)
    total = left.sum()
    return torch.where(left.sum(-1, keepdim=True) > 0, left / total, p)


RESIDUAL = (
    WrongVersion(
        "returns p itself: a token that acceptance has already served is then served twice", lambda p, q: p.clone()
    ),
    WrongVersion("does not normalise: the rows do not sum to 1", _not_normalised),
    WrongVersion("divides 0 by 0 where p equals q", _zero_over_zero),
    WrongVersion("gives p for all rows as soon as one row has no residual", _guard_for_all_rows),
    WrongVersion(
        "gives every token the same probability where p equals q; it may then emit a token that the target excludes",
        _uniform_if_nothing,
    ),
    WrongVersion("gives a row of zeros where p equals q, from which no token can be drawn", _zeros_if_nothing),
    WrongVersion("takes q - p: the tokens that the draft model likes too much", lambda p, q: residual(q, p)),
    WrongVersion("takes |p - q|: it also gives probability to tokens that the draft model likes too much", _absolute),
    WrongVersion("leaves negative numbers where q is larger than p", _no_limit),
    WrongVersion("applies a softmax, which gives every token a probability; divide by the sum", _softmax),
    WrongVersion("gives all probability to the largest difference instead of sharing it", _argmax),
    WrongVersion("divides by the sum over all rows instead of the sum of each row", _over_all_rows),
)

# ------------------------------------------------------------------------------------------------------- verify_chain


def _chances(drafts: list[int], p: Tensor, q: Tensor) -> list[float]:
    return accept_rule(p[: len(drafts)], q, torch.tensor(drafts)).tolist()


def _draw(row: Tensor, u: float) -> int:
    return int(sample(row, [u]))


def _accepted(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> int:
    return len(verify_chain(drafts, p, q, uniforms)) - 1


def _no_bonus(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    return verify_chain(drafts, p, q, uniforms)[: len(drafts)]


def _drafts_only(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    return verify_chain(drafts, p, q, uniforms)[:-1]


def _with_last(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float], row: Tensor, u: float) -> list[int]:
    return [*drafts[: _accepted(drafts, p, q, uniforms)], _draw(row, u)]


def _full_target(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    n = _accepted(drafts, p, q, uniforms)
    return _with_last(drafts, p, q, uniforms, p[n : n + 1], uniforms[-1])


def _without_x(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    n = _accepted(drafts, p, q, uniforms)
    row = p[n : n + 1].clone()
    if n < len(drafts):
        row[0, drafts[n]] = 0.0
    return _with_last(drafts, p, q, uniforms, row, uniforms[-1])


def _bonus_from_last_judged_row(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    if _accepted(drafts, p, q, uniforms) < len(drafts):
        return verify_chain(drafts, p, q, uniforms)
    return [*drafts, _draw(p[-2:-1], uniforms[-1])]


def _argmax_bonus(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    if _accepted(drafts, p, q, uniforms) < len(drafts):
        return verify_chain(drafts, p, q, uniforms)
    return [*drafts, int(p[-1].argmax())]


def _goes_on(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    """A rejected draft is replaced, and the ones behind it are still judged."""
    tokens = []
    for i, chance in enumerate(_chances(drafts, p, q)):
        if uniforms[i] < chance:
            tokens.append(drafts[i])
        else:
            tokens.append(_draw(residual(p[i : i + 1], q[i : i + 1]), uniforms[-1]))
    return tokens if tokens != drafts else [*drafts, _draw(p[-1:], uniforms[-1])]


def _skips(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    """Rejected drafts are left out, later accepted ones are kept."""
    kept = [x for x, u, chance in zip(drafts, uniforms, _chances(drafts, p, q), strict=False) if u < chance]
    n = _accepted(drafts, p, q, uniforms)
    row = residual(p[n : n + 1], q[n : n + 1]) if n < len(drafts) else p[-1:]
    return [*kept, _draw(row, uniforms[-1])]


def _first_unseen(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    if len(drafts) == 1:
        return [*drafts, _draw(p[1:], uniforms[-1])]
    return [drafts[0], *verify_chain(drafts[1:], p[1:], q[1:], uniforms[1:])]


def _rows_too_late(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    return verify_chain(drafts, torch.cat([p[1:], p[-1:]]), q, uniforms)


def _rows_too_early(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    return verify_chain(drafts, torch.cat([p[:1], p[:-1]]), q, uniforms)


def _one_uniform(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    return verify_chain(drafts, p, q, [*uniforms[:1] * len(drafts), uniforms[-1]])


def _same_uniform(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    n = _accepted(drafts, p, q, uniforms)
    return verify_chain(drafts, p, q, [*uniforms[:-1], uniforms[n]])


def _inverted(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    n = next((i for i, chance in enumerate(_chances(drafts, p, q)) if uniforms[i] < chance), len(drafts))
    row = residual(p[n : n + 1], q[n : n + 1]) if n < len(drafts) else p[-1:]
    return [*drafts[:n], _draw(row, uniforms[-1])]


def _at_least(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    n = next((i for i, chance in enumerate(_chances(drafts, p, q)) if uniforms[i] > chance), len(drafts))
    row = residual(p[n : n + 1], q[n : n + 1]) if n < len(drafts) else p[-1:]
    return [*drafts[:n], _draw(row, uniforms[-1])]


def _keeps_rejected(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    *kept, last = verify_chain(drafts, p, q, uniforms)
    return [*drafts[: len(kept) + 1], last]


def _last_only(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    return verify_chain(drafts, p, q, uniforms)[-1:]


def _never_rejects(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    return [*drafts, _draw(p[-1:], uniforms[-1])]


def _target_only(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    return verify_chain(drafts, p, q, [1.0] * len(drafts) + uniforms[-1:])


def _all_or_nothing(drafts: list[int], p: Tensor, q: Tensor, uniforms: list[float]) -> list[int]:
    if _accepted(drafts, p, q, uniforms) == len(drafts):
        return verify_chain(drafts, p, q, uniforms)
    return [_draw(residual(p[:1], q[:1]), uniforms[-1])]


VERIFY = (
    WrongVersion("forgets the bonus token when all drafts are accepted", _no_bonus),
    WrongVersion("never adds a token of the target: a round may then commit nothing", _drafts_only),
    WrongVersion("draws the recovered token from all of p instead of from the residual", _full_target),
    WrongVersion(
        "draws the recovered token from p without the rejected draft, which fits acceptance with p(x), not p(x) / q(x)",
        _without_x,
    ),
    WrongVersion(
        "draws the bonus token from the row that judged the last draft, one row too early", _bonus_from_last_judged_row
    ),
    WrongVersion("takes the argmax as bonus token instead of drawing it", _argmax_bonus),
    WrongVersion(
        "goes on after a rejection: it replaces the rejected draft and judges those behind it, though they continue "
        "another text",
        _goes_on,
    ),
    WrongVersion("leaves rejected drafts out and keeps later ones, which continue a text that was rejected", _skips),
    WrongVersion("accepts the first draft without judging it", _first_unseen),
    WrongVersion("judges draft i by row i + 1 of p", _rows_too_late),
    WrongVersion("judges draft i by row i - 1 of p", _rows_too_early),
    WrongVersion("uses the first uniform for every draft", _one_uniform),
    WrongVersion(
        "draws the last token with a uniform that has judged a draft (or would judge the next one)", _same_uniform
    ),
    WrongVersion("accepts where it should reject: u < chance accepts", _inverted),
    WrongVersion(
        "accepts if u equals the chance: a draft with chance 0 is accepted at u = 0; compare with <", _at_least
    ),
    WrongVersion("commits the rejected draft too, before the recovered token", _keeps_rejected),
    WrongVersion("returns the target's token without the accepted drafts", _last_only),
    WrongVersion("accepts every draft", _never_rejects),
    WrongVersion("rejects every draft", _target_only),
    WrongVersion("throws all drafts away when one is rejected", _all_or_nothing),
)

# ----------------------------------------------------------------------------------------------------------- rollback

Rows = list[int]


def _minus_zero(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    rejected = num_drafts - num_accepted
    return target[:-rejected], draft[:-rejected]


def _minus_zero_but_shorter(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    return target[: -(num_drafts - num_accepted)], rollback(target, draft, num_drafts, num_accepted)[1]


def _alike(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    rejected = num_drafts - num_accepted
    return target[: len(target) - rejected], draft[: len(draft) - rejected]


def _keeps_all(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    return list(target), list(draft)


def _draft_keeps_all(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    return rollback(target, draft, num_drafts, num_accepted)[0], list(draft)


def _drops_all_drafts(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    return rollback(target, draft, num_drafts, 0)


def _drops_accepted(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    return rollback(target, draft, num_drafts, num_drafts - num_accepted)


def _one_too_few(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    return rollback(target, draft, num_drafts, num_accepted - 1)


def _one_too_many(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    num_valid = len(target) - num_drafts + num_accepted + 1
    return target[:num_valid], draft[:num_valid]


def _pretends(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    kept = rollback(target, draft, num_drafts, num_accepted)[0]
    return kept, kept


def _by_token(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    rejected = target[len(target) - num_drafts + num_accepted :]
    return [x for x in target if x not in rejected], [x for x in draft if x not in rejected]


def _draft_by_token(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    kept = rollback(target, draft, num_drafts, num_accepted)[0]
    return kept, [x for x in draft if x in kept]


def _swapped(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    return rollback(target, draft, num_drafts, num_accepted)[::-1]


def _only_drafts(target: Rows, draft: Rows, num_drafts: int, num_accepted: int) -> tuple[Rows, Rows]:
    first = len(target) - num_drafts
    return tuple(rows[first:] for rows in rollback(target, draft, num_drafts, num_accepted))


ROLLBACK = (
    WrongVersion("empties both caches when nothing was rejected: rows[:-0] is rows[:0]", _minus_zero),
    WrongVersion(
        "empties the target's cache when nothing was rejected: rows[:-0] is rows[:0]", _minus_zero_but_shorter
    ),
    WrongVersion(
        "drops as many rows from the draft model's cache as from the target's, though the last draft was never in it",
        _alike,
    ),
    WrongVersion("keeps the rows of rejected drafts", _keeps_all),
    WrongVersion("rolls back the target's cache only; the draft's has rows of rejected drafts, too", _draft_keeps_all),
    WrongVersion("drops the rows of accepted drafts, too", _drops_all_drafts),
    WrongVersion("drops as many rows as drafts were accepted; it should be as many as were rejected", _drops_accepted),
    WrongVersion("drops one row too many: that of the last accepted draft", _one_too_few),
    WrongVersion("keeps one row too many: that of the first rejected draft", _one_too_many),
    WrongVersion(
        "gives the draft's cache a row for the last draft after full acceptance, which the draft model never computed",
        _pretends,
    ),
    WrongVersion("drops every row that holds a rejected token; an earlier row may hold the same token", _by_token),
    WrongVersion(
        "keeps the draft's rows whose token the target's cache still holds; a rejected row may hold such a token",
        _draft_by_token,
    ),
    WrongVersion("returns the draft model's rows first", _swapped),
    WrongVersion("returns the rows of accepted drafts without those before them", _only_drafts),
)
