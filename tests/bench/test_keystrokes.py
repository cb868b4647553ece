"""`minillm bench completion`: what is typed is what an editor would send, and every key is counted once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from minillm.bench import keystrokes
from minillm.bench.benchmarks import find
from minillm.errors import ConfigError
from tests.conftest import TinyPair


def test_a_key_is_the_text_before_the_cursor_and_after_its_line() -> None:
    keys = keystrokes.keys_of("def f():\n", "    return 1\nprint(f())\n" + "x" * 40)
    assert len(keys) == keystrokes.KEYS
    assert keys[0] == ("def f():\n    r", f"\nprint(f())\n{'x' * 40}"), "in a blank line JupyterLab does not ask"
    lengths = [len(prefix) for prefix, _ in keys]
    assert [after - before for before, after in pairwise(lengths)] == [1] * 7 + [2] + [1] * 9 + [2] + [1] * 5
    assert keys[8][0].endswith("return 1\np") and keys[8][1] == f"\n{'x' * 40}"


def test_the_typed_texts_are_long_enough_and_no_two_begin_alike(tiny: TinyPair) -> None:
    texts = keystrokes.typed_texts(str(tiny.target), 20)
    assert len({before for before, _ in texts}) == 20
    assert all(len(keystrokes.keys_of(*text)) == keystrokes.KEYS for text in texts)
    with pytest.raises(ConfigError, match="19 texts were asked for; take 20 to"):
        keystrokes.typed_texts(str(tiny.target), 19)


def test_every_key_is_counted(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("completion") is keystrokes.run
    for name, value in {"KEYS": 5, "BURST_KEYS": 2, "INTERVAL_S": 0.001, "FEWEST": 3}.items():
        monkeypatch.setattr(keystrokes, name, value)
    outcome = keystrokes.run(str(tiny.target), str(tiny.draft), prompts=3, new_tokens=4)
    rows = {row["system"]: row for row in outcome["rows"]}
    counts = {name: row["config"]["suggestions"] for name, row in rows.items()}
    assert counts == {keystrokes.FIRST: 3, keystrokes.NEXT: 3 * 2, keystrokes.BURST: 3}
    assert rows[keystrokes.FIRST]["config"]["cached_tokens"] == 0 < rows[keystrokes.NEXT]["config"]["cached_tokens"]
    for row in rows.values():
        assert 0 < row["config"]["engine_p50_ms"] < row["p50_ms"] <= row["config"]["p90_ms"]
        assert row["config"]["cpu_ms"] >= 0  # counted in steps of 10 ms
    assert keystrokes.table(outcome).row_count == 3
