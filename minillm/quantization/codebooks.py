"""Codebooks for vectors of heads: commuting centres for keys, binary codes for values (CommVQ: Li et al. 2025).

Both add up stages; each stage codes what the ones before left.

**Commuting.** A pair of channels (x, y) of a centre is the matrix M = [[x, -y], [y, x]] times (1, 0): a scaled
rotation. RoPE at position p turns the pair by a rotation R(p), and rotations of a plane commute: R(p) M = M R(p). So

    q · R(p) M (1, 0)ᵀ  =  (Mᵀ q) · R(p) (1, 0)ᵀ  =  (Mᵀ q) · (cos pθ, sin pθ)

The query is multiplied with all centres once; a token then needs a look-up and its own angles.

**Binary codes.** b = sign(Uᵀ r) with an orthogonal U and a scale per direction, r ≈ U (s ⊙ b). U is found by turns:
signs and scales for the rotation, then the best rotation for those (Procrustes), as in iterative quantisation (Gong
and Lazebnik 2011). Neither half of a turn can raise the error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.quantization.vector_kmeans import nearest_vectors, vector_kmeans

GROUP = 8
"""Channels that share a code of one byte: the first halves of 4 pairs, then their second halves."""
NUM_CENTRES = 256
ROUNDS = 6


class Codebook:
    """The codes of one layer's keys or values. Points are `[KV heads, n, head_dim]`, codes `[KV heads, n, bytes]`."""

    def __init__(self, mean: Tensor, *parts: Tensor) -> None:
        self.mean, self.parts = mean, parts

    @classmethod
    def trained(cls, points: Tensor, stages: int, seed: int) -> Codebook:
        """Fit `stages` stages, each to what the ones before left."""
        raise NotImplementedError

    def encode(self, points: Tensor) -> Tensor:
        """Codes, uint8."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """Points, fp32."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in (self.mean, *self.parts))

    def to(self, device: torch.device) -> Codebook:
        """The same codebook on a device."""
        return type(self)(self.mean.to(device), *(part.to(device) for part in self.parts))


class CommutingCodebook(Codebook):
    """Residual vector quantisation of groups of channel pairs. `parts`: centres `[KV heads · groups, stages ·
    NUM_CENTRES, GROUP]`, float16. The mean is one more centre, of all tokens, so it commutes too."""

    @classmethod
    def trained(cls, points: Tensor, stages: int, seed: int) -> CommutingCodebook:
        """See `Codebook.trained`."""
        mean = points.mean(1, keepdim=True)
        left, centres = pair_groups(points - mean), []
        for stage in range(stages):
            count = min(NUM_CENTRES, left.shape[1])
            found, _ = vector_kmeans(left, count, ROUNDS, seed + stage)
            found = F.pad(found, (0, 0, 0, NUM_CENTRES - count)).half()
            centres.append(found)
            nearest = nearest_vectors(left, found.float())
            left = left - found.float().gather(1, nearest.unsqueeze(2).expand(-1, -1, GROUP))
        return cls(mean, torch.cat(centres, dim=1))

    @property
    def stages(self) -> list[Tensor]:
        """The centres of each stage: `[KV heads · groups, NUM_CENTRES, GROUP]`."""
        return list(self.parts[0].split(NUM_CENTRES, dim=1))

    def encode(self, points: Tensor) -> Tensor:
        """See `Codebook.encode`: per head the codes of all groups in the first stage, then in the second, …"""
        left, codes = pair_groups(points - self.mean), []
        for centres in self.stages:
            nearest = nearest_vectors(left, centres.to(left.dtype))
            left = left - centres.to(left.dtype).gather(1, nearest.unsqueeze(2).expand(-1, -1, GROUP))
            codes.append(nearest.unflatten(0, (len(points), -1)).transpose(1, 2))
        return torch.cat(codes, dim=2).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """See `Codebook.decode`."""
        of_stages = codes.long().chunk(len(self.stages), dim=2)
        total = torch.zeros((), device=codes.device)
        for centres, chosen in zip(self.stages, of_stages, strict=True):
            index = chosen.transpose(1, 2).flatten(0, 1).unsqueeze(2).expand(-1, -1, GROUP)
            total = total + centres.float().gather(1, index)
        return ungrouped(total, len(codes)) + self.mean


class BinaryCodebook(Codebook):
    """Signs in learned rotations. `parts`: U `[stages, KV heads, head_dim, head_dim]`, float16, and the scale of each
    direction `[stages, KV heads, 1, head_dim]`."""

    @classmethod
    def trained(cls, points: Tensor, stages: int, seed: int) -> BinaryCodebook:
        """See `Codebook.trained`."""
        mean = points.mean(1, keepdim=True)
        left, rotations, scales = points - mean, [], []
        for stage in range(stages):
            rotation = binary_rotation(left, ROUNDS, seed + stage).half()
            turned = left @ rotation.float()
            scale = turned.abs().mean(1, keepdim=True)
            left = left - (turned.sign() * scale) @ rotation.float().transpose(1, 2)
            rotations.append(rotation)
            scales.append(scale)
        return cls(mean, torch.stack(rotations), torch.stack(scales))

    def encode(self, points: Tensor) -> Tensor:
        """See `Codebook.encode`: 8 signs per byte, stage after stage."""
        left, codes = points - self.mean, []
        weights = 2 ** torch.arange(8, device=points.device)
        for rotation, scale in zip(*self.parts, strict=True):
            turned = left @ rotation.to(left.dtype)
            bits = turned >= 0
            left = left - torch.where(bits, scale, -scale).to(left.dtype) @ rotation.to(left.dtype).transpose(1, 2)
            codes.append((bits.unflatten(2, (-1, 8)) * weights).sum(-1))
        return torch.cat(codes, dim=2).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """See `Codebook.decode`."""
        total = self.mean
        shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
        of_stages = codes.chunk(len(self.parts[0]), dim=2)
        for chosen, rotation, scale in zip(of_stages, *self.parts, strict=True):
            bits = ((chosen.unsqueeze(3) >> shifts) & 1).flatten(2).bool()
            total = total + torch.where(bits, scale, -scale) @ rotation.float().transpose(1, 2)
        return total


def pair_groups(points: Tensor) -> Tensor:
    """Group the channels by pairs: `[heads, n, d]` → `[heads · d / GROUP, n, GROUP]`. RoPE turns channel c together
    with channel c + d / 2, and both belong to the same group."""
    halves = points.unflatten(2, (2, -1, GROUP // 2))  # [heads, n, half, group, pair]
    return halves.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)


def ungrouped(groups: Tensor, heads: int) -> Tensor:
    """The inverse of `pair_groups`."""
    halves = groups.unflatten(0, (heads, -1)).unflatten(3, (2, -1))
    return halves.permute(0, 2, 3, 1, 4).flatten(2)


def binary_rotation(points: Tensor, rounds: int, seed: int) -> Tensor:
    """An orthogonal U `[heads, d, d]` in which the signs of `points` (`[heads, n, d]`), scaled per direction, are close
    to the points. Begins with a random rotation."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(points.shape[2], points.shape[2], generator=generator)
    rotation = torch.linalg.qr(start).Q.to(points).expand(len(points), -1, -1)
    for _ in range(rounds):
        turned = points @ rotation
        coded = turned.sign() * turned.abs().mean(1, keepdim=True)
        left, _, right = torch.linalg.svd(points.transpose(1, 2) @ coded, full_matrices=False)
        rotation = left @ right
    return rotation
