"""Lesson 06, mistakes that learners make, planted so that a check can name them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.cache.prefix import hash_block_tokens, root_hash
from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l06_reference import (
    allocate,
    attention,
    find_prefix,
    gather_attention,
    own_block,
    release,
    slot_mapping,
)

# ----------------------------------------------------------------------------------------------------------- allocate


def _takes_what_is_there(free: list[int], ref_counts: list[int], count: int) -> list[int]:
    return allocate(free, ref_counts, min(count, len(free))) or []


def _takes_then_fails(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    taken = _takes_what_is_there(free, ref_counts, count)
    return taken if len(taken) == count else None


def _counts_up_from_one(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    taken = allocate(free, ref_counts, count)
    for block in taken or []:
        ref_counts[block] = count
    return taken


def _from_the_front(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    free.reverse()
    taken = allocate(free, ref_counts, count)
    free.reverse()
    return taken


def _slice_of_the_end(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    taken = allocate(free, ref_counts, count)
    return taken if taken is None else taken[::-1]


def _minus_zero(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    return _slice_of_the_end(free, ref_counts, count or len(free))


def _raises(free: list[int], ref_counts: list[int], count: int) -> list[int]:
    taken = allocate(free, ref_counts, count)
    if taken is None:
        raise IndexError("pop from empty list")
    return taken


ALLOCATE = (
    WrongVersion("takes the blocks that are left when too few are free", _takes_what_is_there),
    WrongVersion(
        "removes blocks from the free list although it returns None, so that they are lost", _takes_then_fails
    ),
    WrongVersion(
        "leaves the taken blocks without an owner in the caller's ref_counts (ref_counts = … makes another list)",
        lambda free, ref_counts, count: allocate(free, list(ref_counts), count),
    ),
    WrongVersion(
        "does not remove the taken blocks from the caller's free list (free = … makes another list)",
        lambda free, ref_counts, count: allocate(list(free), ref_counts, count),
    ),
    WrongVersion("sets each reference count to `count` instead of 1", _counts_up_from_one),
    WrongVersion("takes blocks from the front of the free list, not from the end", _from_the_front),
    WrongVersion("returns the blocks in the order of the free list, not in the order taken", _slice_of_the_end),
    WrongVersion("takes free[-count:], which is the whole list when count is 0", _minus_zero),
    WrongVersion(
        "takes free[-count:] and reverses it; when count is 0, this is the whole list",
        lambda free, ref_counts, count: allocate(free, ref_counts, count or len(free)),
    ),
    WrongVersion(
        "refuses the last free block (>= instead of >)",
        lambda free, ref_counts, count: None if count >= len(free) else allocate(free, ref_counts, count),
    ),
    WrongVersion("returns an empty list instead of None", lambda *args: allocate(*args) or []),
    WrongVersion("takes only one block", lambda free, ref_counts, count: allocate(free, ref_counts, min(count, 1))),
    WrongVersion("raises an error instead of returning None", _raises, expected_message="IndexError"),
)

# ------------------------------------------------------------------------------------------------------------ release


def _releasing(when: Callable[[int], bool], lowers: bool = True) -> Callable[[list[int], list[int], list[int]], None]:
    def release(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
        for block in block_ids:
            ref_counts[block] -= lowers
            if when(ref_counts[block]):
                free.append(block)

    return release


def _all_owners_gone(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
    for block in block_ids:
        ref_counts[block] = 0
        free.append(block)


def _to_the_front(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
    free.reverse()
    release(free, ref_counts, block_ids)
    free.reverse()


RELEASE = (
    WrongVersion("frees a shared block while others still read it", _all_owners_gone),
    WrongVersion(
        "never appends a block to the caller's free list: a leak (is the count lowered before it is tested, and free "
        "changed in place? free = … makes another list)",
        _releasing(lambda owners: False),
    ),
    WrongVersion("appends a block to the free list although it still has an owner", _releasing(lambda owners: True)),
    WrongVersion("frees a block that has one owner left", _releasing(lambda owners: owners <= 1)),
    WrongVersion("does not lower the reference count", _releasing(lambda owners: owners == 1, lowers=False)),
    WrongVersion("releases the last block only", lambda free, counts, ids: release(free, counts, ids[-1:])),
    WrongVersion("releases the first block only", lambda free, counts, ids: release(free, counts, ids[:1])),
    WrongVersion(
        "sorts the blocks (a set does, too) instead of releasing them in order",
        lambda free, counts, ids: release(free, counts, sorted(ids)),
    ),
    WrongVersion("releases the blocks from last to first", lambda free, counts, ids: release(free, counts, ids[::-1])),
    WrongVersion("puts blocks at the front of the free list, not at the end", _to_the_front),
)

# ------------------------------------------------------------------------------------------------------- slot_mapping


def _mapping(slot: Callable[[list[int], int, int], int]) -> Callable[[list[int], int, int, int], list[int]]:
    """The slots of `slot(block_table, position, block_size)` for each position."""
    return lambda table, start, num_tokens, size: [slot(table, p, size) for p in range(start, start + num_tokens)]


def _contiguous(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    first = block_table[0] * block_size + start
    return list(range(first, first + num_tokens))


def _stuck_in_block(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    first = block_table[start // block_size] * block_size + start % block_size
    return list(range(first, first + num_tokens))


def _counts_from_the_first_new(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    new = range(start, start + num_tokens)
    return [block_table[p // block_size] * block_size + (p - start) % block_size for p in new]


SLOTS = (
    WrongVersion("assumes that the blocks are consecutive, starting with the first one", _contiguous),
    WrongVersion(
        "begins at token 0 instead of at start",
        lambda table, start, num_tokens, size: slot_mapping(table, 0, num_tokens, size),
    ),
    WrongVersion("does not use the block table at all", _mapping(lambda table, p, size: p)),
    WrongVersion(
        "uses a block id as the first slot; block b begins at slot b · block_size",
        _mapping(lambda table, p, size: table[p // size] + p % size),
    ),
    WrongVersion(
        "continues past the end of the block instead of looking up the next block in the table", _stuck_in_block
    ),
    WrongVersion("counts the offset in a block from the first new token", _counts_from_the_first_new),
    WrongVersion("returns the first slot of each block", _mapping(lambda table, p, size: table[p // size] * size)),
    WrongVersion("returns block ids instead of slots", _mapping(lambda table, p, size: table[p // size])),
    WrongVersion("swaps // and %", _mapping(lambda table, p, size: table[p % size % len(table)] * size + p // size)),
    WrongVersion(
        "multiplies by the length of the table instead of by block_size",
        _mapping(lambda table, p, size: table[p // size] * len(table) + p % size),
    ),
    WrongVersion(
        "leaves out the last token",
        lambda table, start, num_tokens, size: slot_mapping(table, start, num_tokens - 1, size),
    ),
    WrongVersion(
        "uses num_tokens as the end of the range",
        lambda table, start, num_tokens, size: slot_mapping(table, start, num_tokens - start, size),
    ),
    WrongVersion(
        "begins one token before start",
        lambda table, start, num_tokens, size: slot_mapping(table, max(0, start - 1), num_tokens, size),
    ),
)

# --------------------------------------------------------------------------------------------------- gather_attention

Attending = Callable[[Tensor, Tensor, Tensor, list[int], int, int], Tensor]


def _slots(block_table: list[int], seq_len: int, block_size: int) -> Tensor:
    return torch.tensor(slot_mapping(block_table, 0, seq_len, block_size))


def _masked(allowed: Callable[[Tensor, Tensor, int], Tensor]) -> Attending:
    """Attention with the mask `allowed(key positions [1, k], query numbers [q, 1], seq_len - num_new)`."""

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
    ) -> Tensor:
        slots = _slots(block_table, seq_len, block_size)
        mask = allowed(torch.arange(seq_len)[None, :], torch.arange(len(q))[:, None], seq_len - len(q))
        return attention(q, keys[slots], values[slots], mask.expand(len(q), seq_len))

    return attend


def _other_table(change: Callable[[list[int]], list[int]]) -> Attending:
    return lambda q, keys, values, table, seq_len, size: gather_attention(q, keys, values, change(table), seq_len, size)


def _whole_blocks(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    slots = _slots(block_table, len(block_table) * block_size, block_size)
    return attention(q, keys[slots], values[slots], torch.ones(len(q), len(slots), dtype=torch.bool))


def _masks_unwritten(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    slots = _slots(block_table, len(block_table) * block_size, block_size)
    mask = torch.arange(len(slots))[None, :] <= torch.arange(seq_len - len(q), seq_len)[:, None]
    return attention(q, keys[slots], values[slots], mask)


def _values_not_gathered(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    mask = torch.arange(seq_len)[None, :] <= torch.arange(seq_len - len(q), seq_len)[:, None]
    return attention(q, keys[_slots(block_table, seq_len, block_size)], values[:seq_len], mask)


def _blocks_for_slots(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    rows = torch.tensor([block_table[p // block_size] for p in range(seq_len)])
    return gather_attention(q, keys[rows], values[rows], list(range(seq_len)), seq_len, 1)


def _alternate_heads(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat(1, group, 1), values.repeat(1, group, 1)
    return gather_attention(q, keys, values, block_table, seq_len, block_size)


ATTENTION = (
    WrongVersion("attends over whole blocks, including unwritten slots", _whole_blocks),
    WrongVersion(
        "reads unwritten slots and masks them: they may hold NaN, and 0 · NaN is NaN",
        _masks_unwritten,
    ),
    WrongVersion(
        "reads the blocks 0, 1, 2 … instead of those in the table", _other_table(lambda table: list(range(len(table))))
    ),
    WrongVersion(
        "lets a new token see the new tokens after it",
        _masked(lambda key, query, old: torch.ones_like(key + query) > 0),
    ),
    WrongVersion("starts the causal triangle in the top left corner", _masked(lambda key, query, old: key <= query)),
    WrongVersion("hides a new token from itself (< instead of <=)", _masked(lambda key, query, old: key < query + old)),
    WrongVersion(
        "lets a token see the one after it (the offset of the mask is one too large)",
        _masked(lambda key, query, old: key <= query + old + 1),
    ),
    WrongVersion(
        "hides the earlier tokens and shows the later ones (>= instead of <=)",
        _masked(lambda key, query, old: key >= query + old),
    ),
    WrongVersion(
        "lets new tokens see only each other, and not the tokens before them",
        _masked(lambda key, query, old: (key >= old) & (key <= query + old)),
    ),
    WrongVersion("reads the blocks in the order of their ids", _other_table(sorted)),
    WrongVersion("reads the blocks of the table from last to first", _other_table(lambda table: table[::-1])),
    WrongVersion(
        "lets query heads read KV heads alternately (repeat); neighbours must share one (repeat_interleave)",
        _alternate_heads,
    ),
    WrongVersion("gathers the keys and forgets the values", _values_not_gathered),
    WrongVersion("uses block ids as if they were slots", _blocks_for_slots),
    WrongVersion(
        "swaps keys and values",
        lambda q, keys, values, table, seq_len, size: gather_attention(q, values, keys, table, seq_len, size),
    ),
)

# -------------------------------------------------------------------------------------------------------- find_prefix

Finding = Callable[[list[int], dict[bytes, int], int, str], list[int]]


def _hashes(token_ids: list[int], block_size: int, parents: bool, salt: str) -> list[bytes]:
    chain = [root_hash(salt)]
    for start in range(0, len(token_ids) - block_size, block_size):
        parent = chain[-1] if parents else chain[0]
        chain.append(hash_block_tokens(parent, token_ids[start : start + block_size]))
    return chain[1:]


def _no_parent(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    found = []
    for block_hash in _hashes(token_ids, block_size, False, salt):
        if block_hash not in known:
            break
        found.append(known[block_hash])
    return found


def _first_block_is_every_parent(
    token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str
) -> list[int]:
    found: list[int] = []
    parent = root_hash(salt)
    for start in range(0, len(token_ids) - block_size, block_size):
        block_hash = hash_block_tokens(parent, token_ids[start : start + block_size])
        if block_hash not in known:
            break
        found.append(known[block_hash])
        if start == 0:
            parent = block_hash
    return found


def _skips_misses(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    hashes = _hashes(token_ids, block_size, True, salt)
    return [known[block_hash] for block_hash in hashes if block_hash in known]


def _zero_is_false(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    found: list[int] = []
    for block_hash in _hashes(token_ids, block_size, True, salt):
        if not known.get(block_hash):
            break
        found.append(known[block_hash])
    return found


def _found_hashes(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[bytes]:
    return _hashes(token_ids, block_size, True, salt)[: len(find_prefix(token_ids, known, block_size, salt))]


def _takes_out(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    found = find_prefix(token_ids, known, block_size, salt)
    for block_hash, block in list(known.items()):
        if block in found:
            del known[block_hash]
    return found


def _of(change: Callable[[list[int]], list[int]]) -> Finding:
    return lambda token_ids, known, size, salt: change(find_prefix(token_ids, known, size, salt))


PREFIX = (
    WrongVersion("hashes a block's own tokens alone, without the hash of the block before", _no_parent),
    WrongVersion(
        "gives every later block the hash of the first block as its parent; it must be that of the block before",
        _first_block_is_every_parent,
    ),
    WrongVersion("continues after a block that is not known", _skips_misses),
    WrongVersion(
        "leaves no token to compute when everything is known",
        lambda token_ids, known, size, salt: find_prefix([*token_ids, 0], known, size, salt),
    ),
    WrongVersion(
        "leaves a block out when exactly one token comes after it: one token to compute is enough",
        lambda token_ids, known, size, salt: find_prefix(token_ids[:-1], known, size, salt),
    ),
    WrongVersion(
        "always leaves a whole block to compute, where one token is enough",
        lambda token_ids, known, size, salt: find_prefix(token_ids[: 1 - size], known, size, salt),
    ),
    WrongVersion("treats block 0 as no block: 0 is a block id, but false in an `if`", _zero_is_false),
    WrongVersion("forgets the salt", lambda token_ids, known, size, salt: find_prefix(token_ids, known, size, "")),
    WrongVersion("takes the blocks it finds out of known, so that no other request finds them", _takes_out),
    WrongVersion("never finds more than the first block", _of(lambda found: found[:1])),
    WrongVersion("never finds more than two blocks", _of(lambda found: found[:2])),
    WrongVersion(
        "takes blocks of 4 tokens; a block has block_size tokens",
        lambda token_ids, known, size, salt: find_prefix(token_ids, known, 4, salt),
    ),
    WrongVersion("leaves out the last block that is known", _of(lambda found: found[:-1])),
    WrongVersion("returns the blocks from last to first", _of(lambda found: found[::-1])),
    WrongVersion("always returns an empty list", _of(lambda found: [])),
    WrongVersion("returns block hashes instead of block ids", _found_hashes),
)

# ---------------------------------------------------------------------------------------------------------- own_block

Owning = Callable[[list[int], int, list[int], list[int], Tensor, Tensor, int], None]


def _owning(
    *,
    sole: Callable[[list[int], list[int], int], bool] = lambda table, counts, index: counts[table[index]] == 1,
    copy: Callable[[Tensor, Tensor, int, int, int], None] | None = None,
    gives_up_old: bool = True,
) -> Owning:
    """`own_block` with one part replaced: when to do nothing, how to copy (keys, values, new, old, size), release."""

    def own(
        table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
    ) -> None:
        if sole(table, counts, index):
            return
        old = table[index]
        [table[index]] = allocate(free, counts, 1) or []
        (copy or _copy_both)(keys, values, table[index], old, size)
        if gives_up_old:
            release(free, counts, [old])

    return own


def _span(block: int, size: int, more: int = 0) -> slice:
    return slice(block * size, (block + 1) * size + more)


def _copy_both(keys: Tensor, values: Tensor, new: int, old: int, size: int, more: int = 0) -> None:
    for pool in (keys, values):
        pool[_span(new, size, more)] = pool[_span(old, size, more)].clone()


def _copy_backwards(keys: Tensor, values: Tensor, new: int, old: int, size: int) -> None:
    _copy_both(keys, values, old, new, size)


def _copy_keys(keys: Tensor, values: Tensor, new: int, old: int, size: int) -> None:
    keys[_span(new, size)] = keys[_span(old, size)]


def _copy_values(keys: Tensor, values: Tensor, new: int, old: int, size: int) -> None:
    values[_span(new, size)] = values[_span(old, size)]


def _copy_crossed(keys: Tensor, values: Tensor, new: int, old: int, size: int) -> None:
    keys[_span(new, size)], values[_span(new, size)] = keys[_span(old, size)], keys[_span(old, size)]


def _copy_ends(keys: Tensor, values: Tensor, new: int, old: int, size: int) -> None:
    for pool in (keys, values):
        for offset in (0, size - 1):
            pool[new * size + offset] = pool[old * size + offset]


def _copy_rows(keys: Tensor, values: Tensor, new: int, old: int, size: int) -> None:
    for pool in (keys, values):
        pool[new] = pool[old]


def _old_is_freed(
    table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
) -> None:
    old = table[index]
    own_block(table, index, free, counts, keys, values, size)
    if table[index] != old:
        counts[old] = 0
        free.append(old)


def _appends(
    table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
) -> None:
    old = table[index]
    own_block(table, index, free, counts, keys, values, size)
    if table[index] != old:
        table.append(table[index])
        table[index] = old


def _no_owner(
    table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
) -> None:
    old = table[index]
    own_block(table, index, free, counts, keys, values, size)
    if table[index] != old:
        counts[table[index]] = 0


OWN = (
    WrongVersion(
        "copies nothing, or only into a temporary tensor (flatten and reshape may return one), so the new block keeps "
        "the contents of an earlier request",
        _owning(copy=lambda *args: None),
    ),
    WrongVersion("copies the keys and forgets the values", _owning(copy=_copy_keys)),
    WrongVersion("copies the values and forgets the keys", _owning(copy=_copy_values)),
    WrongVersion("copies the keys into the values", _owning(copy=_copy_crossed)),
    WrongVersion("copies the new block over the old one: the wrong direction", _owning(copy=_copy_backwards)),
    WrongVersion(
        "copies one slot too many, over the first slot of another block",
        _owning(copy=lambda *args: _copy_both(*args, more=1)),
    ),
    WrongVersion("does not copy the last slot of the block", _owning(copy=lambda *args: _copy_both(*args, more=-1))),
    WrongVersion("copies only the first and the last slot of the block", _owning(copy=_copy_ends)),
    WrongVersion("uses block ids as slots: block b begins at slot b · block_size", _owning(copy=_copy_rows)),
    WrongVersion("does not remove one owner from the old block", _owning(gives_up_old=False)),
    WrongVersion("copies a block that has only one owner", _owning(sole=lambda table, counts, index: False)),
    WrongVersion(
        "never copies, so that the request writes into a shared block", _owning(sole=lambda table, counts, index: True)
    ),
    WrongVersion(
        "reads ref_counts[index]; the block is block_table[index]",
        _owning(sole=lambda table, counts, index: counts[index] == 1),
    ),
    WrongVersion(
        "copies only for three owners or more; with two owners a block is already shared",
        _owning(sole=lambda table, counts, index: counts[table[index]] <= 2),
    ),
    WrongVersion("frees the old block although it has other owners", _old_is_freed),
    WrongVersion(
        "leaves the old block in the caller's block_table (block_table = … makes another list), so that the request "
        "writes into a shared block",
        lambda table, *rest: own_block(list(table), *rest),
    ),
    WrongVersion("appends the copy to the table instead of replacing the old block", _appends),
    WrongVersion("leaves the new block without an owner", _no_owner),
)
