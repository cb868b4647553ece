"""Check what `make dist` has built: metadata, contents, size, and a run in a fresh environment.

    python release/check_dist.py dist                       everything
    python release/check_dist.py dist --no-run              without the environment, which takes minutes and gigabytes
    python release/check_dist.py dist --borrow .venv        the environment takes all other packages from .venv

Every failed check is printed; the exit code is their number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WHEEL, MAX_SDIST = 60_000_000, 70_000_000
"""Bytes. The index refuses files above 100 MB; the bundled models are most of ours."""
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
LESSON = "02_kv_cache"
SECONDS = 900
UNWANTED = ("__pycache__", ".ipynb_checkpoints", ".git", ".env")
RUN_NOTEBOOK = "from nbclient.cli import main; main()"


def main() -> int:
    """Run the checks; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-run", action="store_true", help="do not install and run")
    parser.add_argument("--borrow", type=Path, metavar="VENV", help="take dependencies from this environment")
    parser.add_argument("--pip", action="append", default=[], metavar="OPTION", help="pass OPTION to pip")
    args = parser.parse_args()
    [wheel], [sdist] = args.folder.glob("*.whl"), args.folder.glob("*.tar.gz")
    problems = [*wheel_problems(wheel), *sdist_problems(sdist), *metadata_problems([wheel, sdist])]
    if not args.no_run:
        problems += run_problems(wheel, args.borrow, args.pip)
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; {sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB")
    print(f"{len(problems)} problems" if problems else "all checks passed")
    return len(problems)


def wheel_problems(wheel: Path) -> list[str]:
    """What is missing in the wheel, or must not be there."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        lessons = {name: archive.read(name) for name in names if name.startswith("minillm/_lessons/")}
    found = [f"the wheel has {wheel.stat().st_size:,} bytes, more than {MAX_WHEEL:,}"] * (
        wheel.stat().st_size > MAX_WHEEL
    )
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "minillm").rglob("*.py")}
    wanted |= {f"minillm/_lessons/{path.name}" for path in (ROOT / "lessons").iterdir() if path.is_file()}
    wanted |= {f"minillm/_solutions/{path.name}" for path in (ROOT / "solutions").glob("*.ipynb")}
    models = ROOT / "minillm" / "models" / "weights"
    wanted |= {str(path.relative_to(ROOT)) for path in models.rglob("*") if path.is_file()}
    found += [f"the wheel lacks {name}" for name in sorted(wanted - names)]
    found += [f"the wheel has {name}" for name in sorted(names) if _unwanted(name)]
    return found + [f"{name} gives a solution away: {line!r}" for name, line in leaks(lessons, solution_lines(ROOT))]


def sdist_problems(sdist: Path) -> list[str]:
    """What is missing in the source distribution, or must not be there."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    found = [f"the sdist has {sdist.stat().st_size:,} bytes, more than {MAX_SDIST:,}"] * (
        sdist.stat().st_size > MAX_SDIST
    )
    wanted = ["pyproject.toml", "README.md", "LICENSE", "Makefile", f"solutions/{LESSON}.py", f"lessons/{LESSON}.ipynb"]
    found += [f"the sdist lacks {name}" for name in wanted if name not in names]
    return found + [
        f"the sdist has {name}" for name in sorted(names) if _unwanted(name) or name.startswith((".venv", "runs/"))
    ]


def metadata_problems(files: Iterable[Path]) -> list[str]:
    """What `twine check --strict` says against the files."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [f"twine check: {(done.stdout + done.stderr).strip()}"]


def run_problems(wheel: Path, borrow: Path | None, pip: list[str]) -> list[str]:
    """Install the wheel in an empty environment; run the demo, copy the lessons out, run one of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        target, options = f"{wheel.resolve()}[lab]", pip
        if borrow is not None:
            target, options = str(wheel.resolve()), [*pip, "--no-deps"]
            _borrow(python, borrow)
        copies = folder / "mine"
        minillm = [str(python), "-m", "minillm.cli"]
        steps = [
            ("pip", [*_pip(python, options), target]),
            (
                "where",
                [str(python), "-c", f"import minillm; assert {str(folder)!r} in minillm.__file__, minillm.__file__"],
            ),
            ("minillm demo", [*minillm, "demo"]),
            ("minillm lab", [*minillm, "lab", "--no-open", "--dir", str(copies)]),
            ("a lesson", [str(python), "-c", RUN_NOTEBOOK, str(copies / f"{LESSON}.ipynb")]),
        ]
        for what, command in steps:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode != 0:
                return [f"{what}: {(done.stdout + done.stderr)[-2000:]}"]
            print(f"{what}: runs")
        copied = {str(path.name): path.read_bytes() for path in copies.rglob("*") if path.is_file()}
        found = [f"`minillm lab` copied {name}" for name in copied if "solution" in name]
        return found + [
            f"`minillm lab` gives away {line!r} in {name}" for name, line in leaks(copied, solution_lines(ROOT))
        ]


def solution_lines(root: Path) -> set[str]:
    """The lines of all solutions that say something: longer than a word, and not in what learners are given."""
    regions, given = set(), set()
    for source in (root / "solutions").glob("[0-9][0-9]_*.py"):
        inside = False
        for line in source.read_text(encoding="utf-8").splitlines():
            inside = (inside or line.strip() == BEGIN) and line.strip() != END
            (regions if inside and line.strip() != BEGIN else given).add(line.strip())
    return {line for line in regions - given if len(line) > 24}


def leaks(files: dict[str, bytes], lines: set[str]) -> Iterator[tuple[str, str]]:
    """(file, line) for each line of a solution in a code cell of a notebook."""
    for name, data in sorted(files.items()):
        if not name.endswith(".ipynb"):
            continue
        for cell in json.loads(data)["cells"]:
            source = "".join(cell["source"]) if cell["cell_type"] == "code" else ""
            yield from ((name, line.strip()) for line in source.splitlines() if line.strip() in lines)
            if BEGIN in source:
                yield name, BEGIN


def _unwanted(name: str) -> bool:
    *folders, file = name.split("/")
    inside = [folder for folder in folders if folder in UNWANTED or folder.endswith("_cache")]
    return bool(inside) or file.startswith(".env") or file.endswith((".pyc", ".part", ".new"))


def _pip(python: Path, options: list[str]) -> list[str]:
    return [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]


def _borrow(python: Path, other: Path) -> None:
    """Put the packages of another environment behind those of `python`, without its own editable installs."""
    [theirs], [ours] = other.glob("lib/python*/site-packages"), python.parents[1].glob("lib/python*/site-packages")
    (ours / "borrowed.pth").write_text(f"{theirs.resolve()}\n")


if __name__ == "__main__":
    sys.exit(main())
