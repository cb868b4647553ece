"""Lesson 06, paged blocks: allocate and release, map tokens to slots, attend through a table, share, copy on write."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.cache.prefix import block_name, root_name
from minillm.teaching.exercise import Case, Exercise, Function, WrongVersion
from minillm.teaching.show import kind

# ----------------------------------------------------------------------------------------------------------- allocate


def allocate(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    """Take `count` blocks from the end of `free`, each with one owner. None, and no change, if there are too few."""
    if count > len(free):
        return None
    taken = [free.pop() for _ in range(count)]
    for block in taken:
        ref_counts[block] = 1
    return taken


def _takes_what_is_there(free: list[int], ref_counts: list[int], count: int) -> list[int]:
    taken = [free.pop() for _ in range(min(count, len(free)))]
    for block in taken:
        ref_counts[block] = 1
    return taken


def _takes_then_fails(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    taken = _takes_what_is_there(free, ref_counts, count)
    return taken if len(taken) == count else None


def _no_owner(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    return [free.pop() for _ in range(count)] if count <= len(free) else None


def _stays_free(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    return allocate(list(free), ref_counts, count)


def _counts_up_from_one(free: list[int], ref_counts: list[int], count: int) -> list[int] | None:
    taken = allocate(free, ref_counts, count)
    for block in taken or []:
        ref_counts[block] = count
    return taken


_ALLOCATE = Exercise(
    name="l06.allocate",
    reference=allocate,
    cases=[
        Case("two of three free blocks", ([2, 1, 0], [0, 0, 0], 2)),
        Case("all that is left", ([4, 3], [1, 1, 2, 0, 0], 2)),
        Case("more than there are", ([1], [1, 0], 2)),
        Case("none", ([1, 0], [0, 0], 0)),
    ],
    hints=(
        "First decide whether you can; only then change anything. Half an allocation is worse than none.",
        "Compare `count` with `len(free)`. Then `free.pop()` as often as needed: it takes from the end and removes.",
        "if count > len(free): return None; taken = [free.pop() for _ in range(count)]; ref_counts[b] = 1 for each.",
    ),
    wrong=(
        WrongVersion("hands out what there is when there is too little", _takes_what_is_there),
        WrongVersion("takes blocks although it fails, and so loses them", _takes_then_fails),
        WrongVersion("leaves the taken blocks without an owner", _no_owner),
        WrongVersion("does not remove the taken blocks from the free list", _stays_free),
        WrongVersion("gives each block as many owners as blocks were asked for", _counts_up_from_one),
    ),
    in_place=("free", "ref_counts"),
)

# ------------------------------------------------------------------------------------------------------------ release


def release(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
    """Take one owner from each block, in order; a block without any left goes to the end of `free`."""
    for block in block_ids:
        ref_counts[block] -= 1
        if ref_counts[block] == 0:
            free.append(block)


def _frees_shared(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
    for block in block_ids:
        ref_counts[block] = 0
        free.append(block)


def _never_returns(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
    for block in block_ids:
        ref_counts[block] -= 1


def _always_returns(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
    for block in block_ids:
        ref_counts[block] -= 1
        free.append(block)


def _only_the_last(free: list[int], ref_counts: list[int], block_ids: list[int]) -> None:
    release(free, ref_counts, block_ids[-1:])


_RELEASE = Exercise(
    name="l06.release",
    reference=release,
    cases=[
        Case("two blocks with one owner each", ([0], [0, 1, 1], [1, 2])),
        Case("a block that two requests share", ([0], [0, 2, 1], [1, 2])),
        Case("the second owner of a shared block goes", ([], [1, 1], [0])),
        Case("nothing to release", ([1], [2, 0], [])),
    ],
    hints=(
        "A block may have several owners. Who of them may hand it back to the pool?",
        "Lower the reference count first. Only the owner who brings it to zero returns the block.",
        "for block in block_ids: ref_counts[block] -= 1; if ref_counts[block] == 0: free.append(block).",
    ),
    wrong=(
        WrongVersion("frees a shared block while others still read it", _frees_shared),
        WrongVersion("never puts a block back on the free list: a leak", _never_returns),
        WrongVersion("puts a block back on the free list although it still has an owner", _always_returns),
        WrongVersion("releases the last block only", _only_the_last),
    ),
    in_place=("free", "ref_counts"),
)

# ------------------------------------------------------------------------------------------------------- slot_mapping


def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    """The slot of each of the tokens `start … start + num_tokens - 1`: block id · block size + place in the block."""
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in range(start, start + num_tokens)
    ]


def _contiguous(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    first = block_table[0] * block_size + start
    return list(range(first, first + num_tokens))


def _from_zero(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    return slot_mapping(block_table, 0, num_tokens, block_size)


def _logical(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    return list(range(start, start + num_tokens))


def _no_stride(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    return [block_table[p // block_size] + p % block_size for p in range(start, start + num_tokens)]


def _stuck_in_block(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    first = block_table[start // block_size] * block_size + start % block_size
    return list(range(first, first + num_tokens))


_SLOTS = Exercise(
    name="l06.slot_mapping",
    reference=slot_mapping,
    cases=[
        Case("the first token", ([5], 0, 1, 4)),
        Case("three tokens in the second block", ([5, 2], 4, 3, 4)),
        Case("a prompt over three scattered blocks", ([7, 0, 3], 0, 10, 4)),
        Case("two tokens across the border of two blocks", ([1, 9, 4], 7, 2, 4)),
        Case("blocks of one token", ([3, 1, 2], 1, 2, 1)),
    ],
    hints=(
        "Which entry of the block table does token number 9 belong to, if a block holds 4? And which place in it?",
        "Position p lies in logical block p // block_size, at place p % block_size. The table turns the logical block "
        "into a physical one, and a physical block b begins at slot b · block_size.",
        "[block_table[p // block_size] * block_size + p % block_size for p in range(start, start + num_tokens)]",
    ),
    wrong=(
        WrongVersion("takes the blocks for neighbours of the first one", _contiguous),
        WrongVersion("forgets the tokens that were there before", _from_zero),
        WrongVersion("does not look into the block table at all", _logical),
        WrongVersion("forgets that a block is block_size slots long", _no_stride),
        WrongVersion("runs out of its block into whoever lies behind it", _stuck_in_block),
    ),
)

# --------------------------------------------------------------------------------------------------- gather_attention


def gather_attention(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    """Causal attention of a request's newest tokens over all its tokens, which lie wherever the block table says.

    `q`: `[num_new, num_heads, head_dim]`, the last `num_new` of `seq_len` tokens; `keys`, `values`:
    `[num_slots, num_kv_heads, head_dim]`, everybody's. Returns `[num_new, num_heads, head_dim]`.
    """
    slots = torch.tensor(slot_mapping(block_table, 0, seq_len, block_size))
    k, v = keys[slots], values[slots]
    positions = torch.arange(seq_len - len(q), seq_len)
    mask = torch.arange(seq_len)[None, :] <= positions[:, None]
    return _attend(q, k, v, mask)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def _whole_blocks(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    slots = torch.tensor(slot_mapping(block_table, 0, len(block_table) * block_size, block_size))
    return _attend(q, keys[slots], values[slots], torch.ones(len(q), len(slots), dtype=torch.bool))


def _no_table(q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int) -> Tensor:
    return gather_attention(q, keys, values, list(range(len(block_table))), seq_len, block_size)


def _sees_the_future(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    slots = torch.tensor(slot_mapping(block_table, 0, seq_len, block_size))
    return _attend(q, keys[slots], values[slots], torch.ones(len(q), seq_len, dtype=torch.bool))


def _top_left(q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int) -> Tensor:
    slots = torch.tensor(slot_mapping(block_table, 0, seq_len, block_size))
    return _attend(q, keys[slots], values[slots], torch.ones(len(q), seq_len, dtype=torch.bool).tril())


def _physical_order(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    return gather_attention(q, keys, values, sorted(block_table), seq_len, block_size)


def _values_not_gathered(
    q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], seq_len: int, block_size: int
) -> Tensor:
    slots = torch.tensor(slot_mapping(block_table, 0, seq_len, block_size))
    mask = torch.arange(seq_len)[None, :] <= torch.arange(seq_len - len(q), seq_len)[:, None]
    return _attend(q, keys[slots], values[:seq_len], mask)


def _attention_cases() -> list[Case]:
    torch.manual_seed(6)
    keys, values = torch.randn(2, 16, 1, 2)
    return [
        Case("one new token, two scattered blocks", (torch.randn(1, 1, 2), keys, values, [3, 1], 6, 4)),
        Case("a prompt of three tokens", (torch.randn(3, 1, 2), keys, values, [2], 3, 4)),
        Case("two new tokens after five", (torch.randn(2, 1, 2), keys, values, [1, 0], 7, 4)),
        Case("two query heads share one KV head", (torch.randn(1, 2, 2), keys, values, [2, 3], 8, 4)),
    ]


_ATTENTION = Exercise(
    name="l06.gather_attention",
    reference=gather_attention,
    cases=_attention_cases,
    hints=(
        "Bring the request's keys and values into order first; then it is the attention of lesson 2.",
        "slots = your slot mapping of tokens 0 … seq_len - 1; keys[slots] are its keys in order. The new tokens are "
        "the *last* len(q) of them, so the mask needs lesson 2's offset.",
        "k, v = keys[slots], values[slots]; token i of the new ones may see key j if j <= seq_len - len(q) + i; then "
        "attention(q, k, v, mask), which the lesson gives you.",
    ),
    wrong=(
        WrongVersion("attends over whole blocks, so over slots that nobody has written", _whole_blocks),
        WrongVersion("reads the blocks 0, 1, 2 … instead of those in the table", _no_table),
        WrongVersion("lets a new token see the new tokens after it", _sees_the_future),
        WrongVersion("starts the causal triangle in the top left corner", _top_left),
        WrongVersion("reads the blocks in the order they lie in memory", _physical_order),
        WrongVersion("gathers the keys and forgets the values", _values_not_gathered),
    ),
)

# -------------------------------------------------------------------------------------------------------- find_prefix


def find_prefix(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    """Blocks that hold the beginning of `token_ids` already, in order; never one with the last token in it.

    `known`: name of a block's contents → block id. Names are those of `block_name(parent, tokens)`, and before the
    first block stands `root_name(salt)`.
    """
    found: list[int] = []
    parent = root_name(salt)
    for start in range(0, len(token_ids) - block_size, block_size):
        parent = block_name(parent, token_ids[start : start + block_size])
        if parent not in known:
            break
        found.append(known[parent])
    return found


TEXT = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34]
"""Three blocks of four tokens."""


def names(token_ids: list[int], block_size: int = 4, salt: str = "") -> list[bytes]:
    """The names of the full blocks of `token_ids`."""
    chain = [root_name(salt)]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        chain.append(block_name(chain[-1], token_ids[start : start + block_size]))
    return chain[1:]


def _use_find(find: Function, known: dict[str, int], token_ids: list[int], salt: str) -> object:
    """`known` tells in words which contents are in which block; the names are made here, to be read by nobody."""
    contents = {
        "tokens 11 to 14": names(TEXT)[0],
        "tokens 21 to 24 after those": names(TEXT)[1],
        "tokens 31 to 34 after those": names(TEXT)[2],
        "tokens 21 to 24 at the start of a text": names(TEXT[4:])[0],
        "tokens 11 to 14 of alice": names(TEXT, salt="alice")[0],
    }
    found = find(token_ids, {contents[words]: block for words, block in known.items()}, 4, salt)
    return found if isinstance(found, list) else kind(found)


def _no_parent(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    found = []
    for start in range(0, len(token_ids) - block_size, block_size):
        name = block_name(root_name(salt), token_ids[start : start + block_size])
        if name not in known:
            break
        found.append(known[name])
    return found


def _skips_misses(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    chain = names(token_ids, block_size, salt)[: (len(token_ids) - 1) // block_size]
    return [known[name] for name in chain if name in known]


def _all_of_it(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    return find_prefix([*token_ids, 0], known, block_size, salt)


def _no_salt(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    return find_prefix(token_ids, known, block_size, "")


def _first_only(token_ids: list[int], known: dict[bytes, int], block_size: int, salt: str) -> list[int]:
    return find_prefix(token_ids, known, block_size, salt)[:1]


_PREFIX = Exercise(
    name="l06.find_prefix",
    reference=find_prefix,
    cases=[
        Case("nothing known", ({}, TEXT, "")),
        Case("the first block known", ({"tokens 11 to 14": 7}, TEXT, "")),
        Case(
            "two blocks known, a third that is not full",
            ({"tokens 11 to 14": 7, "tokens 21 to 24 after those": 2}, [*TEXT[:8], 31, 32], ""),
        ),
        Case(
            "everything known: the last token must be computed all the same",
            ({"tokens 11 to 14": 7, "tokens 21 to 24 after those": 2, "tokens 31 to 34 after those": 5}, TEXT, ""),
        ),
        Case(
            "a block with the right tokens at another place of another text",
            ({"tokens 11 to 14": 7, "tokens 21 to 24 at the start of a text": 4}, TEXT, ""),
        ),
        Case("a gap", ({"tokens 21 to 24 after those": 2}, [*TEXT, 9], "")),
        Case("what alice has sent is none of bob's business", ({"tokens 11 to 14": 7}, TEXT, "bob")),
        Case("alice finds her own", ({"tokens 11 to 14 of alice": 3}, TEXT, "alice")),
    ],
    hints=(
        "Keys and values of a token depend on every token before it. What must be equal for two blocks to be equal?",
        "Start with parent = root_name(salt). For each full block: parent = block_name(parent, its tokens); stop at "
        "the first one that is not in `known`. Leave out a block that would contain the last token.",
        "for start in range(0, len(token_ids) - block_size, block_size): name the block, break if the name is unknown, "
        "else append known[name]. That range ends before the block with the last token.",
    ),
    wrong=(
        WrongVersion("names a block by its own tokens alone, as if what stands before did not matter", _no_parent),
        WrongVersion("goes on after a block that is not there", _skips_misses),
        WrongVersion("leaves no token to compute when everything is known", _all_of_it),
        WrongVersion("forgets the salt", _no_salt),
        WrongVersion("stops after one block", _first_only),
    ),
    drive=_use_find,
)

# ---------------------------------------------------------------------------------------------------------- own_block


def own_block(
    block_table: list[int],
    index: int,
    free: list[int],
    ref_counts: list[int],
    keys: Tensor,
    values: Tensor,
    block_size: int,
) -> None:
    """Make the request the only owner of its block number `index`, before it writes there: copy on write.

    `keys`, `values`: `[num_slots, ...]`. A block that nobody else owns stays as it is. Otherwise a free block gets a
    copy of the contents and takes its place in the table, and the old block loses one owner.
    """
    old = block_table[index]
    if ref_counts[old] == 1:
        return
    [new] = allocate(free, ref_counts, 1) or []
    for pool in (keys, values):
        pool[new * block_size : (new + 1) * block_size] = pool[old * block_size : (old + 1) * block_size]
    block_table[index] = new
    release(free, ref_counts, [old])


def _use_own(own: Function, block_table: list[int], index: int, ref_counts: list[int]) -> dict[str, object]:
    """Four blocks of two slots; slot i of the keys holds i + 1, of the values 10 · (i + 1). Block 3 is free."""
    table, counts, free = list(block_table), list(ref_counts), [3]
    keys = torch.arange(1.0, 9.0)
    values = 10 * keys
    own(table, index, free, counts, keys, values, 2)
    return {
        "block_table": table,
        "ref_counts": counts,
        "free": free,
        "keys": [int(x) for x in keys],
        "values": [int(x) for x in values],
    }


def _no_contents(
    table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
) -> None:
    own_block(table, index, free, counts, keys.clone(), values.clone(), size)


def _values_stay(
    table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
) -> None:
    own_block(table, index, free, counts, keys, values.clone(), size)


def _old_keeps_owner(
    table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
) -> None:
    old, before = table[index], counts[table[index]]
    own_block(table, index, free, counts, keys, values, size)
    counts[old] = before


def _old_is_freed(
    table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
) -> None:
    old = table[index]
    own_block(table, index, free, counts, keys, values, size)
    if table[index] != old:
        counts[old] = 0
        free.append(old)


def _table_stays(
    table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
) -> None:
    own_block(list(table), index, free, counts, keys, values, size)


def _appends(
    table: list[int], index: int, free: list[int], counts: list[int], keys: Tensor, values: Tensor, size: int
) -> None:
    old = table[index]
    own_block(table, index, free, counts, keys, values, size)
    if table[index] != old:
        table.append(table[index])
        table[index] = old


_OWN = Exercise(
    name="l06.own_block",
    reference=own_block,
    cases=[
        Case("a block of its own: nothing to do", ([0], 0, [1, 0, 0, 0])),
        Case("the last block is shared by two", ([0, 1], 1, [2, 2, 0, 0])),
        Case("the first block is shared by three", ([2, 1], 0, [0, 1, 3, 0])),
    ],
    hints=(
        "When may a request write into a block without asking anyone? When must it not?",
        "If ref_counts[old] is 1, return. Otherwise: allocate one, copy the old block's slots of keys and of values, "
        "put the new block into the table, release the old one.",
        "Block b covers slots b · block_size … (b + 1) · block_size - 1. Your allocate and release do the books: "
        "[new] = allocate(free, ref_counts, 1) … release(free, ref_counts, [old]).",
    ),
    wrong=(
        WrongVersion("copies nothing, so the new block holds what someone else left there", _no_contents),
        WrongVersion("copies the keys and forgets the values", _values_stay),
        WrongVersion("does not take one owner from the old block", _old_keeps_owner),
        WrongVersion("frees the old block while others read it", _old_is_freed),
        WrongVersion("leaves the old block in the table, and so writes where others read", _table_stays),
        WrongVersion("appends the copy to the table instead of putting it in the old one's place", _appends),
    ),
    drive=_use_own,
)

EXERCISES = [_ALLOCATE, _RELEASE, _SLOTS, _ATTENTION, _PREFIX, _OWN]
