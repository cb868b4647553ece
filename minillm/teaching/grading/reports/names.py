"""Safe and unique file names for reports, from names that students chose."""

from __future__ import annotations

import hashlib
import re

MAX_NAME = 60


def file_name(name: str) -> str:
    """Letters, digits, dots and dashes of `name`, and the start of its hash where anything was lost, or where `name`
    ends like a hash."""
    safe = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._") or "unnamed"
    if safe == name and len(safe) <= MAX_NAME and not re.search(r"-[0-9a-f]{8}$", name):
        return safe
    return f"{safe[:MAX_NAME]}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
