"""Lesson 14, planted mistakes: wrong versions of each exercise, with the sentence that names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l14_reference import best_split, break_even_tokens, find_entry, rerotate
from minillm.teaching.source import wrong_versions
from minillm.teaching.workshop.l14_store import Key

# -------------------------------------------------------------------------------------------------- break_even_tokens

_SAVED = "saved = seconds_per_token - kv_bytes / bandwidth"
_TOKENS = "latency / saved if saved > 0 else math.inf"

BREAK_EVEN = wrong_versions(
    break_even_tokens,
    {
        "leaves out the latency: loading then is always faster, or never": (_TOKENS, "0.0 if saved > 0 else math.inf"),
        "leaves out the time that each token takes on the link": (_SAVED, "saved = seconds_per_token"),
        "adds the time on the link to that of computing; a token that is loaded is not computed": (
            _SAVED,
            "saved = seconds_per_token + kv_bytes / bandwidth",
        ),
        "multiplies bytes by bandwidth; bytes over bytes per second are seconds": (
            _SAVED,
            "saved = seconds_per_token - kv_bytes * bandwidth",
        ),
        "divides bandwidth by bytes; seconds are the other way round": (
            _SAVED,
            "saved = seconds_per_token - bandwidth / kv_bytes",
        ),
        "has the difference the wrong way round: a token saves what computing takes, less what loading takes": (
            _SAVED,
            "saved = kv_bytes / bandwidth - seconds_per_token",
        ),
        "returns a negative number where loading is never faster; return math.inf": (
            _TOKENS,
            "latency / saved if saved else math.inf",
        ),
        "returns 0 where loading is never faster; return math.inf": ("else math.inf", "else 0.0"),
        "returns bytes; the result is a number of tokens": (_TOKENS, f"kv_bytes * {_TOKENS}"),
        "returns the seconds that loading so many tokens takes; the result is a number of tokens": (
            _TOKENS,
            "latency / saved * seconds_per_token if saved > 0 else math.inf",
        ),
        "counts the latency for each token; it is waited for once": (
            _TOKENS,
            "0.0 if saved > latency else math.inf",
        ),
        "rounds down to whole tokens": (_TOKENS, "latency // saved if saved > 0 else math.inf"),
        "rounds up to whole tokens": (_TOKENS, "-(-latency // saved) if saved > 0 else math.inf"),
        "multiplies the latency by what a token saves; divide": (_TOKENS, "latency * saved if saved > 0 else math.inf"),
    },
)

# --------------------------------------------------------------------------------------------------------- best_split

_GUARD = "if hidden_bytes >= kv_bytes:"
_BALANCE = "num_tokens * kv_bytes / (seconds_per_token * bandwidth + kv_bytes)"
_MIN = "min(math.floor(balance), math.ceil(balance), key=seconds)"


def _at_the_end(
    num_tokens: int, kv_bytes: float, hidden_bytes: float, bandwidth: float, seconds_per_token: float
) -> int:
    return num_tokens - best_split(num_tokens, kv_bytes, hidden_bytes, bandwidth, seconds_per_token)


def _as_float(
    num_tokens: int, kv_bytes: float, hidden_bytes: float, bandwidth: float, seconds_per_token: float
) -> float:
    return float(best_split(num_tokens, kv_bytes, hidden_bytes, bandwidth, seconds_per_token))


def _begins_at_once(
    num_tokens: int, kv_bytes: float, hidden_bytes: float, bandwidth: float, seconds_per_token: float
) -> int:
    def seconds(split: int) -> float:
        crossing = (split * hidden_bytes + (num_tokens - split) * kv_bytes) / bandwidth
        return max(crossing, split * seconds_per_token)

    return min(range(num_tokens + 1), key=seconds)


def _one_after_the_other(
    num_tokens: int, kv_bytes: float, hidden_bytes: float, bandwidth: float, seconds_per_token: float
) -> int:
    def seconds(split: int) -> float:
        crossing = (split * hidden_bytes + (num_tokens - split) * kv_bytes) / bandwidth
        return crossing + split * seconds_per_token

    return min(range(num_tokens + 1), key=seconds)


SPLIT = (
    WrongVersion("returns how many tokens are sent instead of how many are recomputed", _at_the_end),
    WrongVersion("returns a float; a split is a whole number of tokens", _as_float),
    WrongVersion(
        "lets recomputing begin before the activations are there: they cross first, and nothing is computed meanwhile",
        _begins_at_once,
    ),
    WrongVersion(
        "adds the time of recomputing to that of the link; both go on at the same time, so the longer one counts",
        _one_after_the_other,
    ),
    WrongVersion("recomputes nothing", lambda *args: 0),
    WrongVersion("recomputes all tokens", lambda num_tokens, *rest: num_tokens),
    WrongVersion("recomputes half of the tokens, whatever the speeds", lambda num_tokens, *rest: num_tokens // 2),
    *wrong_versions(
        best_split,
        {
            "recomputes tokens whose activations are no smaller than their keys and values": (_GUARD, "if False:"),
            "compares the activations with the keys alone; keys and values are `kv_bytes` together": (
                _GUARD,
                "if hidden_bytes >= kv_bytes / 2:",
            ),
            "rounds down: of the two whole numbers around the balance, the upper one may be better": (
                _MIN,
                "math.floor(balance)",
            ),
            "rounds up: of the two whole numbers around the balance, the lower one may be better": (
                _MIN,
                "math.ceil(balance)",
            ),
            "rounds the balance to the nearest: of the two whole numbers around it, either may be better": (
                _MIN,
                "round(balance)",
            ),
            "takes the longer of the two times, of the two splits around the balance": (
                _MIN,
                _MIN.replace("min(", "max("),
            ),
            "takes the most of equals; the fewest should be recomputed": (
                _MIN,
                "min(math.ceil(balance), math.floor(balance), key=seconds)",
            ),
            "balances recomputing with sending all tokens; those that are recomputed are not sent": (
                _BALANCE,
                "min(num_tokens, num_tokens * kv_bytes / (seconds_per_token * bandwidth))",
            ),
            "leaves the bandwidth out: seconds of computing and bytes cannot be compared": (
                _BALANCE,
                "num_tokens * kv_bytes / (seconds_per_token + kv_bytes)",
            ),
            "balances recomputing with sending activations; what crosses meanwhile are keys and values": (
                _BALANCE,
                _BALANCE.replace("kv_bytes", "hidden_bytes"),
            ),
            "divides by the bandwidth where it should multiply: a faster link means that less is recomputed": (
                _BALANCE,
                _BALANCE.replace("seconds_per_token * bandwidth", "seconds_per_token / bandwidth"),
            ),
        },
    ),
)

# ----------------------------------------------------------------------------------------------------------- rerotate

_ANGLES = "angles = delta * frequencies"
_JOINED = "torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)"


def _by_index(keys: Tensor, frequencies: Tensor, delta: int) -> Tensor:
    angles = torch.arange(len(keys), dtype=torch.float32)[:, None, None] * delta * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = keys.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _neighbours(keys: Tensor, frequencies: Tensor, delta: int) -> Tensor:
    even, odd = keys[..., 0::2], keys[..., 1::2]
    cos, sin = (delta * frequencies).cos(), (delta * frequencies).sin()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


ROTATE = (
    WrongVersion("leaves the keys as they are", lambda keys, frequencies, delta: keys.clone()),
    WrongVersion("rotates neighbouring channels; channel i belongs to channel i + head_dim / 2", _neighbours),
    WrongVersion(
        "rotates each token by an angle that grows with its index; all tokens move by the same delta", _by_index
    ),
    *wrong_versions(
        rerotate,
        {
            "rotates the wrong way: the keys end `delta` positions before": (_ANGLES, "angles = -delta * frequencies"),
            "rotates by one position, whatever delta is": (_ANGLES, "angles = frequencies"),
            "rotates one position too far": (_ANGLES, "angles = (delta + 1) * frequencies"),
            "ignores the sign of delta": (_ANGLES, "angles = abs(delta) * frequencies"),
            "rotates all pairs by the first frequency": (_ANGLES, "angles = delta * frequencies[0]"),
            "takes the frequencies in reverse order": (_ANGLES, "angles = delta * frequencies.flip(0)"),
            "divides by the frequencies; they are angles per position": (_ANGLES, "angles = delta / frequencies"),
            "converts the angles to degrees; cos and sin take radians": (
                _ANGLES,
                "angles = (delta * frequencies).rad2deg()",
            ),
            "rotates the first half only, and leaves the second": (
                _JOINED,
                "torch.cat((first * cos - second * sin, second), dim=-1)",
            ),
            "rotates the second half only, and leaves the first": (
                _JOINED,
                "torch.cat((first, second * cos + first * sin), dim=-1)",
            ),
            "multiplies by the cosines only": (_JOINED, "torch.cat((first * cos, second * cos), dim=-1)"),
            "has the same sign in both halves: that is no rotation, lengths change": (
                _JOINED,
                _JOINED.replace("first * cos - second * sin", "first * cos + second * sin"),
            ),
            "swaps the halves": (
                _JOINED,
                "torch.cat((second * cos + first * sin, first * cos - second * sin), dim=-1)",
            ),
            "swaps cosine and sine": (
                _JOINED,
                "torch.cat((first * sin - second * cos, second * sin + first * cos), dim=-1)",
            ),
            "uses the rotated first half to rotate the second": (
                _JOINED,
                "torch.cat((first * cos - second * sin, second * cos + (first * cos - second * sin) * sin), dim=-1)",
            ),
        },
    ),
)

# --------------------------------------------------------------------------------------------------------- find_entry

_USABLE = "(e.text, e.model, e.dtype, e.format) == same"
_EXACT = "if entries[i].before == wanted.before:"
_MOVED = "(usable[0], wanted.start - entries[usable[0]].start, False) if usable else None"
Found = tuple[int, int, bool] | None


def _first_usable(entries: Sequence[Key], wanted: Key) -> Found:
    for i, e in enumerate(entries):
        if (e.text, e.model, e.dtype, e.format) == (wanted.text, wanted.model, wanted.dtype, wanted.format):
            return i, wanted.start - e.start, e.before == wanted.before
    return None


def _only_exact(entries: Sequence[Key], wanted: Key) -> Found:
    found = find_entry(entries, wanted)
    return found if found is not None and found[2] else None


def _only_in_place(entries: Sequence[Key], wanted: Key) -> Found:
    found = find_entry([e for e in entries if e.start == wanted.start], wanted)
    if found is None:
        return None
    return [i for i, e in enumerate(entries) if e.start == wanted.start][found[0]], *found[1:]


def _last(entries: Sequence[Key], wanted: Key) -> Found:
    found = find_entry(entries[::-1], wanted)
    return found and (len(entries) - 1 - found[0], *found[1:])


def _by_rank(rank: Callable[[Key, Key], int]) -> Callable[[Sequence[Key], Key], Found]:
    """`find_entry` that looks at the entries in the order of `rank(entry, wanted)`."""

    def find(entries: Sequence[Key], wanted: Key) -> Found:
        order = sorted(range(len(entries)), key=lambda i: rank(entries[i], wanted))
        found = find_entry([entries[i] for i in order], wanted)
        return found and (order[found[0]], *found[1:])

    return find


ENTRY = (
    WrongVersion("takes the first usable entry, although a later one is exact", _first_usable),
    WrongVersion(
        "uses exact entries only; the others are usable after moving, and are called approximate", _only_exact
    ),
    WrongVersion("demands the same position; keys can be moved", _only_in_place),
    WrongVersion(
        "prefers an entry at the same position where none is exact; the first usable one is wanted",
        _by_rank(lambda entry, wanted: entry.start != wanted.start),
    ),
    WrongVersion(
        "prefers the entry nearest to the wanted position where none is exact; the first usable one is wanted",
        _by_rank(lambda entry, wanted: abs(entry.start - wanted.start)),
    ),
    WrongVersion(
        "prefers the entry with the largest start where none is exact; the first usable one is wanted",
        _by_rank(lambda entry, wanted: -entry.start),
    ),
    WrongVersion("takes the last of several entries that are equally good", _last),
    *wrong_versions(
        find_entry,
        {
            "uses an entry of another text": (_USABLE, "(wanted.text, e.model, e.dtype, e.format) == same"),
            "uses an entry of another model": (_USABLE, "(e.text, wanted.model, e.dtype, e.format) == same"),
            "uses an entry of another dtype": (_USABLE, "(e.text, e.model, wanted.dtype, e.format) == same"),
            "uses an entry of another format": (_USABLE, "(e.text, e.model, e.dtype, wanted.format) == same"),
            "takes an entry for exact if its position is the same; the tokens before it must be, too": (
                _EXACT,
                "if entries[i].start == wanted.start:",
            ),
            "calls every usable entry exact": (_EXACT, "if True:"),
            "calls a moved entry exact; its tokens attended to another text": (_MOVED, _MOVED.replace("False", "True")),
            "calls an exact entry approximate": ("return i, 0, True", "return i, 0, False"),
            "moves the keys the wrong way": (
                _MOVED,
                _MOVED.replace("wanted.start - entries[usable[0]].start", "entries[usable[0]].start - wanted.start"),
            ),
            "returns the wanted position instead of the number of positions to move": (
                _MOVED,
                _MOVED.replace("wanted.start - entries[usable[0]].start", "wanted.start"),
            ),
            "does not move the keys": (
                _MOVED,
                _MOVED.replace("wanted.start - entries[usable[0]].start", "0"),
            ),
            "returns an index among the usable entries; it should be one of all entries": (
                _MOVED,
                _MOVED.replace("(usable[0],", "(0,"),
            ),
            "returns the start of the entry instead of the number of positions to move": (
                _MOVED,
                _MOVED.replace("wanted.start - entries[usable[0]].start", "entries[usable[0]].start"),
            ),
        },
    ),
)
