"""The steps of the device check: a table of commands, and what is expected of each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = Mapping[str, float]


class UnexpectedError(Exception):
    """A command ended well, but what it printed or wrote is not what was expected."""


@dataclass(frozen=True)
class Ended:
    """A command that ended.

    Attributes:
        status: Its exit status.
        stdout: What it printed.
        stderr: Its errors and its log.
        folder: Where it ran.
        platform: The platform that is checked.
    """

    status: int
    stdout: str
    stderr: str
    folder: Path
    platform: str

    @property
    def json(self) -> Any:
        """Return the JSON object that it printed."""
        return json.loads(self.stdout)


@dataclass(frozen=True)
class Step:
    """One row of the check.

    Attributes:
        name: What it is, in a few words.
        command: For bash, in a folder that all steps share. ``{platform}``, ``{tests}`` and the
            sizes are filled in.
        expected: What must be true, as a sentence of the table.
        judge: Returns figures; raises `UnexpectedError` where it is not true.
        seconds: After which it is stopped.
        statuses: The exit statuses that are not failures by themselves.
    """

    name: str
    command: str
    expected: str
    judge: Callable[[Ended], Figures]
    seconds: float = 90
    statuses: tuple[int, ...] = (0,)


def _require(is_true: bool, otherwise: str) -> None:
    if not is_true:
        raise UnexpectedError(otherwise)


def _doctor(ended: Ended) -> Figures:
    checks = {check["name"]: check for check in ended.json["checks"]}
    failed = [name for name, check in checks.items() if check["state"] != "ok"]
    _require(not failed, f"failed: {', '.join(failed)}")
    devices = checks["devices"]["detail"]
    _require(f" {ended.platform} (" in devices, f"the devices are {devices}")
    return {"checks": len(checks)}


def _demo(ended: Ended) -> Figures:
    found = ended.json
    warm = found["training"]["warm"]
    _require(warm["counters"]["UncachedCompile"] == 0, "the warm start compiled")
    _require(Path(ended.folder, found["nan"]["repro"], "ISSUE.md").is_file(), "no ISSUE.md")
    return {
        f"{kind}_first_step_s": found["training"][kind]["first_step_seconds"]
        for kind in ("cold", "warm")
    }


def _recorded(folder: str, count: int) -> Callable[[Ended], Figures]:
    def judge(ended: Ended) -> Figures:
        files = sorted(Path(ended.folder, folder).glob("*.inputs.snap"))
        _require(len(files) == count, f"{len(files)} executions were recorded, not {count}")
        return {"executions": len(files)}

    return judge


def _reports(ended: Ended) -> list[Mapping[str, Any]]:
    reports = ended.json["reports"]
    _require(bool(reports), "nothing was replayed")
    return reports


def _replayed(ended: Ended) -> Figures:
    reports = _reports(ended)
    for report in reports:
        device = report["device"]
        _require(
            device.startswith(ended.platform), f"{report['path']} ran on {device or 'nothing'}"
        )
    identical = sum(
        all(output["verdict"] == "identical" for output in report["comparison"]["outputs"])
        for report in reports
    )
    return {"replayed": len(reports), "identical": identical}


def _judged(ended: Ended) -> Figures:
    reports = _reports(ended)
    worst = {"a": 0.0, "b": 0.0}
    for report in reports:
        for side in report["sides"]:
            letter = side["letter"].lower()
            if letter in worst:
                score = side["score"]
                said = f"{report['path']}: {side['name']} is {side['word']} ({side['reason']})"
                _require(side["status"] == "ok", said)
                worst[letter] = max(worst[letter], score or 0.0)
    return {"models": len(reports), "worst_of_device": worst["a"], "worst_of_cpu": worst["b"]}


def _nan_recorded(ended: Ended) -> Figures:
    (path,) = Path(ended.folder, "nan").glob("*.inputs.snap")
    found = re.search(r"execution(\d+)", path.name)
    _require(found is not None and int(found[1]) == 23, f"{path.name} is not execution 23")
    return {"execution": 23}


def _nan_found(ended: Ended) -> Figures:
    found = ended.json
    opcodes = [one["opcode"] for one in found["instructions"]]
    _require(opcodes == ["divide"], f"found {opcodes}: {found['sentence']}")
    return {"search_s": found["seconds"], "compiles": found["compiles"]}


def _figures(ended: Ended) -> Figures:
    return json.loads(ended.stdout.splitlines()[-1])


def _recheck_ratio(ended: Ended) -> Figures:
    found = re.search(r"typical block: .* ratio ([\d.]+)", ended.stdout)
    took = re.search(r"a re-check takes ([\d.]+) ms", ended.stdout)
    _require(found is not None and took is not None, "it printed no ratio")
    return {"recheck_ms": float(took[1]), "ratio_of_every_100th": float(found[1])}


def _equal(ended: Ended) -> Figures:
    metrics = json.loads(Path(ended.folder, "recheck.json").read_text())["counters"]
    _require(metrics.get("Rechecks", 0) > 0, "nothing was re-checked")
    files = list(Path(ended.folder, "recheck").glob("*.inputs.snap"))
    _require(not files, f"{len(files)} executions gave other bits: {ended.stderr[-300:]}")
    return {"rechecks": metrics["Rechecks"]}


def _failed_later(ended: Ended) -> Figures:
    _require("error: graph " in ended.stderr, f"it said {ended.stderr[-300:]}")
    _, _, listed = ended.stderr.partition("its operations:")
    _require("broken.py:2 (<module>)" in listed, "it named no operation")
    return {}


_BROKEN_PROGRAM = """
import jax, jax.numpy as jnp
result = jax.pure_callback(lambda x: 1 // 0, jax.ShapeDtypeStruct((), jnp.int32), jnp.ones(()))
"""
_DEMO_PROGRAM = "{package}/cli/demo/nan_at_step_23.py"
# JAX multiplies float32 at lower precision on a GPU or TPU, which is no fault.
_DEVICE = "{platform},matmul-precision=highest"

STEPS: tuple[Step, ...] = (
    Step("doctor", "snaprt doctor --json", "all checks pass on the device", _doctor),
    Step(
        "demo",
        "snaprt demo --out demo --json",
        "the warm start compiles nothing; the NaN is localized and minified",
        _demo,
        seconds=150,
    ),
    Step(
        "record on the device",
        # Of products in TF32, the kernel that XLA chooses anew for the replay has other digits.
        "JAX_DEFAULT_MATMUL_PRECISION=highest"
        " snaprt run --record --when 'name=^model_' --dump models -- {tests}/device/ten_models.py",
        "ten models are recorded",
        _recorded("models", 10),
    ),
    Step(
        "replay on the device",
        "snaprt replay models --device {platform} --json",
        "all outputs match the recorded ones",
        _replayed,
    ),
    Step(
        "device and CPU against float64",
        f"snaprt replay models --a {_DEVICE} --b cpu --reference f64 --json",
        "rounding explains the difference of each side from float64, in ten models",
        _judged,
        seconds=150,
    ),
    Step(
        "cold and warm start",
        "python {tests}/device/figures.py starts",
        "the second start finds each program in the cache",
        _figures,
        seconds=150,
    ),
    Step(
        "NaN watch",
        f"snaprt run --record --when 'nan, first=1' --dump nan -- {_DEMO_PROGRAM}",
        "execution 23 alone is recorded",
        _nan_recorded,
    ),
    Step(
        "localize the NaN",
        "snaprt localize nan/*.inputs.snap --a {platform} --b cpu --json",
        "the division is found",
        _nan_found,
        statuses=(1,),
    ),
    Step(
        "localize a planted fault",
        f"python {{tests}}/device/figures.py planted_fault {_DEVICE} cpu",
        "the instruction that only the device computes wrong is found",
        _figures,
        seconds=150,
    ),
    Step(
        "an error on the device",
        f"cat >broken.py <<'END'{_BROKEN_PROGRAM}END\nXLA_IR_DEBUG=1 snaprt run --lazy broken.py",
        "the operation that failed is named, whenever the device found out",
        _failed_later,
        statuses=(2,),
    ),
    Step(
        "record {small} MiB",
        "python {tests}/device/figures.py large_snapshot {small} small",
        "it is recorded",
        _figures,
    ),
    Step(
        "replay {small} MiB",
        "snaprt replay small --device {platform} --json",
        "the outputs match",
        _replayed,
    ),
    Step(
        "record {large} MiB",
        "python {tests}/device/figures.py large_snapshot {large} large",
        "it is recorded",
        _figures,
    ),
    Step(
        "replay {large} MiB",
        "snaprt replay large --device {platform} --json",
        "the outputs match",
        _replayed,
    ),
    Step(
        "re-check",
        "SNAPRT_METRICS_FILE=recheck.json snaprt run --record --when 'recheck, every=5'"
        f" --dump recheck -- {_DEMO_PROGRAM}",
        "executions that run again give the same bits",
        _equal,
    ),
    Step(
        "cost of a re-check",
        "python {tests}/bench/bench_recheck.py --rounds 3 --width {width}",
        "it is measured, on steps of 10 ms",
        _recheck_ratio,
    ),
    Step(
        "cost of an armed recorder, lazy",
        "python {tests}/device/figures.py armed",
        "nothing is recorded; NaN watch and --keep-last 5 are measured on steps of 1 ms",
        _figures,
    ),
    Step(
        "cost of an armed recorder, jax.jit",
        "python {tests}/device/figures.py jit_calls",
        "it is measured on small calls",
        _figures,
    ),
)
