"""Lesson 17, planted mistakes: wrong versions of each exercise, with the sentence that names them."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l17_reference import (
    backward_in_chunks,
    blast_apply,
    centroid_step,
    one_bit_and_exact,
    tiled_lse,
)
from minillm.teaching.source import wrong_versions


def _whole(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
    return (x @ y.T / temperature).logsumexp(1)


def _rows_of_x(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
    return torch.stack([(row @ y.T / temperature).logsumexp(0) for row in x])


def _scaled_first(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
    return tiled_lse(x, y / temperature, 1.0, tile)


def _overflowing(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
    parts = [(x @ y[i : i + tile].T / temperature).exp().sum(1) for i in range(0, len(y), tile)]
    return torch.stack(parts).sum(0).log()


def _whole_tiles_only(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
    return tiled_lse(x, y[: max(len(y) // tile, 1) * tile], temperature, tile)


def _chunks(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
    return torch.stack([(x @ part.T / temperature).logsumexp(1) for part in y.chunk(tile)]).logsumexp(0)


_PART = "part = (x @ y[first : first + tile].T / temperature).logsumexp(1)"
_MERGE = "lse = torch.logaddexp(lse, part)"

LSE = (
    WrongVersion("makes the whole matrix of similarities; a tile of it is enough", _whole),
    WrongVersion("goes through the rows of x, and makes a row of all similarities; tile is never used", _rows_of_x),
    WrongVersion(
        "cuts y into as many tiles as a tile is to have rows: chunk(n) makes n parts, split(n) n rows", _chunks
    ),
    WrongVersion("makes a tensor as large as all of y; a tile of it is enough", _scaled_first),
    WrongVersion("sums exponentials without taking the maximum out: large similarities overflow", _overflowing),
    WrongVersion("leaves out the last rows of y if they do not fill a tile", _whole_tiles_only),
    *wrong_versions(
        tiled_lse,
        {
            "adds the tiles' log-sum-exps; their exponentials are to be added": (
                "lse = torch.full((len(x),), -torch.inf)\n"
                "    for first in range(0, len(y), tile):\n"
                "        part = (x @ y[first : first + tile].T / temperature).logsumexp(1)\n"
                "        lse = torch.logaddexp(lse, part)",
                "lse = torch.zeros(len(x))\n"
                "    for first in range(0, len(y), tile):\n"
                "        part = (x @ y[first : first + tile].T / temperature).logsumexp(1)\n"
                "        lse = lse + part",
            ),
            "begins with 0, which is the log of 1: every sum is 1 too large": (
                "torch.full((len(x),), -torch.inf)",
                "torch.zeros(len(x))",
            ),
            "begins with a finite number, and a sum can be smaller: the log of 0 is -∞": ("-torch.inf", "-10000.0"),
            "returns what the last tile has": (_MERGE, "lse = part"),
            "takes the largest of the tiles": (_MERGE, "lse = torch.maximum(lse, part)"),
            "takes a tile's largest similarity for its log-sum-exp": (".logsumexp(1)", ".amax(1)"),
            "adds similarities up; it is their exponentials that are added": (".logsumexp(1)", ".sum(1).log()"),
            "sums over the rows of x; each row of x has a sum of its own": (
                _PART,
                "part = (x @ y[first : first + tile].T / temperature).logsumexp(0).logsumexp(0).expand(len(x))",
            ),
            "leaves the temperature out": (" / temperature", ""),
            "multiplies by the temperature": (" / temperature", " * temperature"),
            "divides the log-sum-exp by the temperature; the similarities are to be divided": (
                "(x @ y[first : first + tile].T / temperature).logsumexp(1)",
                "(x @ y[first : first + tile].T).logsumexp(1) / temperature",
            ),
            "reads the first tile in every round": ("y[first : first + tile]", "y[:tile]"),
            "leaves the first tile out": ("range(0, len(y), tile)", "range(tile, len(y), tile)"),
            "overlaps the tiles: steps by one row": ("range(0, len(y), tile)", "range(0, len(y))"),
        },
    ),
)

_TARGET = "(loss + (rows * sent[start:end]).sum()).backward()"
_PAST = "past = kept[:start].detach().requires_grad_()"

BACKWARD = wrong_versions(
    backward_in_chunks,
    {
        "brings nothing of what later chunks sent to this chunk's rows: it is forgotten, not multiplied by the rows, "
        "or computed too late": (_TARGET, "loss.backward()"),
        "leaves past.grad at None: past does not require a gradient, backward() has not run yet, or it runs without "
        "the chunk's own loss": (
            _TARGET,
            "(rows * sent[start:end]).sum().backward()",
        ),
        "keeps what the last user sent only; all later chunks send something, and it adds up": (
            "sent[:start] += past.grad",
            "sent[:start] = past.grad",
        ),
        "sends back the gradient of the chunk's own loss only; its rows depend on the rows before them, too": (
            "(loss + (rows * sent[start:end]).sum()).backward()\n        sent[:start] += past.grad",
            "own = torch.autograd.grad(loss, past, retain_graph=True)[0]\n"
            "        (loss + (rows * sent[start:end]).sum()).backward()\n        sent[:start] += own",
        ),
        "subtracts what later chunks send": ("sent[:start] += past.grad", "sent[:start] -= past.grad"),
        "sends the gradient to the chunk just before only; earlier chunks were read, too": (
            "sent[:start] += past.grad",
            "width = end - start\n        sent[max(0, start - width) : start] += past.grad[-width:]",
        ),
        "takes the mean of the products; the derivative of their sum is the gradient": (
            "(rows * sent[start:end]).sum()",
            "(rows * sent[start:end]).mean()",
        ),
        "adds what was sent twice": (
            "(loss + (rows * sent[start:end]).sum())",
            "(loss + 2 * (rows * sent[start:end]).sum())",
        ),
        "leaves the first chunk out": ("in reversed(chunks)", "in reversed(chunks[1:])"),
        "leaves the last chunk out": ("in reversed(chunks)", "in reversed(chunks[:-1])"),
        "gives the chunk nothing from before: it computes another loss": (
            _PAST,
            "past = (0 * kept[:start]).detach().requires_grad_()",
        ),
        "keeps the graphs of all chunks until the end": (
            "for start, end in reversed(chunks):\n"
            "        past = kept[:start].detach().requires_grad_()\n"
            "        loss, rows = run(start, end, past)\n"
            "        (loss + (rows * sent[start:end]).sum()).backward()\n"
            "        sent[:start] += past.grad",
            "graphs = []\n"
            "    for start, end in reversed(chunks):\n"
            "        past = kept[:start].detach().requires_grad_()\n"
            "        loss, rows = run(start, end, past)\n"
            "        graphs.append(loss + (rows * sent[start:end]).sum())\n"
            "        graphs[-1].backward(retain_graph=True)\n"
            "        sent[:start] += past.grad",
        ),
    },
)


def _dense(x: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    return x @ torch.einsum("ipr,ijr,jqr->ipjq", u, s, v).flatten(2).flatten(0, 1).T


def _block_by_block(x: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    outputs = []
    for i in range(len(u)):
        products = [part @ (u[i] * s[i, j] @ v[j].T).T for j, part in enumerate(x.chunk(len(v), 1))]
        outputs.append(torch.stack(products).sum(0))
    return torch.cat(outputs, 1)


_LATENTS = 'latents = torch.einsum("njq,jqr->njr", x.unflatten(1, (len(v), -1)), v)'
_MIXED = 'mixed = torch.einsum("ijr,njr->nir", s, latents)'
_OUT = 'return torch.einsum("ipr,nir->nip", u, mixed).flatten(1)'

BLAST = (
    WrongVersion("makes the dense matrix, and multiplies by it", _dense),
    WrongVersion("makes the dense matrix block by block, or one row of blocks at a time", _block_by_block),
    *wrong_versions(
        blast_apply,
        {
            "leaves s out: then it is a plain low rank": (
                _MIXED,
                'mixed = torch.einsum("ijr,njr->nir", s * 0 + 1, latents)',
            ),
            "takes s_ji for s_ij": (_MIXED, 'mixed = torch.einsum("jir,njr->nir", s, latents)'),
            "uses the diagonal blocks only: y_i gets x_i and no other": (
                _MIXED,
                'mixed = torch.einsum("iir,nir->nir", s, latents)',
            ),
            "uses the s of the first row of blocks for all": (
                _MIXED,
                'mixed = torch.einsum("jr,njr->nr", s[0], latents)[:, None].expand(len(x), len(u), -1)',
            ),
            "averages over the blocks of a row; their products are added": (
                _MIXED,
                'mixed = torch.einsum("ijr,njr->nir", s, latents) / len(v)',
            ),
            "applies V of the first block to all blocks": (
                _LATENTS,
                'latents = torch.einsum("njq,qr->njr", x.unflatten(1, (len(v), -1)), v[0])',
            ),
            "applies U of the first block to all blocks": (
                _OUT,
                'return torch.einsum("pr,nir->nip", u[0], mixed).flatten(1)',
            ),
            "takes every len(v)-th input for a block; the inputs of a block stand side by side": (
                "x.unflatten(1, (len(v), -1))",
                "x.unflatten(1, (-1, len(v))).transpose(1, 2)",
            ),
            "interleaves the outputs of the blocks; those of a block stand side by side": (
                ".flatten(1)",
                ".transpose(1, 2).flatten(1)",
            ),
            "adds s instead of multiplying": (
                _MIXED,
                "mixed = (s + latents[:, None]).sum(2)",
            ),
            "returns the blocks as a dimension of their own": (".flatten(1)", ""),
        },
    ),
)


def _row_by_row(weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    each = count // len(weight)
    chosen = torch.zeros_like(weight, dtype=torch.bool)
    chosen.scatter_(1, weight.abs().topk(each, dim=1).indices, True)
    scales = weight.abs().masked_fill(chosen, 0).sum(1) / (~chosen).sum(1).clamp_min(1)
    return scales, torch.where(chosen, weight - scales[:, None] * weight.sign(), 0.0)


_CHOOSE = "weight.abs().flatten().topk(count).indices"
_SCALES = "scales = weight.abs().masked_fill(chosen, 0).sum(1) / (~chosen).sum(1).clamp_min(1)"
_EXACT = "torch.where(chosen, weight - scales[:, None] * weight.sign(), 0.0)"

ONE_BIT = (
    WrongVersion("chooses as many exact weights in every row; the largest of the whole matrix are exact", _row_by_row),
    *wrong_versions(
        one_bit_and_exact,
        {
            "keeps the exact weights themselves; their sign is there already, so what it adds must come off": (
                _EXACT,
                "torch.where(chosen, weight, 0.0)",
            ),
            "corrects every weight: then nothing is compressed": (_EXACT, "weight - scales[:, None] * weight.sign()"),
            "returns what is wrong at the other weights, not at the exact ones": (
                _EXACT,
                "torch.where(chosen, 0.0, weight - scales[:, None] * weight.sign())",
            ),
            "takes the largest positive weights; the largest in size are meant": (
                _CHOOSE,
                "weight.flatten().topk(count).indices",
            ),
            "makes every weight exact that is as large as the last one: of equal weights, too many": (
                f"chosen.view(-1)[{_CHOOSE}] = True",
                "if count:\n        chosen = weight.abs() >= weight.abs().flatten().topk(count).values[-1]",
            ),
            "keeps the smallest weights exact": (_CHOOSE, "weight.abs().flatten().topk(count, largest=False).indices"),
            "counts the exact weights in the mean": (_SCALES, "scales = weight.abs().mean(1)"),
            "divides by the number of all weights; the exact ones are not in the sum": (
                "(~chosen).sum(1).clamp_min(1)",
                "weight.shape[1]",
            ),
            "takes the mean of the weights, in which signs cancel; |W| is meant": (
                "weight.abs().masked_fill(chosen, 0).sum(1)",
                "weight.masked_fill(chosen, 0).sum(1).abs()",
            ),
            "takes the largest |W| for the scale": (
                _SCALES,
                "scales = weight.abs().masked_fill(chosen, 0).amax(1)",
            ),
            "takes the root of the mean square for the scale; for signs the mean of |W| is nearest": (
                _SCALES,
                "scales = (weight.masked_fill(chosen, 0).square().sum(1) / (~chosen).sum(1).clamp_min(1)).sqrt()",
            ),
            "uses one scale for the whole matrix; each row has its own": (
                _SCALES,
                "scales = weight.abs().masked_fill(chosen, 0).sum() / (~chosen).sum().clamp_min(1)\n"
                "    scales = scales.expand(len(weight))",
            ),
            "divides 0 by 0 in a row of exact weights": (".clamp_min(1)", ""),
            "adds the sign's part to the exact weights; it must come off": (
                _EXACT,
                "torch.where(chosen, weight + scales[:, None] * weight.sign(), 0.0)",
            ),
            "subtracts the scale whatever the sign is": (_EXACT, "torch.where(chosen, weight - scales[:, None], 0.0)"),
        },
    ),
)

_MEAN = "(points[own] * weights[own, None]).sum(0) / weights[own].sum()"

CENTROIDS = wrong_versions(
    centroid_step,
    {
        "counts every point alike: the weights are left out": (_MEAN, "points[own].mean(0)"),
        "divides by the number of points; by the sum of their weights is right": (
            _MEAN,
            "(points[own] * weights[own, None]).sum(0) / own.sum()",
        ),
        "does not divide: a sum is no mean": (_MEAN, "(points[own] * weights[own, None]).sum(0)"),
        "divides by the weights of all points, not by those of its own": (
            _MEAN,
            "(points[own] * weights[own, None]).sum(0) / weights.sum()",
        ),
        "divides by at least 1; weights may sum to less": (
            _MEAN,
            "(points[own] * weights[own, None]).sum(0) / weights[own].sum().clamp(min=1)",
        ),
        "moves to the heaviest point": (_MEAN, "points[own][weights[own].argmax()]"),
        "moves a centroid without points to the origin; it stays where it is": (
            "moved = centroids.clone()",
            "moved = torch.zeros_like(centroids)",
        ),
        "moves every centroid to the mean of all points": (
            "own = nearest == index",
            "own = nearest >= 0",
        ),
        "takes the farthest centroid for the nearest": (".argmin(1)", ".argmax(1)"),
        "takes the centroid with the largest product for the nearest": (
            "torch.cdist(points, centroids).argmin(1)",
            "(points @ centroids.T).argmax(1)",
        ),
        "looks for the nearest point of each centroid, not for the nearest centroid of each point": (
            "nearest = torch.cdist(points, centroids).argmin(1)",
            "of_centroid = torch.cdist(points, centroids).argmin(0)\n"
            "    nearest = torch.full((len(points),), -1)\n"
            "    nearest[of_centroid] = torch.arange(len(centroids))\n"
            "    nearest[nearest < 0] = nearest[nearest >= 0][0]",
        ),
        "measures only the first channel": (
            "torch.cdist(points, centroids)",
            "(points[:, :1] - centroids[:, 0])",
        ),
        "moves halfway to the mean": (_MEAN, f"(centroids[index] + {_MEAN}) / 2"),
        "squares the weights": (
            _MEAN,
            "(points[own] * weights[own, None] ** 2).sum(0) / (weights[own] ** 2).sum()",
        ),
    },
)
