"""The picture of which program of an attention kernel walks which blocks."""

from __future__ import annotations

import itertools

import pytest

from minillm.errors import ConfigError
from minillm.viz.tensors.attention_tiles import AttentionTiles
from tests.viz.pictures import description, found, parse, states, text_of

TWO = {"seq_lens": [6, 16], "block_tables": [[7, 2, 7, 7], [3, 0, 5, 1]], "block_size": 4}


def test_every_block_of_a_request_is_walked_once_per_kv_head_in_order_of_the_table():
    tiles = AttentionTiles(**TWO, num_kv_heads=2)
    svg = tiles.to_svg()
    assert [t.get("data-block") for t in found(svg, "tile")] == ["7", "2"] * 2 + ["3", "0", "5", "1"] * 2
    assert states(svg, "tile") == ["walked", "last"] * 2 + ["walked"] * 8
    assert [t.get("data-turn") for t in found(svg, "tile")] == ["1", "2"] * 2 + ["1", "2", "3", "4"] * 2
    assert (tiles.num_tiles, tiles.longest, tiles.masked) == (12, 4, 4)


def test_parts_share_the_tiles_and_shorten_the_longest_program():
    tiles = AttentionTiles(**TWO, parts=2)
    assert [list(p.blocks) for p in tiles.programs()] == [[0], [1], [0, 1], [2, 3]]
    svg = tiles.to_svg()
    assert [p.get("data-turns") for p in found(svg, "program")] == ["1", "1", "2", "2"]
    assert states(svg, "tile").count("other") == 1 + 1 + 2 + 2
    assert tiles.num_tiles == AttentionTiles(**TWO).num_tiles


def test_a_part_without_blocks_takes_no_turn():
    tiles = AttentionTiles([9], [[4, 1, 0]], 4, parts=4)
    assert [list(p.blocks) for p in tiles.programs()] == [[0], [1], [2], []]
    assert [p.get("data-turns") for p in found(tiles.to_svg(), "program")] == ["1", "1", "1", "0"]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_parts_are_those_of_the_lessons_kernel(parts: int):
    """`split_kernel` gives every part ceil(blocks / parts) blocks and cuts the last one at the length."""
    for length in range(1, 40):
        table = list(range(-(-length // 4)))
        walked = [list(p.blocks) for p in AttentionTiles([length], [table], 4, parts=parts).programs()]
        size = -(-len(table) // parts) * 4
        expected = [[key // 4 for key in range(p * size, min((p + 1) * size, length), 4)] for p in range(parts)]
        assert walked == expected
        assert [block for part in walked for block in part] == table


def test_last_block_is_filled_as_far_as_it_holds_tokens():
    tiles = found(AttentionTiles([6], [[7, 2]], 4).to_svg(), "tile")
    assert [t.get("data-filled") for t in tiles] == ["1", "0.5"]


def test_words_tell_programs_tiles_and_tables():
    words = description(AttentionTiles(**TWO, num_kv_heads=2).to_svg())
    assert words.startswith("4 programs load 12 tiles of 4 keys; 4 of the rows are masked. The longest")
    assert "Request B: 16 tokens in blocks 3, 0, 5, 1." in words
    assert repr(AttentionTiles(**TWO)) == "<AttentionTiles>"


def test_a_table_that_is_missing_or_too_short_is_refused():
    with pytest.raises(ConfigError, match="request B has 16 tokens, which need 4 blocks of 4; its table has 1"):
        AttentionTiles([4, 16], [[0], [1]], 4)
    for seq_lens, tables in (([0], [[]]), ([], [])):
        with pytest.raises(ConfigError, match="at least 1"):
            AttentionTiles(seq_lens, tables, 4)
    for tables in ([[7, 2]], [[7, 2], [3, 0, 5, 1], [4]]):
        with pytest.raises(ConfigError, match=f"{len(tables)} block tables for 2 requests"):
            AttentionTiles([6, 16], tables, 4)


@pytest.mark.parametrize("blocks", [40, 172, 256, 1024])
def test_many_blocks_are_drawn_small_with_the_names_that_have_room(blocks: int) -> None:
    svg = AttentionTiles([16 * blocks - 5], [range(blocks)], 16, parts=4).to_svg()
    assert len(found(svg, "tile")) == 4 * blocks
    boxes = [e for e in parse(svg).iter() if e.tag.endswith("rect")]
    assert all(float(box.get("width")) > 0 and float(box.get("x", 0)) + float(box.get("width")) <= 980 for box in boxes)
    for line in (108, 136):
        names = [e for e in parse(svg).iter() if e.tag.endswith("text") and e.get("y") == str(line)]
        keys = sorted((float(e.get("x")), len(text_of(e))) for e in names if e.get("text-anchor") == "middle")
        for (x, length), (following, _) in itertools.pairwise(keys):
            assert following - x >= 6 * length, "names do not lie on each other"
