"""Steady scopes: what JAX transforms is traced once, and again where it depends on other things."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import snaprt
from snaprt import metrics

pytestmark = pytest.mark.usefixtures("no_persistent_cache")

SCALE: Any = 2.0
SHIFT: Any = None


def traces() -> int:
    """Return how often a function was traced in a steady scope."""
    return metrics.counter_value("SteadyTraces") or 0


def same_in_both(step: Callable[[int], Any], steps: int = 4) -> int:
    """Compare what steps return eagerly and in a steady scope; return how many traces that took."""
    eager = [jax.device_get(step(number)) for number in range(steps)]
    before = traces()
    with snaprt.lazy(steady=True):
        steady = []
        for number in range(steps):
            steady.append(step(number))
            snaprt.mark_step()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), eager, steady)
    return traces() - before


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w) ** 2)


W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
X = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)


def test_gradients_are_traced_once() -> None:
    def step(number: int) -> Any:
        return jax.value_and_grad(loss)(jnp.asarray(W) + number, jnp.asarray(X))

    assert same_in_both(step) == 2  # forward and back


def test_a_function_made_anew_closes_over_other_arrays() -> None:
    def step(number: int) -> Any:
        batch = {"x": jnp.asarray(X) * number, "y": X + number}

        def of_batch(w: Any) -> Any:
            return loss(w, batch["x"]) + loss(w, batch["y"])

        return jax.grad(of_batch)(jnp.asarray(W))

    assert same_in_both(step) == 2


def test_numbers_that_a_function_closes_over_are_not_taken_for_the_same() -> None:
    def step(number: int) -> Any:
        rate = 0.5 * (number // 2)
        return jax.grad(lambda w: rate * loss(w, jnp.asarray(X)))(jnp.asarray(W))

    assert same_in_both(step) == 4


@pytest.mark.parametrize("how", ["default", "keyword", "partial", "argument"])
def test_numbers_given_to_a_function_are_not_taken_for_the_same(how: str) -> None:
    def scaled(w: Any, *more: Any, by: Any = 1.0) -> Any:
        return loss(w, jnp.asarray(X)) * (more[0] if more else by)

    def step(number: int) -> Any:
        by = float(number % 2)
        if how == "default":
            return jax.grad(lambda w, by=by: scaled(w, by))(jnp.asarray(W))
        if how == "keyword":
            return jax.grad(scaled)(jnp.asarray(W), by=by)
        if how == "partial":
            return jax.grad(functools.partial(scaled, by=by))(jnp.asarray(W))
        return jax.grad(scaled)(jnp.asarray(W), by)

    same_in_both(step)


def test_globals_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(x: Any) -> Any:
        return x * SCALE

    def of_globals(w: Any) -> Any:
        return jnp.sum(inner(w) * SHIFT)

    def step(number: int) -> Any:
        monkeypatch.setitem(globals(), "SCALE", float(number // 2))
        monkeypatch.setitem(globals(), "SHIFT", jnp.asarray(W) * number)
        return jax.grad(of_globals)(jnp.asarray(W))

    same_in_both(step)


class Model:
    """Is nothing that JAX knows."""

    factor = 1.0

    def __init__(self) -> None:
        self.scale = 1.0
        self.mask = jnp.ones(3)
        self.nested = {"rates": [1.0]}

    def loss(self, w: Any) -> Any:
        rate = self.scale * self.factor * self.nested["rates"][0]
        return loss(w, jnp.asarray(X)) * rate * jnp.sum(self.mask)


@pytest.mark.parametrize("what", ["scale", "mask", "nested", "factor"])
@pytest.mark.parametrize("how", ["method", "closure"])
def test_attributes_are_looked_at(what: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()

    def step(number: int) -> Any:
        if what == "scale":
            model.scale = float(number)
        elif what == "mask":
            model.mask = jnp.ones(3) * number
        elif what == "nested":
            model.nested["rates"][0] = float(number)
        else:
            monkeypatch.setattr(Model, "factor", float(number))
        function = model.loss if how == "method" else lambda w: model.loss(w)
        return jax.grad(function)(jnp.asarray(W))

    same_in_both(step)


class Trainer:
    """Keeps books of its steps, which its loss does not read."""

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[Any] = []
        self.rate = 1.0

    @property
    def twice(self) -> float:
        return 2 * self.rate

    def loss(self, w: Any) -> Any:
        return loss(w, jnp.asarray(X)) * self.twice

    def step(self, number: int) -> Any:
        self.steps += 1
        self.rate = 1.0 + number // 2
        self.losses.append(jax.value_and_grad(self.loss)(jnp.asarray(W) + number))
        return self.losses[-1]


def test_only_attributes_that_are_named_matter() -> None:
    trainer = Trainer()
    assert same_in_both(trainer.step) == 4  # two rates, forward and back


def test_attributes_that_may_be_asked_for_by_any_name_all_matter() -> None:
    model = Model()

    def step(number: int) -> Any:
        model.scale = float(number)
        return jax.grad(lambda w: jnp.sum(w) * getattr(model, "sca" + "le"))(jnp.asarray(W))

    same_in_both(step)


def test_an_object_that_is_made_and_called_inside_is_looked_at() -> None:
    class Scaled:
        def __init__(self) -> None:
            self.by = SCALES[0]

        def __call__(self, x: Any) -> Any:
            return x * self.by

    def step(number: int) -> Any:
        SCALES[0] = float(number)
        return jax.grad(lambda w: Scaled()(jnp.sum(w)))(jnp.asarray(W))

    same_in_both(step)


SCALES = [0.0]
CONFIG = types.ModuleType("config")  # a module of the user's own
CONFIG.__file__ = __file__


def test_attributes_of_modules_of_the_users_are_looked_at() -> None:
    def step(number: int) -> Any:
        vars(CONFIG)["rate"] = float(number)
        return jax.grad(lambda w: jnp.sum(w) * CONFIG.rate)(jnp.asarray(W))

    same_in_both(step)


def test_a_shape_a_type_and_a_mode_are_traced_by_themselves() -> None:
    def step(number: int) -> Any:
        dtype = (jnp.float32, jnp.float16)[number % 2]
        w = jnp.asarray(W, dtype)[:, : 1 + number // 2]
        with jax.default_matmul_precision(("highest", "default")[number % 2]):
            return jax.grad(loss)(w, jnp.asarray(X, dtype))

    same_in_both(step)


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "has_aux": lambda w, x: jax.value_and_grad(lambda w: (loss(w, x), {"w": w * 2}), has_aux=True)(
        w
    ),
    "argnums": lambda w, x: jax.grad(loss, argnums=(0, 1))(w, x),
    "vjp": lambda w, x: jax.vjp(loss, w, x)[1](jnp.float32(2.0)),
    "vjp, called twice": lambda w, x: [
        pull(jnp.float32(c)) for pull in [jax.vjp(loss, w, x)[1]] for c in (1.0, 2.0)
    ],
    "jvp": lambda w, x: jax.jvp(loss, (w, x), (jnp.ones_like(w), jnp.ones_like(x))),
    "vmap": lambda w, x: jax.vmap(loss, in_axes=(None, 0))(w, x[:, None]),
    "vmap of grad": lambda w, x: jax.vmap(jax.grad(loss), in_axes=(None, 0))(w, x[:, None]),
    "jacrev": lambda w, x: jax.jacrev(lambda w: jnp.tanh(x @ w))(w),
    "jacfwd": lambda w, x: jax.jacfwd(lambda w: jnp.tanh(x @ w))(w),
    "hessian": lambda w, x: jax.hessian(lambda w: loss(w, x))(w),
    "linearize": lambda w, x: jax.linearize(lambda w: loss(w, x), w)[1](w),
    "grad of grad": lambda w, x: jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, x) ** 2))(w),
    "checkpoint": lambda w, x: jax.grad(jax.checkpoint(loss))(w, x),
    "checkpoint alone": lambda w, x: jax.checkpoint(loss)(w, x),
    "scan": lambda w, x: jax.lax.scan(lambda c, r: (jnp.tanh(c + r @ w), c), jnp.zeros(3), x),
    "grad of scan": lambda w, x: jax.grad(
        lambda w: jax.lax.scan(lambda c, r: (c + loss(w, r), c), 0.0, x)[0]
    )(w),
    "scan by keywords": lambda w, x: jax.lax.scan(
        lambda c, r: (c + loss(w, r), None), 0.0, xs=x, unroll=2
    ),
    "jit": lambda w, x: jax.grad(jax.jit(loss))(w, x),
    "custom_vjp": lambda w, x: jax.grad(lambda w: doubled(w).sum())(w),
    "stop_gradient": lambda w, x: jax.grad(lambda w: loss(jax.lax.stop_gradient(w), x) + w.sum())(
        w
    ),
    "complex": lambda w, x: jax.grad(lambda w: jnp.abs(jnp.sum(w * 1j + x[0, 0])))(w),
    "functions": lambda w, x: jax.vmap(lambda f, r: f(r), in_axes=(None, 0))(jnp.tanh, x),
    "integers": lambda w, x: jax.grad(lambda w, i: w[i].sum())(w, 1),
    "randomly": lambda w, x: jax.grad(lambda w, k: (w * jax.random.normal(k, w.shape)).sum())(
        w, jax.random.key(3)
    ),
}


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, c: (c * 3,))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_compute_what_they_compute_eagerly(name: str) -> None:
    def step(number: int) -> Any:
        return TRANSFORMS[name](jnp.asarray(W) + number, jnp.asarray(X))

    same_in_both(step)


def test_what_was_made_before_the_first_steady_scope_is_followed() -> None:
    def step(number: int) -> Any:
        return MADE_BEFORE(jnp.asarray(W) + number)

    assert same_in_both(step) == 2


MADE_BEFORE = jax.grad(lambda w: jnp.sum(jnp.sin(w)))


def test_what_cannot_be_jitted_runs_as_ever() -> None:
    def step(number: int) -> Any:
        return jax.lax.scan(lambda c, _: (c + number, None), 0.0, None, 5)  # a length, not an array

    refused = metrics.counter_value("SteadyRefused") or 0
    same_in_both(step)
    assert (metrics.counter_value("SteadyRefused") or 0) > refused


def test_an_error_of_the_function_is_raised_as_ever() -> None:
    with snaprt.lazy(steady=True):
        for _ in range(2):
            with pytest.raises(TypeError, match="dot_general"):
                jax.grad(loss)(jnp.asarray(W), jnp.asarray(X).T)


def test_what_is_another_each_time_is_no_longer_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def step(number: int) -> Any:
        return jax.grad(lambda w: loss(w, jnp.asarray(X)) * number)(jnp.asarray(W))

    assert same_in_both(step, 30) <= 34  # forward and back
    (line,) = [r.getMessage() for r in caplog.records if "traced at every call" in r.getMessage()]
    assert "test_lazy_steady.py" in line


def test_a_check_runs_effects_once_and_knows_equal_constants(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SNAPRT_STEADY_CHECK", "2")

    def of_constants(w: Any) -> Any:
        jax.debug.print("{}", w[0])
        return jnp.sum(w * np.arange(3.0))

    def of_rules(w: Any) -> Any:  # JAX makes its functions for derivatives anew
        return jax.vmap(jax.nn.relu)(w)

    changed = metrics.counter_value("SteadyChanged")
    with snaprt.lazy(steady=True):
        for _ in range(4):
            jax.grad(of_constants)(jnp.ones(3)).block_until_ready()
            jax.vmap(of_rules)(jnp.ones((2, 3))).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("1.0") == 4
    assert metrics.counter_value("SteadyChanged") == changed


def test_a_check_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPRT_STEADY_CHECK", "2")
    checks = metrics.counter_value("SteadyChecks") or 0
    with snaprt.lazy(steady=True, fullgraph=True):  # which raises where a value is read
        x = jnp.ones(3)
        for _ in range(4):
            x = x - jax.grad(lambda w, y: jnp.sum(w * w * y))(x * 2, jnp.sin(x))
            snaprt.mark_step()
    assert (metrics.counter_value("SteadyChecks") or 0) >= checks + 2
    assert np.isfinite(x).all()


def test_objects_that_changed_are_traced_as_they_are_now() -> None:
    rates = [1.0]

    def step(number: int) -> Any:
        rates[0] = (1.0, 2.0, 1.0, 2.0)[number]
        held = (rates, lambda x: x * rates[0])  # without arrays, so not taken apart
        return jax.grad(lambda w: held[1](jnp.sum(w)))(jnp.ones(2 + number))

    same_in_both(step)


class Hidden(dict[str, float]):
    """Compares as if nothing had changed."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def test_a_change_that_cannot_be_seen_is_found_and_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_STEADY_CHECK", "5")
    hidden = Hidden(rate=1.0)

    def of_hidden(w: Any) -> Any:
        return jnp.sum(w) * hidden["rate"]

    with snaprt.lazy(steady=True):
        for number in range(12):
            hidden["rate"] = 1.0 if number < 7 else 2.0
            slope = jax.grad(of_hidden)(jnp.ones(3))[0]
            assert float(slope) == (2.0 if number >= 9 else 1.0)  # the tenth call is checked
    (line,) = [r.getMessage() for r in caplog.records if "not steady" in r.getMessage()]
    assert "of_hidden" in line
    assert metrics.counter_value("SteadyChanged")


def test_steady_ends_with_its_scope() -> None:
    def step(number: int) -> Any:
        return jax.grad(loss)(jnp.asarray(W), jnp.asarray(X))

    with snaprt.lazy(steady=True):
        step(0)
        with snaprt.lazy():
            before = traces()
            step(0)
        assert traces() == before
    with snaprt.lazy():
        jax.grad(lambda w: loss(w, jnp.asarray(X)))(jnp.asarray(W))
    assert traces() == before


def test_the_environment_makes_scopes_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPRT_STEADY", "1")
    before = traces()
    with snaprt.lazy():
        jax.grad(lambda w: loss(w, jnp.asarray(X)) * 7)(jnp.asarray(W))
    assert traces() > before


def test_arrays_are_not_kept_alive() -> None:
    with snaprt.lazy(steady=True):
        x = jnp.asarray(X) * 3
        reference = weakref.ref(x)
        held = {"x": x}
        jax.grad(lambda w: loss(w, held["x"]) + 0 * len(held))(jnp.asarray(W))
        snaprt.mark_step()
    x = held = None
    gc.collect()
    assert reference() is None
