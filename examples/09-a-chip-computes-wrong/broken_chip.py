"""Make device 2 compute wrong: XLA compiles every program for it with another learning rate.

`python broken_chip.py replay FILE ...` runs a command of snaprt on that machine.
"""

import sys
from typing import Any

import jax

_client: Any = type(jax.devices()[0].client)
_compile_and_load = _client.compile_and_load


def _edited(value: Any) -> Any:
    text = str(value)
    return text.replace("1.250000e-01", "1.250001e-01") if "1.250000e-01" in text else value


def _compile_for_broken_chip(self: Any, *args: Any, **named: Any) -> Any:
    for value in (*args, *named.values()):
        if "DeviceList" in type(value).__name__ and [device.id for device in value] == [2]:
            args = tuple(map(_edited, args))
            named = {name: _edited(value) for name, value in named.items()}
    return _compile_and_load(self, *args, **named)


_client.compile_and_load = _compile_for_broken_chip

if __name__ == "__main__":
    from snaprt.cli.main import main

    sys.exit(main(sys.argv[1:]))
