"""`bench beside`: every idea beside the plain way, on the bundled model."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from minillm.bench import beside


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    """The rows by technique, of smaller sizes than the command's."""
    found = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "CHUNK": 32,
            "LENGTHS": (96,),
            "BLOCKS": 4,
            "BATCH": 300,
            "TRIPLES": 50,
            "ROUNDS": 2,
        }.items():
            patch.setattr(beside, name, value)
        for row in beside.run()["rows"]:
            found[row["technique"]].append(row)
    return found


def test_every_idea_is_there(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert set(rows) == {"OOMB", "BLAST", "Monarch", "tiled contrastive loss", "BiMaCoSR", "MEC", "SparseTransX"}


def test_chunks_keep_less_and_give_the_same_gradients(rows: dict[str, list[dict[str, Any]]]) -> None:
    kept, error = rows["OOMB"]
    assert 0 < kept["value"] < kept["plain"]
    assert 0 <= error["value"] < 1e-4


def test_each_figure_stands_beside_its_own_plain_way(rows: dict[str, list[dict[str, Any]]]) -> None:
    """More parameters or better weights can only help, so an exchange of both columns is seen."""
    error, size = rows["BiMaCoSR"]
    assert error["value"] < error["plain"] and size["value"] > size["plain"]
    read, stored = rows["MEC"]
    assert read["value"] < read["plain"] and stored["value"] < stored["plain"]
    [kept, _] = rows["tiled contrastive loss"]
    assert kept["value"] < kept["plain"]
    assert rows["BLAST"][0]["plain"] == rows["Monarch"][0]["plain"] < 1


def test_a_sparse_product_is_compared_with_the_strongest_plain_way_too(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert [row["plain_way"] for row in rows["SparseTransX"]] == ["gather", "embedding_bag"]


def test_every_time_has_its_ratio_of_runs_in_turn(rows: dict[str, list[dict[str, Any]]]) -> None:
    every = [row for some in rows.values() for row in some]
    assert [row["unit"] == "ms" for row in every] == [row["speed"] is not None for row in every]
    assert all(row["speed_min"] <= row["speed"] <= row["speed_max"] for row in every if row["unit"] == "ms")


def test_the_table_has_a_line_for_each_figure(rows: dict[str, list[dict[str, Any]]]) -> None:
    every = [row for some in rows.values() for row in some]
    assert beside.table({"config": {"model": "minicoder"}, "rows": every}).row_count == len(every)
