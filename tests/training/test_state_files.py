"""What is written when the disk is full: an error that names the file, and the old file as it was."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minillm.errors import TrainingError
from minillm.speculative.trained_drafter import drafter_config, save_drafter
from minillm.training.data import Windows
from minillm.training.export import export
from minillm.training.pretrain import Recipe, Trainer, new_model
from minillm.training.state_files import replacing, replacing_files, write_array, write_json, write_state
from minillm.training.trained_drafters import new_heads

from .conftest import config

resource = pytest.importorskip("resource", reason="Windows has no limit of a file's size")


@pytest.fixture
def full_disk():
    """No file can grow beyond 4 KB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_safetensors(file):
    with replacing(file) as fresh:
        save_file({"x": torch.zeros(10_000)}, fresh)


@pytest.mark.parametrize(
    "write",
    [
        lambda file: write_state(file, {"model": torch.zeros(10_000)}),
        lambda file: write_array(file, np.zeros(10_000)),
        lambda file: write_json(file, "x" * 10_000),
        write_safetensors,
    ],
    ids=["state", "array", "json", "safetensors"],
)
def test_a_file_without_space_is_named_and_the_old_one_stays(tmp_path, full_disk, write):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(TrainingError, match=r"/file cannot be written \(.+\); make free space there, or name another"):
        write(file)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes",
    ],
    ids=["GPU", "GPU memory", "memory"],
)
def test_an_error_of_the_gpu_or_the_memory_is_not_taken_for_a_full_disk(tmp_path, monkeypatch, text):
    """`torch.save` copies tensors from the GPU."""

    def fails(*_):
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(RuntimeError, match=text[:20]):
        write_state(tmp_path / "file", {})
    assert not list(tmp_path.iterdir())


def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    """Some file systems notice only then that they are full."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "file"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match=r"/file cannot be written \(.*No space left on device\)"):
        write_json(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_a_folder_without_space_is_named_and_its_files_stay(tmp_path, corpus, full_disk):
    model = new_model(config())

    def drafter():
        heads = new_heads(model)
        with replacing_files(tmp_path / "out") as fresh:
            save_drafter(fresh, drafter_config("heads", "target", "0", 300, heads.shape), heads)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    for write in (lambda: export(model, corpus / "tokenizer.json", tmp_path / "out"), drafter):
        with pytest.raises(TrainingError, match=r"/out cannot be written \(.+\); make free space there"):
            write()
        assert [file.name for file in tmp_path.iterdir()] == ["out"]
        assert [file.read_text() for file in (tmp_path / "out").iterdir()] == ["old"]


@pytest.mark.parametrize("full", ["state.pt", "log.jsonl"])
def test_a_run_without_space_says_which_file_it_could_not_write(tmp_path, corpus, full_disk, full):
    if full == "log.jsonl":
        (tmp_path / full).write_text("\n" * 4095)
    recipe = Recipe(tokens=512, tokens_per_step=256, lengths=(64,))
    trainer = Trainer(new_model(config()), Windows(corpus, "held_out"), recipe, tmp_path)
    with pytest.raises(TrainingError, match=f"/{full} cannot be written"):
        trainer.run()
