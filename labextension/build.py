"""Build the front end of code completion: `make labextension` runs this. It needs node and npm.

The result is committed, so that nobody else needs them. It is the same to the byte wherever it is built, with the
JupyterLab of `constraints.txt`. `source.sha256` in it is the hash of these sources; a test compares them.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
BUILT = SOURCE.parent / "minillm" / "complete" / "labextension" / "@minillm" / "complete"
SOURCES = ("index.js", "package-lock.json", "package.json", "webpack.config.js")
BUILDER = SOURCE / "node_modules" / "@jupyterlab" / "builder" / "lib" / "build-labextension.js"


def source_hash() -> str:
    """The hash of everything that the result is made from."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(name.encode() + b"\0" + (SOURCE / name).read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def main() -> None:
    """Install the builder, replace the result, record the hash."""
    import jupyterlab

    staging = Path(jupyterlab.__file__).parent / "staging"
    npm = shutil.which("npm") or "npm"  # npm.cmd on Windows
    subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=SOURCE, check=True)
    shutil.rmtree(BUILT, ignore_errors=True)
    subprocess.run(["node", BUILDER, "--core-path", staging, "."], cwd=SOURCE, check=True)
    (BUILT / "source.sha256").write_text(source_hash() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
