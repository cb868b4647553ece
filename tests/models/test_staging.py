"""Weights pass through a piece of memory, and none is lost or overwritten on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm.errors import CheckpointError
from minillm.models import staging
from minillm.models.shards import Shards
from minillm.models.staging import Staging

FAR = torch.device("cuda")
TENSORS = {
    "matrix": torch.arange(7 * 5, dtype=torch.bfloat16).view(7, 5),
    "cube": torch.arange(4 * 3 * 2, dtype=torch.float32).view(4, 3, 2),
    "vector": torch.arange(23, dtype=torch.float16),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "empty": torch.zeros(0, 5),
}


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return Shards(tmp_path)


@pytest.mark.parametrize("piece_bytes", [1, 10, 24, 30, 1000])
@pytest.mark.parametrize("name", TENSORS)
def test_the_pieces_of_a_tensor_are_the_tensor(
    name: str, piece_bytes: int, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", piece_bytes)
    pieces = [(first, piece.clone()) for first, piece in Staging(shards).pieces(name)]
    right = TENSORS[name]
    row_bytes = right[:1].nbytes
    assert all(piece.nbytes <= max(piece_bytes, row_bytes) for _, piece in pieces)
    assert [first for first, _ in pieces] == [sum(len(p) for _, p in pieces[:i]) for i in range(len(pieces))]
    assert torch.equal(torch.cat([piece for _, piece in pieces] or [right]), right)
    target = torch.full_like(right, 3, dtype=torch.float32)
    Staging(shards).copy(name, target)
    assert torch.equal(target, right.float())


class LateDevice:
    """A GPU at its latest: a copy reads host memory only when someone waits for it."""

    def __init__(self) -> None:
        self.host: list[Tensor] = []
        self.copies: list[LateCopy] = []

    def memory(self, num_bytes: int, device: torch.device) -> Tensor:
        assert device == FAR
        self.host.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return self.host[-1]

    def send(self, host: Tensor, device: torch.device) -> tuple[Tensor, LateCopy]:
        self.copies.append(LateCopy(host))
        return self.copies[-1].target, self.copies[-1]


class LateCopy:
    def __init__(self, source: Tensor) -> None:
        self.source: Tensor | None = source
        self.target = torch.empty_like(source)

    def synchronize(self) -> None:
        if self.source is not None:
            self.target.copy_(self.source)
            self.source = None


def test_a_piece_is_not_filled_again_before_its_copy_is_done(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    monkeypatch.setattr(staging, "PIECE_BYTES", 20)
    monkeypatch.setattr(staging, "host_memory", device.memory)
    monkeypatch.setattr(staging, "send", device.send)
    stage = Staging(shards, FAR)
    arrived = {name: [piece for _, piece in stage.pieces(name)] for name in TENSORS if name != "empty"}
    under_way = [copy for copy in device.copies if copy.source is not None]
    assert len(under_way) == 2  # while one piece is copied, the other is filled
    for copy in under_way:
        copy.synchronize()
    for name, pieces in arrived.items():
        assert torch.equal(torch.cat(pieces), TENSORS[name]), name
    assert len(device.copies) > 8
    assert max(memory.nbytes for memory in device.host) <= 24  # a row of the cube
    assert len({memory.data_ptr() for memory in device.host if memory.nbytes}) <= 4  # two, and two grown once


def test_tensors_are_the_same_if_shape_dtype_and_numbers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.arange(12, dtype=torch.float32).view(4, 3)
    other = matrix.clone()
    other[3, 2] += 1
    tensors = {"a": matrix, "twin": matrix.clone(), "b": other, "c": matrix.view(3, 4).clone(), "d": matrix.half()}
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(staging, "PIECE_BYTES", 12)
    stage = Staging(Shards(tmp_path))
    assert stage.same("a", "twin")
    assert not any(stage.same("a", name) for name in "bcd")


def test_a_file_that_was_cut_off_since_it_was_opened_is_refused(shards: Shards, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    last = max(TENSORS, key=lambda name: shards._stored[name].start)
    with pytest.raises(CheckpointError, match=f"ends in the middle of {last}; fetch it again"):
        Staging(shards).copy(last, torch.empty(TENSORS[last].shape))
