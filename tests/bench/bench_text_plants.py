"""Edit one operation in a program's text, and see what `snaprt localize --against` accuses.

Run it: python tests/bench/bench_text_plants.py [--each N] [--model NAME] [--kind NAME] [--seed N]
    [--command] [--keep DIR]

A program of each kind is written down twice, as it is and with one operation edited in its
StableHLO text, and `snaprt localize A --against B` gets the two files and the inputs. Only edits
that XLA compiles, and that change an output beyond its tolerance, count. What is named is right if
it is the edited operation, or, where that was taken out, one that read it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import measuring
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

NEEDED = 0.95
RIGHT, WRONG, NONE = "right", "wrong", "none named"


@dataclass(frozen=True)
class Result:
    """What came of one plant."""

    model: str
    kind: str
    outcome: str
    named: int
    seconds: float


def outputs_of(workers, text: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray] | None:
    """Compile and run a module in a process of its own; None if it is not valid."""
    from snaprt_replay.run.jobs import STABLEHLO
    from snaprt_replay.run.variants.variants import parse_variant

    return workers.run(parse_variant("cpu"), text.encode(), inputs, form=STABLEHLO).outputs


def differs(ones: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Return whether two lists of outputs differ as no two correct compilations do."""
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False  # another program, which is not compared
    for one, other in zip(ones, others, strict=True):
        if not np.issubdtype(one.dtype, np.inexact):
            if not np.array_equal(one, other):
                return True
        else:
            size = np.sqrt(np.mean(np.square(np.nan_to_num(one))))
            if not np.allclose(one, other, rtol=1e-3, atol=1e-3 * size, equal_nan=True):
                return True
    return False


def plants_of(workers, text, inputs, kinds: Sequence[str], each: int, seed: int) -> Iterator:
    """Yield valid edits that can be seen, ``each`` of every kind where there are so many."""
    import text_plants

    outputs = outputs_of(workers, text.located, inputs)
    if outputs is None:
        raise SystemExit("a model does not run")
    for kind in kinds:
        found = 0
        for tried, plant in enumerate(text_plants.draw(text, kind, seed)):
            if found == each or tried == 40 * each:
                break
            got = outputs_of(workers, plant.text, inputs)
            if got is not None and len(got) == len(outputs) and differs(outputs, got):
                found += 1
                yield plant


