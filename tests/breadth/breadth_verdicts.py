"""Run a case eagerly and lazily, twice with other values, and say whether the results are equal."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from breadth_cases import Case
from snaprt_replay.compare.compare import compare_arrays
from snaprt_replay.compare.results import MISMATCH
from snaprt_replay.compare.tolerance import ToleranceRequest

import snaprt
from snaprt import metrics

EQUAL = "bit for bit equal"
SAME_ERROR = "the same error"
LATER_ERROR = "the same error, when it runs"
AS_JIT = "as under jax.jit"
ROUNDING = "within rounding"
DIFFERS = "differs"

VERDICTS = (EQUAL, SAME_ERROR, LATER_ERROR, AS_JIT, ROUNDING, DIFFERS)
"""From the best to the worst."""


@dataclass(frozen=True)
class Judgement:
    """What became of one case.

    Args:
        case: Its name.
        family: The table that it is from.
        verdict: Of `VERDICTS`.
        max_ulp: The largest distance to the eager result in representable numbers.
        reason: What differs, if something does.
        compiled_again: Programs compiled in the second step, with other values.
    """

    case: str
    family: str
    verdict: str
    max_ulp: int
    reason: str
    compiled_again: int


@dataclass(frozen=True)
class Leaf:
    """One leaf of a result, on the host; two of one case are compared field by field."""

    what: str
    value: Any


@dataclass(frozen=True)
class Outcome:
    """What a call came to: the structure and leaves of its result, or the type of its error."""

    structure: Any = None
    leaves: tuple[Leaf, ...] = ()
    error: str = ""
    message: str = ""


def judge(case: Case) -> Judgement:
    """Apply a case to two samples, eagerly and lazily, and compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [_outcome(_attempt(case.call, case.values(sample))) for sample in (0, 1)]
        actual, compiled_again = _lazily(case)
        verdict, ulp, reason = _worst(expected, actual)
        if verdict in (ROUNDING, DIFFERS) and _worst(_jitted(case), actual)[0] == EQUAL:
            verdict = AS_JIT
        if verdict == DIFFERS and _as_exact(case, expected, actual):
            verdict = ROUNDING
    return Judgement(case.name, case.family, verdict, ulp, reason, compiled_again)


def _lazily(case: Case) -> tuple[list[Outcome], int]:
    """Return the outcomes of two steps, and how many programs the second of them compiled."""
    results, compiled = [], [_compiled()]
    arguments = [case.values(sample) for sample in (0, 1)]
    with snaprt.lazy():
        for values in arguments:
            results.append(_attempt(case.call, values))
            with contextlib.suppress(
                Exception
            ):  # the arrays that failed raise it when they are read
                snaprt.mark_step()
            compiled.append(_compiled())
    return [_outcome(result) for result in results], compiled[2] - compiled[1]


def _compiled() -> int:
    return metrics.counter_value("UncachedCompile") or 0


def _attempt(call: Callable[..., Any], values: Sequence[Any]) -> Any:
    try:
        return call(*values)
    except Exception as error:
        return error


def _jitted(case: Case) -> list[Outcome]:
    """Return the outcomes under `jax.jit`, with what is not an array as a constant."""
    return [_jitted_with(case.call, case.values(sample)) for sample in (0, 1)]


def _jitted_with(call: Callable[..., Any], values: Sequence[Any]) -> Outcome:
    leaves, structure = jax.tree.flatten(values)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    @jax.jit
    def jitted(*arrays: Any) -> Any:
        whole = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            whole[place] = array
        return call(*structure.unflatten(whole))

    return _outcome(_attempt(jitted, [leaves[place] for place in places]))


def _as_exact(case: Case, expected: Sequence[Outcome], actual: Sequence[Outcome]) -> bool:
    """Return whether lazy results are about as near to those of float64 as eager ones are.

    What the program makes of its first rounding errors may be large, be it eager or lazy.
    """
    if case.kind != "f" or any(one.error for one in (*expected, *actual)):
        return False
    for sample in (0, 1):
        with jax.enable_x64(True):
            exact = _outcome(_attempt(case.call, jax.tree.map(_widened, case.values(sample))))
        if exact.error or len(exact.leaves) != len(actual[sample].leaves):
            return False
        for one, other, true in zip(
            expected[sample].leaves, actual[sample].leaves, exact.leaves, strict=True
        ):
            if _error(other, true) > 4 * _error(one, true):
                return False
    return True


