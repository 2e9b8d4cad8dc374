"""Prints, as JSON, what a Python has installed and its devices.

The Python of the program that a bundle is about runs it, which need not be the one that runs
snaprt: so it uses the standard library alone, and JAX if that is there.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from typing import Any


def _packages() -> dict[str, str]:
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a folder that an installation has left has none
            versions.setdefault(name, distribution.version)
    return dict(sorted(versions.items(), key=lambda row: row[0].lower()))


def _jax() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    return {
        "backend": jax.default_backend(),
        "platform_version": str(getattr(devices[0].client, "platform_version", "")),
        "processes": jax.process_count(),
        "devices": [
            {"id": device.id, "platform": device.platform, "kind": device.device_kind}
            for device in devices
        ],
        "config": {name: str(value) for name, value in sorted(jax.config.values.items())},
    }


if __name__ == "__main__":
    about: dict[str, Any] = {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "build": sys.version,
        "executable": sys.executable,
        "prefix": sys.prefix,
        "packages": _packages(),
    }
    try:
        about["jax"] = _jax()
    except Exception as error:
        about["jax"] = {"error": type(error).__name__ + ": " + str(error)}
    sys.stdout.write("\n" + json.dumps(about) + "\n")
