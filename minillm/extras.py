"""The package's extras (`minillm-lessons[serve]`): what is installed without them says which one it needs."""

from __future__ import annotations

import importlib.util

from minillm.errors import UnsupportedError


def need(extra: str, *modules: str) -> None:
    """Raise `UnsupportedError` if one of these modules, which the extra installs, is not there. Imports none."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        are = "are" if len(missing) > 1 else "is"
        raise UnsupportedError(f'{", ".join(missing)} {are} not installed; run: pip install "minillm-lessons[{extra}]"')
