"""The prompts of every kind of text: they end where the model is asked to go on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from minillm.training.slice_prompts import SLICES, File, write_slice_prompts

FUNCTION = '''\
def {name}(values, count):
    """Return {name} of values.

    The rest is zero.
    """
    total = 0
    for value in values:
        total += value * count
    return total / count


def plain_{name}(values):
    first = values[0]
    last = values[-1]
    values.sort()
    values.append(first)
    return last, values


'''
IMPORTS = "".join(f"import module_{i}\n" for i in range(8)) + "\n\n"


@pytest.fixture
def prompts(tmp_path: Path) -> dict[str, list[str]]:
    files = [
        {"name": "a.py", "text": IMPORTS + "".join(FUNCTION.format(name=f"name_{i}") for i in range(8))},
        {"name": "b.py", "text": "".join(FUNCTION.format(name=f"other_{i}") for i in range(60))},
        {"name": "c.py", "text": FUNCTION.format(name="unwanted")},
    ]
    with gzip.open(tmp_path / "held_out.jsonl.gz", "wt") as out:
        out.write("\n".join(map(json.dumps, files)))
    write_slice_prompts(tmp_path, tmp_path / "out.jsonl", each=3, only=["a.py", "b.py"])
    found: dict[str, list[str]] = {name: [] for name in SLICES}
    for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()):
        assert row["source"] in ("a.py", "b.py")
        found[row["slice"]].append(row["prompt"])
    return found


def test_each_slice_ends_where_its_text_is_to_be_written(prompts: dict[str, list[str]]) -> None:
    assert all(p.endswith("(values):\n") for p in prompts["functions"]) and len(prompts["functions"]) == 3
    assert all(p.endswith('zero.\n    """\n') for p in prompts["docstrings"]) and len(prompts["docstrings"]) == 3
    assert all(p.endswith("():\n") and "def test_" in p.splitlines()[-1] for p in prompts["tests"])
    assert [p.splitlines()[-1] for p in prompts["imports"]] == ["import module_3"]


def test_a_form_feed_is_no_line_end() -> None:
    """As for `ast`, which numbers the lines."""
    file = File("a.py", IMPORTS + "\f\n\f\n" + FUNCTION.format(name="one"))
    assert [prompt.splitlines()[-1] for prompt in SLICES["functions"](file)] == ["def plain_one(values):"]
    assert all(prompt.startswith("def plain_one(values):\n") for prompt in SLICES["tests"](file) if "plain" in prompt)


def test_an_edit_begins_a_copy_of_the_function_with_one_name_changed(prompts: dict[str, list[str]]) -> None:
    for prompt in prompts["edits"]:
        source, _, begun = prompt.partition("\n\n\ndef ")
        assert source.startswith("def ") and "new_values" in begun and "new_values" not in source


def test_long_files_are_long_and_new_code_repeats_little(prompts: dict[str, list[str]]) -> None:
    [long_file] = prompts["long files"]
    assert 12_000 < len(long_file) <= 14_000
    assert prompts["new code"] and all(len(p) <= 1600 for p in prompts["new code"])
