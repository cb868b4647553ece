"""The quantisation schemes by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from minillm.errors import ConfigError, UnsupportedError
from minillm.quantization.awq import AWQ
from minillm.quantization.base import Scheme
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.squeezellm import SqueezeLLM
from minillm.quantization.w8a8 import W8A8

SCHEMES: dict[str, type[Scheme]] = {scheme.method: scheme for scheme in (Int8, W8A8, Int4, AWQ, SqueezeLLM)}


def make_scheme(method: Any, **options: Any) -> Scheme:
    """Create the scheme of that name with these options (see its class); other options have their defaults.

    Raises `UnsupportedError` for an unknown name, `ConfigError` for an unknown option or an invalid value.
    """
    scheme = SCHEMES.get(method) if isinstance(method, str) else None
    if scheme is None:
        raise UnsupportedError(f"quantization={method!r} is not available; there are: {', '.join(SCHEMES)}")
    known = [field.name for field in fields(scheme)]
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{name}={value!r}: scheme {method!r} has no such option; it has: {', '.join(known)}")
    return scheme(**options)