def by_command(folder: Path) -> tuple[dict, str]:
    """Run the command on the two files; return its JSON and what it said beside."""
    from snaprt.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    words = [folder / "original.mlir", "--against", folder / "edited.mlir", "--json"]
    words = ["localize", *words, "--inputs", folder / "in.npz"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main([str(one) for one in words])
    said = out.getvalue()
    return json.loads(said) if said.startswith("{") else {}, err.getvalue()


def in_process(workers, folder: Path) -> tuple[dict, str]:
    """Do what the command does, but with worker processes that run already."""
    from snaprt_replay.load.load import load
    from snaprt_replay.localize.findings import to_json
    from snaprt_replay.localize.pipeline import read_program, search
    from snaprt_replay.localize.session import Session, Side
    from snaprt_replay.run.variants.variants import parse_variant

    def run(hlo: bytes, inputs: Sequence[np.ndarray]):
        return workers.submit(parse_variant("cpu"), hlo, inputs)

    cases = [load(folder / f"{name}.mlir", folder / "in.npz") for name in ("original", "edited")]
    sides = [Side(f"cpu of {one.path.name}", read_program(one), run) for one in cases]
    inputs = [one.value for one in cases[0].inputs or ()]
    return to_json(search(Session(), (sides[0], sides[1]), inputs)), ""


def judge(plant, found: dict) -> str:
    """Return whether what is named is what was edited."""
    named = [one["op_name"].rpartition("/")[2] for one in found.get("instructions", ())]
    if not named or found.get("kind") not in ("instruction", "interaction"):
        return NONE
    # XLA joins the locations of operations that it makes one of: "op7;op6".
    is_right = all(plant.accepted.intersection(one.split(";")) for one in named)
    return RIGHT if is_right else WRONG


def models():
    """Return all programs."""
    import more_text_models
    import text_models

    return {**text_models.MODELS, **more_text_models.MORE_MODELS}


def run_all(workers, names: Sequence[str], kinds: Sequence[str], arguments) -> Iterator[Result]:
    """Plant, localize, judge."""
    import jax
    import text_plants

    number = 0
    for name in names:
        function, taken = models()[name]()
        lowered = jax.jit(function, keep_unused=True).lower(*taken)
        text = text_plants.read(lowered.as_text())
        inputs = [np.asarray(one) for one in jax.tree.leaves(taken)]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "original.mlir").write_text(text.located)
            np.savez(Path(folder) / "in.npz", **{f"arg{i}": one for i, one in enumerate(inputs)})
            for plant in plants_of(workers, text, inputs, kinds, arguments.each, arguments.seed):
                started = time.perf_counter()
                (Path(folder) / "edited.mlir").write_text(plant.text)
                found, said = (
                    by_command(Path(folder))
                    if arguments.command
                    else in_process(workers, Path(folder))
                )
                seconds = time.perf_counter() - started
                outcome = judge(plant, found)
                if outcome != RIGHT:
                    if arguments.keep is not None:
                        number += 1
                        shutil.copytree(folder, arguments.keep / f"{name} {number}")
                    why = found.get("sentence", said)
                    edit = f"{plant.before}\n    -> {plant.after or 'taken out'}"
                    print(f"{outcome}: {name}, {plant.kind}: {edit}\n    {why}", file=sys.stderr)
                    named = [one["op_name"] for one in found.get("instructions", ())]
                    print(f"    {sorted(plant.accepted)} is right, not {named}", file=sys.stderr)
                yield Result(name, plant.kind, outcome, len(found.get("instructions", ())), seconds)


def show(results: Sequence[Result]) -> None:
    """Print the table by model and by kind."""
    rows = []
    for field in ("model", "kind"):
        for value in dict.fromkeys(getattr(one, field) for one in results):
            rows.append(_row(value, [one for one in results if getattr(one, field) == value]))
    heads = ["", "plants", RIGHT, WRONG, NONE, "named, most", "seconds, median"]
    measuring.show_table(heads, [*rows, _row("all", results)])


def _row(name: str, chosen: Sequence[Result]) -> list[str]:
    outcomes = Counter(one.outcome for one in chosen)
    return [
        name,
        str(len(chosen)),
        *(str(outcomes[one]) for one in (RIGHT, WRONG, NONE)),
        str(max(one.named for one in chosen)),
        f"{measuring.median([one.seconds for one in chosen]):.1f}",
    ]


def main() -> None:
    """Plant, localize, print the table; fail below the share that is needed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--each", type=int, default=1, help="edits of each kind in each model")
    parser.add_argument("--model", action="append", help="only this one; several times: only these")
    parser.add_argument("--kind", action="append", help="only edits of this kind; several times")
    parser.add_argument("--keep", type=Path, help="a folder for the files of what is not right")
    parser.add_argument("--command", action="store_true", help="start the command each time")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.update(measuring.clean_environment())
    import text_plants
    from snaprt_replay.run.workers import Workers

    print(measuring.machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder, Workers(2) as workers:
        os.environ["SNAPRT_CACHE_DIR"] = folder
        names = arguments.model or list(models())
        kinds = arguments.kind or text_plants.ALL_KINDS
        results: list[Result] = []
        for one in run_all(workers, names, kinds, arguments):
            results.append(one)
            print(f"{len(results)}: {one}", file=sys.stderr, flush=True)
    show(results)
    right = sum(one.outcome == RIGHT for one in results) / len(results)
    accused = sum(one.outcome == WRONG for one in results)
    print(f"{right:.1%} of {len(results)} right, needed {NEEDED:.0%}; {accused} innocents accused")
    if right < NEEDED or accused:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
