"""How much memory is left: to the machine, and to control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from snaprt.host.memory import available_bytes

MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n"}
VERSION_2 = MACHINE | {"proc/self/cgroup": "0::/job_1/step_2\n"}
VERSION_1 = MACHINE | {"proc/self/cgroup": "9:pids:/\n4:cpu,memory:/job_1\n0::/\n"}
GROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (MACHINE, 8_192_000),
        ({}, 0),
        (VERSION_2 | {f"{GROUP}/memory.max": "max", f"{GROUP}/memory.current": "5"}, 8_192_000),
        (VERSION_2 | {f"{GROUP}/memory.max": "9000", f"{GROUP}/memory.current": "5000"}, 4_000),
        (
            VERSION_2
            | {
                f"{GROUP}/job_1/memory.max": "9000",
                f"{GROUP}/job_1/memory.current": "8000",
                f"{GROUP}/job_1/memory.stat": "anon 7500\ninactive_file 300\nactive_file 200\n",
                f"{GROUP}/job_1/step_2/memory.max": "max",
                f"{GROUP}/job_1/step_2/memory.current": "10",
            },
            1_300,
        ),
        (
            VERSION_1
            | {
                f"{GROUP}/memory/job_1/memory.limit_in_bytes": "9000",
                f"{GROUP}/memory/job_1/memory.usage_in_bytes": "9100",
            },
            0,
        ),
        (
            VERSION_1  # as in a container, which sees its own group at the mount
            | {
                f"{GROUP}/memory/memory.limit_in_bytes": "9000",
                f"{GROUP}/memory/memory.usage_in_bytes": "1000",
            },
            8_000,
        ),
    ],
    ids=["machine", "unknown", "no limit", "namespace", "parent", "version 1", "container"],
)
def test_what_is_left(tmp_path: Path, files: dict[str, str], left: int) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_bytes(tmp_path) == left


def test_this_machine_has_some() -> None:
    assert available_bytes() > 1 << 20