def _widened(value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray) and value.dtype == np.float32:
        return value.astype(np.float64)
    return value


def _error(leaf: Leaf, true: Leaf) -> float:
    if not isinstance(leaf.value, np.ndarray):
        return 0.0 if _same_object(leaf.value, true.value) else float("inf")
    return float(np.max(np.abs(leaf.value - true.value), initial=0.0))


def _outcome(result: Any) -> Outcome:
    """Return what a result is, reading all of its arrays."""
    if isinstance(result, Exception):
        return Outcome(error=type(result).__name__, message=str(result))
    try:
        leaves, structure = jax.tree.flatten(result)
        return Outcome(structure, tuple(map(_leaf, leaves)))
    except Exception as error:
        return Outcome(error=type(error).__name__, message=str(error))


def _leaf(leaf: Any) -> Leaf:
    if isinstance(leaf, jax.Array):
        weak = getattr(leaf, "weak_type", False)  # arrays of keys have none
        what = f"array {leaf.dtype}{list(leaf.shape)} {weak=} {leaf.committed=}"
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return Leaf(what, np.asarray(leaf))
    if isinstance(leaf, np.ndarray | np.generic):
        return Leaf(f"numpy {leaf.dtype}{list(leaf.shape)}", np.asarray(leaf))
    return Leaf(type(leaf).__name__, leaf)


def _worst(expected: Sequence[Outcome], actual: Sequence[Outcome]) -> tuple[str, int, str]:
    found = [_compared(one, other) for one, other in zip(expected, actual, strict=True)]
    worst = max(found, key=lambda item: VERDICTS.index(item[0]))
    return worst[0], max(ulp for _, ulp, _ in found), worst[2]


def _compared(expected: Outcome, actual: Outcome) -> tuple[str, int, str]:
    if expected.error or actual.error:
        if expected.error == actual.error:
            return SAME_ERROR, 0, expected.error
        late = actual.error in ("CompileError", "ExecutionError")
        if late and expected.message[:40] in actual.message:
            return LATER_ERROR, 0, expected.error
        return DIFFERS, 0, f"{_said(actual)} instead of {_said(expected)}"
    if expected.structure != actual.structure:
        return DIFFERS, 0, f"{actual.structure} instead of {expected.structure}"
    verdict, worst, reason = EQUAL, 0, ""
    for one, other in zip(expected.leaves, actual.leaves, strict=True):
        if one.what != other.what:
            return DIFFERS, 0, f"{other.what} instead of {one.what}"
        if not isinstance(one.value, np.ndarray) or one.value.dtype.kind in "OSU":
            if not _same_object(one.value, other.value):
                return DIFFERS, 0, f"{other.value!r} instead of {one.value!r}"
            continue
        if one.value.dtype.names is not None or one.value.tobytes() == other.value.tobytes():
            continue
        found = compare_arrays("", one.value, other.value, ToleranceRequest())
        zeros = found.specials.zero_sign if found.specials else 0
        if not found.differing and not zeros:
            continue  # NaN of another payload
        worst = max(worst, found.max_ulp)
        level = DIFFERS if found.verdict == MISMATCH else ROUNDING
        if VERDICTS.index(level) >= VERDICTS.index(verdict):
            verdict, reason = level, found.reason or "the sign of a zero"
    return verdict, worst, reason


def _said(outcome: Outcome) -> str:
    if not outcome.error:
        return "a result"
    return f"{outcome.error} ({outcome.message.splitlines()[0][:200] if outcome.message else ''})"


def _same_object(one: Any, other: Any) -> bool:
    with contextlib.suppress(Exception):
        if bool(one == other):
            return True
    return repr(one) == repr(other)


def as_row(judgement: Judgement) -> dict[str, Any]:
    """Return a judgement as JSON can hold it."""
    return dataclasses.asdict(judgement)
