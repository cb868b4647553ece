"""`minillm train`: train models like the bundled ones, or continue where an earlier call stopped."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minillm import whole_file
from minillm.errors import TrainingError
from minillm.training.ablations import TOKENS as ABLATION_TOKENS
from minillm.training.ablations import VARIANTS, print_ablations
from minillm.training.checkpoint import pack_run, unpack_run
from minillm.training.drafter_stages import target_folder
from minillm.training.pair import SHARES_FILE, Pair
from minillm.training.recipes import (
    DISTILL_MINUTES,
    DRAFT_MINUTES,
    DRAFTER_SHARE,
    SHARES,
    TARGET_MINUTES,
    distill_recipe,
    draft_recipe,
    stable_recipe,
    unlikelihood_recipe,
)
from minillm.training.stages import STAGES, run_stages
from minillm.training.state_files import STATE, read_json
from minillm.training.trained_drafters import TRAINED

DEVICES = ("cpu", "cuda")
MAX_THREADS = 4096


def train(
    folder: Path = Path("runs"),
    stages: Iterable[str] | None = None,
    target_minutes: float | None = None,
    draft_minutes: float | None = None,
    distill_minutes: float | None = None,
    minutes: float | None = None,
    threads: int | None = None,
    device: str = "cpu",
    export_to: Path | None = None,
    begin_with: Path | None = None,
    target: str | None = None,
    drafter_minutes: Mapping[str, float | None] | None = None,
    ablations: Sequence[str] = (),
    ablation_tokens: float | None = None,
) -> None:
    """Train a target, its draft and their drafters, as the bundled models were.

    Runs `stages` (default: all, in the order of `STAGES`) with state in `folder`. After an interrupt, the same call
    without `begin_with` continues from the saved state. While `folder` contains a file `pause`, training waits.
    `minutes`: a total for all stages, instead of minutes for each; a run that goes on with another `device` keeps the
    shares of the first one. `threads`: number of PyTorch threads (None: PyTorch's choice). `export_to`: the folder of
    the exported models (None: `models` in `folder`). `begin_with`: a checkpoint from `pack_run` to start from.
    `target`: train the drafters for this checkpoint, a bundled name or a folder, instead of the pair's target.
    `drafter_minutes`: by method. `ablations`: instead of all this, train each of these drafters with one of its ideas
    left out, on `ablation_tokens` tokens (None: `ABLATION_TOKENS`), and print a table.

    Raises `TrainingError` if the input of a stage is missing or unfinished, a budget is no finite number above 0, two
    options exclude each other, nothing can be written to `export_to`, or this machine has no such `device`;
    `CheckpointError` if there is no such `target`.
    """
    _check_device(device)
    own = {"target": target_minutes, "draft": draft_minutes, "distill": distill_minutes, **(drafter_minutes or {})}
    own = {stage: value for stage, value in own.items() if value is not None}
    options = {f"{stage}_minutes": value for stage, value in own.items()}
    _check_budgets(minutes=minutes, ablation_tokens=ablation_tokens, **options)
    if ablation_tokens is not None and not ablations:
        raise TrainingError("--ablation-tokens is for --ablations; give both, or leave it out")
    if minutes is not None:
        _check_alone("minutes", **options)
    if ablations:
        _check_alone("ablations", stages=stages, minutes=minutes, export_to=export_to, **options)
    if target is not None:
        target_folder(target)
    export_to = Path(folder) / "models" if export_to is None else Path(export_to)
    _check_writable(export_to)
    if threads is not None:
        if threads < 1:
            raise TrainingError(f"--threads {threads} must be at least 1")
        torch.set_num_threads(threads)
    if begin_with is not None:
        unpack_run(Path(begin_with), Path(folder))
    shares_of = None
    if minutes is not None:
        shares_of = _shares_of(Path(folder), torch.device(device).type)
        own = {stage: minutes * share for stage, share in SHARES[shares_of].items()}
        own |= dict.fromkeys(TRAINED, minutes * DRAFTER_SHARE)
    pair = Pair(
        folder=Path(folder),
        target_recipe=stable_recipe(own.get("target", TARGET_MINUTES)),
        draft_recipe=draft_recipe(own.get("draft", DRAFT_MINUTES)),
        distill_recipe=distill_recipe(own.get("distill", DISTILL_MINUTES)),
        unlikelihood_recipe=unlikelihood_recipe(own.get("unlikelihood", math.inf)),
        device=device,
        shares_of=shares_of,
        export_to=export_to,
        drafters={method: drafter.recipe(own.get(method, drafter.minutes)) for method, drafter in TRAINED.items()},
        drafters_for=target,
    )
    if ablations:
        print_ablations(pair, ablations, tokens=ablation_tokens or ABLATION_TOKENS)
    else:
        run_stages(pair, STAGES if stages is None else stages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minillm train` to `parser`."""
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="folder for the training state (default: %(default)s)"
    )
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=None, help="default: all")
    own = {"target": TARGET_MINUTES, "draft": DRAFT_MINUTES, "distill": DISTILL_MINUTES}
    for stage, minutes in (own | {method: drafter.minutes for method, drafter in TRAINED.items()}).items():
        help_text = f"training time of the stage `{stage}` (default: {minutes:g})"
        parser.add_argument(
            f"--{stage.replace('_', '-')}-minutes", type=_positive, default=None, metavar="MIN", help=help_text
        )
    help_text = "training time of all stages together, instead of those above"
    parser.add_argument("--minutes", type=_positive, default=None, metavar="MIN", help=help_text)
    help_text = "train the drafters for this model, a bundled name or a folder (default: the target of --folder)"
    parser.add_argument("--target", default=None, metavar="MODEL", help=help_text)
    help_text = "instead of any stage: train drafters with one idea left out in turn, and print their acceptance"
    parser.add_argument("--ablations", nargs="+", choices=list(VARIANTS), default=[], metavar="METHOD", help=help_text)
    help_text = f"training tokens of each of these (default: {ABLATION_TOKENS:g})"
    parser.add_argument("--ablation-tokens", type=_positive, metavar="N", help=help_text)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--threads", type=_count, default=None, help="CPU threads (default: PyTorch's choice)")
    help_text = "start from a checkpoint of the stable run (default: from scratch, or from the state in --folder)"
    parser.add_argument("--begin-with", type=Path, default=None, metavar="FOLDER", help=help_text)
    help_text = "do not train: write the stable run in --folder (the stage `target` alone) as such a checkpoint"
    parser.add_argument("--pack", type=Path, default=None, metavar="FOLDER", help=help_text)
    help_text = "folder for the exported models (default: models in --folder)"
    parser.add_argument("--export-to", type=Path, default=None, metavar="FOLDER", help=help_text)


def run_from_args(args: argparse.Namespace) -> int:
    """Train with the options of `add_arguments`. Returns the exit code: 0, or 130 after an interrupt or SIGTERM.

    Either lets a training step end and saves the state. A second one does not wait: then the last saved state remains.
    """
    drafter_minutes = {method: getattr(args, f"{method}_minutes") for method in TRAINED}
    if args.pack is not None:
        _check_alone(
            "pack",
            stages=args.stages,
            ablations=args.ablations,
            begin_with=args.begin_with,
            target=args.target,
            export_to=args.export_to,
            minutes=args.minutes,
            target_minutes=args.target_minutes,
            draft_minutes=args.draft_minutes,
            distill_minutes=args.distill_minutes,
            **{f"{method}_minutes": value for method, value in drafter_minutes.items()},
        )
        pack_run(args.folder, args.pack)
        return 0
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        train(
            folder=args.folder,
            stages=args.stages,
            target_minutes=args.target_minutes,
            draft_minutes=args.draft_minutes,
            distill_minutes=args.distill_minutes,
            minutes=args.minutes,
            threads=args.threads,
            device=args.device,
            export_to=args.export_to,
            begin_with=args.begin_with,
            target=args.target,
            ablations=args.ablations,
            ablation_tokens=args.ablation_tokens,
            drafter_minutes=drafter_minutes,
        )
    except KeyboardInterrupt:
        is_unpacked = args.begin_with is not None and (args.folder / "target" / STATE).exists()
        command = "the same command without --begin-with" if is_unpacked else "the same command"
        tqdm.write(f"stopped; {command} continues from what is saved in {args.folder}")
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _shares_of(folder: Path, kind: str) -> str:
    """Whose shares of a total of minutes count: those of the `kind` of device, or of the one that the run in `folder`
    began on, so that its stages keep their budgets on another device."""
    file = folder / SHARES_FILE
    has_begun = any((folder / stage / STATE).exists() for stage in SHARES[kind])
    if not (has_begun and file.exists()):
        return kind
    recorded = read_json(file)
    if recorded not in list(SHARES):
        raise TrainingError(f"{file} has {recorded!r}; it must name the first device, {' or '.join(SHARES)}, as JSON")
    return recorded


def _check_alone(option: str, **others: Any) -> None:
    """Raise `TrainingError` if one of the options that `option` excludes is given."""
    for other, value in others.items():
        if value not in (None, [], ()):
            first, second = (f"--{name.replace('_', '-')}" for name in (option, other))
            raise TrainingError(f"{first} and {second} exclude each other; leave one of them out")


def _check_writable(folder: Path) -> None:
    """Raise `TrainingError` if no file can be created in the folder, or the folder itself cannot be."""
    try:
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        whole_file.check_writable(place)
    except OSError as problem:
        reason = problem.strerror or problem
        raise TrainingError(
            f"--export-to {folder}: nothing can be written there ({reason}); name another folder"
        ) from None


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = device
    if kind not in DEVICES:
        raise TrainingError(f"--device {device} is not supported; there are {' and '.join(DEVICES)}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TrainingError(f"--device {device} needs a GPU and a build of PyTorch for it; this machine has none")
    index = torch.device(device).index if kind == "cuda" else None
    if index is not None and index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise TrainingError(f"--device {device} is not there; the last GPU of this machine is cuda:{last}")


def _check_budgets(**budgets: float | None) -> None:
    for name, value in budgets.items():
        if value is not None and not 0 < value < math.inf:
            raise TrainingError(f"{name}={value} must be a finite number above 0")


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 1 to {MAX_THREADS:,}") from None
    if not 1 <= value <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{value:,} must be from 1 to {MAX_THREADS:,}")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number above 0")
    return value
