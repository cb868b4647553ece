"""A result says which weights and which files it was measured with."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm.bench import provenance
from minillm.bench.harness import describe_run
from minillm.models.bundled import WEIGHTS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

MEASURED_BEFORE_FINGERPRINTS = {"failover"}
"""Results that do not record their weights. None may be added: measure again, and remove the name."""

MEASURED_WITH_EARLIER_WEIGHTS = {"decode_avx2", "gpu_first"}
"""Results of an earlier version of the bundled weights; the pages mark them. Only new weights may add names: measure
again, and remove the name."""


def weights(folder: Path, **contents: bytes) -> None:
    for name, data in contents.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "model.safetensors").write_bytes(data)


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    weights(tmp_path, one=b"1", two=b"2")
    before = provenance.weights_of(["one", "two"], tmp_path)
    weights(tmp_path, two=b"3")
    after = provenance.weights_of(["one", "two"], tmp_path)
    assert before["one"] == after["one"] and before["two"] != after["two"]


def test_only_bundled_weights_are_named(tmp_path: Path) -> None:
    """A folder of the user that has the name of a bundled model is not the bundled model."""
    weights(tmp_path, one=b"1")
    assert list(provenance.weights_of(["one", "/elsewhere/one", "0.4b", "", None], tmp_path)) == ["one"]
    config = {"model": "one", "draft": None, "drafters": ["one"]}
    assert list(provenance.weights_of_config(config, tmp_path)) == ["one"]


def test_a_run_records_its_weights_and_whether_files_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    about = describe_run("decode", {"model": "minicoder", "draft": "minicoder-draft"})
    assert set(about["weights"]) == {"minicoder", "minicoder-draft"}
    assert about["weights"]["minicoder"] == provenance.sha256_of_weights(WEIGHTS / "minicoder")
    monkeypatch.setattr(provenance, "_git", lambda *arguments: " M minillm/llm.py" if "status" in arguments else "")
    assert provenance.is_dirty() is True
    monkeypatch.setattr(provenance, "_git", lambda *arguments: "")
    assert provenance.is_dirty() is False and provenance.revision() is None
    monkeypatch.setattr(provenance, "_git", lambda *arguments: None)
    assert provenance.is_dirty() is None


def test_an_environment_inside_another_repository_has_no_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / ".venv" / "minillm"
    package.mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.setattr(provenance, "PACKAGE", package)
    assert provenance.revision() is None and provenance.is_dirty() is None
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "minillm")
    (tmp_path / "minillm").mkdir()
    assert provenance.revision() and provenance.is_dirty() is False


def test_a_long_run_names_the_revision_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    provenance.of_this_process.cache_clear()
    monkeypatch.setattr(provenance, "_git", lambda *arguments: "" if "status" in arguments else "first")
    provenance.of_this_process()
    monkeypatch.setattr(provenance, "_git", lambda *arguments: "second")
    about = describe_run("decode", {})
    provenance.of_this_process.cache_clear()
    assert (about["revision"], about["dirty"]) == ("first", False)


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.json")), ids=lambda file: file.stem)
def test_a_committed_result_is_of_the_bundled_weights(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    if file.stem in MEASURED_BEFORE_FINGERPRINTS:
        assert "weights" not in result, f"{file.stem} records its weights: remove it from the list"
    elif file.stem in MEASURED_WITH_EARLIER_WEIGHTS:
        now = provenance.weights_of(result["weights"])
        assert result["weights"] != now, f"{file.stem} is of the bundled weights: remove it from the list"
    else:
        assert result["weights"] == provenance.weights_of(result["weights"])
        assert result["weights"] == provenance.weights_of_config(result["config"])


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.json")), ids=lambda file: file.stem)
def test_a_committed_result_names_no_folder_of_a_machine(file: Path) -> None:
    texts = list(_strings(json.loads(file.read_text(encoding="utf-8"))))
    assert texts and not [text for text in texts if re.match(r"~?/|[A-Za-z]:\\", text)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _strings(list(pair))
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
