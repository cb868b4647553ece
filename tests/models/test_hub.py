"""From a name to a folder: bundled, local, hub, or a clear no."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from minillm.errors import CheckpointError
from minillm.models import bundled
from minillm.models.hub import resolve


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "tokenizer.json").write_text("{}")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "small-heads").mkdir()  # a trained drafter, which is no model
    (tmp_path / "small-heads" / "config.json").write_text("{}")
    monkeypatch.setattr(bundled, "WEIGHTS", tmp_path)
    return tmp_path


def test_bundled_models_are_the_folders_on_disk(weights: Path) -> None:
    assert bundled.names() == ["large", "small"]
    assert bundled.path("small") == resolve("small") == weights / "small"


def test_an_unknown_bundled_name_lists_the_known_ones(weights: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'smal'; there are: large, small"):
        bundled.path("smal")


def test_a_local_folder_is_taken_as_it_is(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(weights)
    assert resolve("unfinished") == Path("unfinished")
    assert resolve(str(weights / "large")) == weights / "large"


@pytest.mark.parametrize("name", ["smal", "/no/such/folder", "./missing/folder", "a/b/c", "own er/name"])
def test_a_name_that_is_nothing_says_what_it_could_be(weights: Path, name: str) -> None:
    wanted = r"not a bundled model \(large, small\), not a local folder, and not a hub id"
    with pytest.raises(CheckpointError, match=wanted):
        resolve(name)


@pytest.mark.parametrize("name", [5, 1.5, True, b"small", ("small",), None], ids=repr)
def test_a_name_that_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(CheckpointError, match="must be a name or a path, as text"):
        resolve(name)  # type: ignore[arg-type]


def test_an_empty_name_is_not_the_current_folder(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(weights / "large")
    assert resolve(".") == Path()
    with pytest.raises(CheckpointError, match="the name of the model is empty; give a bundled name, a folder or"):
        resolve("")


def test_a_file_is_not_a_folder(weights: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        resolve(str(weights / "small" / "config.json"))


def test_offline_the_way_out_is_named(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(weights))
    with pytest.raises(CheckpointError, match=r"cannot load owner/model: .* `hf download owner/model --local-dir F"):
        resolve("owner/model")


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EACCES, os.strerror(errno.EACCES)),
        RuntimeError(f"Data processing error: IO Error: No space left on device (os error {errno.ENOSPC})"),
        OSError(f"I/O error: Permission denied (os error {errno.EACCES})"),
    ],
    ids=str,
)
def test_a_disk_that_takes_no_files_is_not_called_a_hub_that_cannot_be_reached(
    weights: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    import huggingface_hub

    def download(repo_id: str, **patterns: Any) -> str:
        raise problem

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"its files cannot be stored \(.*; free space, or set HF_HOME"):
        resolve("owner/model")


def test_another_error_of_a_download_is_shown(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(repo_id: str, **patterns: Any) -> str:
        raise RuntimeError("the server broke off (os error 104)\nand so on")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        CheckpointError, match=r"cannot be downloaded \(RuntimeError: the server broke off .* 104\)\); run"
    ):
        resolve("owner/model")


def test_a_name_that_the_hub_does_not_allow_is_called_so(weights: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot load owner/a--b: this is no valid name on the hub"):
        resolve("owner/a--b")


def test_only_what_is_read_is_fetched(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pickle, no second copy of the weights in another format, no code."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    offered = [
        "README.md",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "consolidated.safetensors",
        "generation_config.json",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "modeling_own.py",
        "onnx/config.json",
        "onnx/model.safetensors",
        "original/consolidated.00.pth",
        "original/tokenizer.model",
        "pytorch_model.bin",
        "tokenizer.json",
        "tokenizer.model",
    ]
    fetched: list[str] = []

    def download(repo_id: str, **patterns: Any) -> str:
        fetched.extend(filter_repo_objects(offered, **patterns))
        return str(weights)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/model") == weights
    assert set(offered) - set(fetched) == {
        "README.md",
        "consolidated.safetensors",
        "modeling_own.py",
        "onnx/config.json",
        "onnx/model.safetensors",
        "original/consolidated.00.pth",
        "original/tokenizer.model",
        "pytorch_model.bin",
    }


def test_a_path_that_does_not_exist_is_refused_as_its_text_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model .*not a local folder"):
        resolve(tmp_path / "no" / "such")
