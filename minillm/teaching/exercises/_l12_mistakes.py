"""Lesson 12, planted mistakes: wrong versions of each exercise, with the sentence that names them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l12_reference import (
    break_even_context,
    sink_view,
    snapkv_blocks,
    step_seconds,
    two_levels,
)
from minillm.teaching.source import wrong_versions
from minillm.teaching.workshop.l12_costs import Machine, Shape

# ------------------------------------------------------------------------------------------------------- step_seconds

_READ = "read = shape.weight_bytes + batch * context * shape.kv_bytes"
_OPERATIONS = "operations = batch * rows * (2 * shape.parameters + context * shape.attention_flops)"
_MOST = "max(read / machine.bandwidth, operations / machine.flops)"

SECONDS = wrong_versions(
    step_seconds,
    {
        "reads the weights once for each request; one forward reads them once for all": (
            _READ,
            "read = batch * (shape.weight_bytes + context * shape.kv_bytes)",
        ),
        "leaves out the weights": (_READ, "read = batch * context * shape.kv_bytes"),
        "leaves out the keys and values": (_READ, "read = shape.weight_bytes"),
        "reads the cache of one request only; each request has its own": (
            _READ,
            "read = shape.weight_bytes + context * shape.kv_bytes",
        ),
        "reads the cache once for each row; the rows of a request share what is read": (
            _READ,
            "read = shape.weight_bytes + batch * rows * context * shape.kv_bytes",
        ),
        "reads keys and values of one token, whatever the context": (
            _READ,
            "read = shape.weight_bytes + batch * shape.kv_bytes",
        ),
        "counts one operation for each parameter; there are a multiplication and an addition": (
            "2 * shape.parameters",
            "shape.parameters",
        ),
        "takes the bytes of the weights for their operations: a parameter has two, whatever its bytes": (
            "2 * shape.parameters",
            "shape.weight_bytes",
        ),
        "doubles the operations of attention, which attention_flops already counts": (
            "(2 * shape.parameters + context * shape.attention_flops)",
            "2 * (shape.parameters + context * shape.attention_flops)",
        ),
        "leaves out the operations of attention": (" + context * shape.attention_flops", ""),
        "counts the operations of attention over one cached token, whatever the context": (
            "context * shape.attention_flops",
            "shape.attention_flops",
        ),
        "leaves out the operations of the weights": ("2 * shape.parameters + ", ""),
        "counts the operations of one row only": ("batch * rows * (", "batch * ("),
        "counts the operations of one request only": ("batch * rows * (", "rows * ("),
        "adds the two times: reading and computing happen at the same time, so the longer one decides": (
            _MOST,
            "read / machine.bandwidth + operations / machine.flops",
        ),
        "takes the longer time for the weights and for the cache separately: all bytes are read while all operations "
        "are computed": (
            f"{_READ}\n    {_OPERATIONS}\n    return {_MOST}",
            "of_weights = shape.weight_bytes / machine.bandwidth, 2 * batch * rows * shape.parameters / machine.flops\n"
            "    of_token = shape.kv_bytes / machine.bandwidth, rows * shape.attention_flops / machine.flops\n"
            "    return max(of_weights) + batch * context * max(of_token)",
        ),
        "reads two bytes for each parameter, whatever weight_bytes says": (
            _READ,
            _READ.replace("shape.weight_bytes", "2 * shape.parameters"),
        ),
        "takes the shorter of the two times": (_MOST, _MOST.replace("max", "min")),
        "counts only what is read": (_MOST, "read / machine.bandwidth"),
        "counts only the operations": (_MOST, "operations / machine.flops"),
        "multiplies by bandwidth and rate instead of dividing": (
            _MOST,
            "max(read * machine.bandwidth, operations * machine.flops)",
        ),
        "divides the bytes by the rate of operations, and the operations by the bandwidth": (
            _MOST,
            "max(read / machine.flops, operations / machine.bandwidth)",
        ),
        "returns milliseconds": (_MOST, f"1000 * {_MOST}"),
    },
)

# ------------------------------------------------------------------------------------------------- break_even_context

_SPARE = "spare = shape.kv_bytes * operations_per_byte - rows * shape.attention_flops"
_RETURN = "rows * 2 * shape.parameters / spare if spare > 0 else math.inf"


def _where_cache_equals_weights(rows: int, shape: Shape, machine: Machine) -> float:
    return shape.weight_bytes / shape.kv_bytes


def _with_weights(rows: int, shape: Shape, machine: Machine) -> float:
    ridge = machine.flops / machine.bandwidth
    spare = shape.kv_bytes * ridge - rows * shape.attention_flops
    return (rows * 2 * shape.parameters - shape.weight_bytes * ridge) / spare if spare > 0 else math.inf


BREAK_EVEN = (
    WrongVersion(
        "returns the context at which one request's cache is as large as the weights; with many requests the weights "
        "no longer count",
        _where_cache_equals_weights,
    ),
    WrongVersion(
        "counts the reading of the weights, too, as if there were a single request; with many requests it no longer "
        "counts",
        _with_weights,
    ),
    *wrong_versions(
        break_even_context,
        {
            "leaves out attention's own operations, which grow with the context": (
                _SPARE,
                "spare = shape.kv_bytes * operations_per_byte",
            ),
            "adds attention's operations to what the cache gives time for; subtract them": (
                _SPARE,
                "spare = shape.kv_bytes * operations_per_byte + rows * shape.attention_flops",
            ),
            "counts attention's operations of one row only": (
                _SPARE,
                "spare = shape.kv_bytes * operations_per_byte - shape.attention_flops",
            ),
            "counts the weights' operations of one row only": ("rows * 2 * shape", "2 * shape"),
            "counts one operation for each parameter; there are a multiplication and an addition": (
                "rows * 2 * shape",
                "rows * shape",
            ),
            "counts one row too few: the last committed token is computed, too": (
                "rows * 2 * shape",
                "(rows - 1) * 2 * shape",
            ),
            "counts one row too many: `rows` already contains the last committed token": (
                "rows * 2 * shape",
                "(rows + 1) * 2 * shape",
            ),
            "divides bandwidth by operations; operations per byte are the other way round": (
                "machine.flops / machine.bandwidth",
                "machine.bandwidth / machine.flops",
            ),
            "ignores bandwidth and rate: a byte and an operation do not take the same time": (
                "machine.flops / machine.bandwidth",
                "1.0",
            ),
            "returns a negative context where no context is long enough; return math.inf": (
                _RETURN,
                "rows * 2 * shape.parameters / spare",
            ),
            "returns 0 where no context is long enough; return math.inf": ("else math.inf", "else 0.0"),
            "returns the reciprocal": (
                _RETURN,
                "spare / (rows * 2 * shape.parameters) if spare > 0 else math.inf",
            ),
        },
    ),
)

# ---------------------------------------------------------------------------------------------------------- sink_view

_LAST = "last = num_tokens - 1"
_KEPT = "kept = [0, *range(newest - most + 1, newest)] if newest > most else list(range(newest))"
_VIEW = "return [block_table[i] for i in kept] + block_table[newest:], last - left_out, left_out"
Triple = tuple[list[int], int, int]


def _from_most_plus(extra: int, block_table: list[int], num_tokens: int, block_size: int, most: int) -> Triple:
    return sink_view(block_table, num_tokens, block_size, max(1, most + extra))


VIEW = (
    WrongVersion(
        "returns the whole table: nothing is left out",
        lambda block_table, num_tokens, block_size, most: (list(block_table), num_tokens - 1, 0),
    ),
    WrongVersion(
        "keeps one block too few; the newest token's block does not count",
        lambda *args: _from_most_plus(-1, *args),
    ),
    WrongVersion("keeps one block too many", lambda *args: _from_most_plus(1, *args)),
    *wrong_versions(
        sink_view,
        {
            "leaves out the sink: the first block must stay": (
                "[0, *range(newest - most + 1, newest)]",
                "list(range(newest - most, newest))",
            ),
            "keeps the first blocks instead of the newest ones": (
                "[0, *range(newest - most + 1, newest)]",
                "list(range(most))",
            ),
            "keeps the sink only": ("[0, *range(newest - most + 1, newest)]", "[0]"),
            "repeats block 0 where nothing has to be left out": (
                _KEPT,
                "kept = [0, *range(max(0, newest - most + 1), newest)]",
            ),
            "takes the number of tokens for the index of the newest one; indices begin at 0": (
                _LAST,
                "last = num_tokens",
            ),
            "leaves out the blocks behind the newest token's block, in which the drafts are stored": (
                "block_table[newest:]",
                "block_table[newest : newest + 1]",
            ),
            "leaves out the newest token's own block": ("block_table[newest:]", "block_table[newest + 1 :]"),
            "returns indices instead of block ids for the blocks that are kept": (
                "[block_table[i] for i in kept]",
                "kept",
            ),
            "returns the true position as the index in the shortened table": (
                _VIEW,
                _VIEW.replace("last - left_out", "last"),
            ),
            "says that nothing was left out, so that RoPE gets positions counted in the shortened table": (
                "last - left_out, left_out",
                "last - left_out, 0",
            ),
            "counts what is left out in blocks; positions are counted in tokens": (
                "left_out = (newest - len(kept)) * block_size",
                "left_out = newest - len(kept)",
            ),
            "swaps the index and the number of tokens left out": (
                "last - left_out, left_out",
                "left_out, last - left_out",
            ),
        },
    ),
)

# ------------------------------------------------------------------------------------------------------ snapkv_blocks

_BLOCKS = ".view(count, block_size).sum(1)"
_BEST = "best = of_blocks[: count - window].argsort(descending=True, stable=True)[: most - window]"
_JOINED = "return sorted(best.tolist()) + list(range(count - window, count))"


def _newest(attention: Tensor, block_size: int, count: int, most: int) -> list[int]:
    return list(range(max(0, count - most), count))


def _sink_and_newest(attention: Tensor, block_size: int, count: int, most: int) -> list[int]:
    return list(range(count)) if count <= most else [0, *range(count - most + 1, count)]


def _last_query(attention: Tensor, block_size: int, count: int, most: int) -> list[int]:
    return snapkv_blocks(attention[-1:], block_size, count, most)


def _first_query(attention: Tensor, block_size: int, count: int, most: int) -> list[int]:
    return snapkv_blocks(attention[:1], block_size, count, most)


def _full_blocks_only(attention: Tensor, block_size: int, count: int, most: int) -> list[int]:
    full = attention.shape[1] // block_size * block_size
    return snapkv_blocks(attention[:, :full], block_size, count, most)


def _mean_of_blocks(attention: Tensor, block_size: int, count: int, most: int) -> list[int]:
    filled = torch.tensor([len(block) for block in attention[0].split(block_size)])
    return snapkv_blocks(attention / filled.repeat_interleave(filled), block_size, count, most)


def _not_cut(attention: Tensor, block_size: int, count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    blocks = max(count, -(-attention.shape[1] // block_size))
    best = snapkv_blocks(attention, block_size, blocks, most)[: most - most // 2]
    return best + list(range(count - most // 2, count))


SNAPKV = (
    WrongVersion("keeps the newest blocks only, and ignores the attention", _newest),
    WrongVersion("keeps the first block and the newest ones, and ignores the attention", _sink_and_newest),
    WrongVersion("uses the last query only; all of them count", _last_query),
    WrongVersion("uses the first query only; all of them count", _first_query),
    WrongVersion("leaves out the prompt's last block where it is not full", _full_blocks_only),
    WrongVersion(
        "does not ignore the tokens behind count · block_size: it chooses among more than `count` blocks", _not_cut
    ),
    WrongVersion(
        "takes the mean over the tokens that a block has; a block that is not full counts with its sum, as any other",
        _mean_of_blocks,
    ),
    WrongVersion("returns all blocks", lambda attention, block_size, count, most: list(range(count))),
    *wrong_versions(
        snapkv_blocks,
        {
            "keeps no window: all blocks are chosen by attention": ("window = most // 2", "window = 0"),
            "rounds the window up; half of `most` is rounded down": ("window = most // 2", "window = (most + 1) // 2"),
            "takes the blocks with the least attention": ("descending=True", "descending=False"),
            "lets the window's blocks compete for the other places, too": (
                "of_blocks[: count - window].argsort",
                "of_blocks.argsort",
            ),
            "returns the blocks in the order of their attention; a block table is in the order of the text": (
                "sorted(best.tolist())",
                "best.tolist()",
            ),
            "takes the highest attention to a single token of a block instead of the sum over its tokens": (
                _BLOCKS,
                _BLOCKS.replace("sum", "amax"),
            ),
            "takes for each token the highest attention of any query instead of the sum over the queries": (
                "attention.sum(0)",
                "attention.amax(0)",
            ),
            "returns the chosen blocks without the window": (_JOINED, "return sorted(best.tolist())"),
            "fills the places of the window a second time: one block for each place of `most`, and the window": (
                _BEST,
                _BEST.replace("[: most - window]", "[:most]"),
            ),
            "chooses one block too few": (_BEST, _BEST.replace("[: most - window]", "[: most - window - 1]")),
            "takes the last of equals; the earlier block should win": (
                _BEST,
                "best = count - window - 1 - of_blocks[: count - window].flip(0)"
                ".argsort(descending=True, stable=True)[: most - window]",
            ),
        },
    ),
)

# --------------------------------------------------------------------------------------------------------- two_levels


_UPPER = "upper = steps.round().clamp(0, 15)"
_LOWER = "lower = ((steps - upper) * 16).round().clamp(-8, 7)"


def _floats(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    upper, lower = two_levels(x, scale, zero)
    return upper.float(), lower.float()


def _swapped(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    return two_levels(x, scale, zero)[::-1]


def _unsigned(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    upper, lower = two_levels(x, scale, zero)
    return upper, lower + 8


def _eight_bits(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    codes = ((x - zero) / (scale / 16)).round().clamp(0, 255)
    return (codes // 16).to(torch.int8), (codes % 16 - 8).to(torch.int8)


LEVELS = (
    WrongVersion(
        "splits an 8-bit code into its two halves: the upper half is then rounded down, and the drafter, which reads "
        "it alone, is off by up to a whole step",
        _eight_bits,
    ),
    WrongVersion("returns the lower codes as 0 … 15; they go from -8 to 7", _unsigned),
    WrongVersion("returns the lower codes first", _swapped),
    WrongVersion("returns the codes as floats; they are int8", _floats),
    *wrong_versions(
        two_levels,
        {
            "rounds the upper code down instead of to the nearest": (
                "upper = steps.round()",
                "upper = steps.floor()",
            ),
            "truncates the lower code instead of rounding it": (
                "((steps - upper) * 16).round()",
                "((steps - upper) * 16).trunc()",
            ),
            "rounds ties of the upper code up; they go to the even number": (
                "upper = steps.round()",
                "upper = (steps + 0.5).floor()",
            ),
            "rounds ties of the lower code up; they go to the even number": (
                "((steps - upper) * 16).round()",
                "((steps - upper) * 16 + 0.5).floor()",
            ),
            "rounds the lower code down instead of to the nearest": (
                "((steps - upper) * 16).round()",
                "((steps - upper) * 16).floor()",
            ),
            "leaves the zero point out": ("(x - zero) / scale", "x / scale"),
            "adds the zero point instead of subtracting it": ("(x - zero)", "(x + zero)"),
            "multiplies by the scale instead of dividing": ("(x - zero) / scale", "(x - zero) * scale"),
            "does not divide by the scale": ("(x - zero) / scale", "x - zero"),
            "makes 15 steps of the lower level instead of 16": ("* 16)", "* 15)"),
            "makes 8 steps of the lower level instead of 16": ("* 16)", "* 8)"),
            "quantises the value again instead of what the upper code leaves over": ("(steps - upper)", "steps"),
            "has the sign of the rest wrong: it is the value minus what the upper code stands for": (
                "(steps - upper)",
                "(upper - steps)",
            ),
            "limits the upper code too late: the lower one counts what the limited upper code leaves over": (
                f"{_UPPER}\n    {_LOWER}",
                "upper = steps.round()\n    lower = ((steps - upper) * 16).round().clamp(-8, 7)\n"
                "    upper = upper.clamp(0, 15)",
            ),
            "does not keep the upper codes within 0 … 15": (".clamp(0, 15)", ""),
            "lets the upper codes go to 16, which four bits cannot hold": (".clamp(0, 15)", ".clamp(0, 16)"),
            "lets the lower codes go to 8, which four bits cannot hold": (".clamp(-8, 7)", ".clamp(-8, 8)"),
            "keeps the lower codes within -7 … 7: one code of the sixteen is never used": (
                ".clamp(-8, 7)",
                ".clamp(-7, 7)",
            ),
            "does not keep the lower codes within -8 … 7": (".clamp(-8, 7)", ""),
        },
    ),
)
