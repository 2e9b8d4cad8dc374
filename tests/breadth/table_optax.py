"""Cases of optax: three steps of each of its optimizers, its losses, schedules and wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from breadth_cases import Case, named_programs

ALIASES = sorted(
    name
    for name, value in vars(optax).items()
    if inspect.isfunction(value) and value.__module__ == "optax._src.alias"
)
"""Optax's own optimizers."""

CONTRIBUTED = """
acprop ademamix adopt cocob dadapt_adamw dog dowg madgrad momo momo_adam muon prodigy
schedule_free_adamw schedule_free_sgd simplified_ademamix sophia
""".split()

WRAPPED: dict[str, Callable[[], Any]] = {
    "chain with clipping": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "clip": lambda: optax.chain(optax.clip(0.1), optax.sgd(0.1)),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam with a schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 2),
    "lookahead": lambda: optax.sgd(0.1),
    "masked": lambda: optax.masked(optax.sgd(0.1), {"w": True, "b": False}),
    "partition": lambda: optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}
    ),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, seed=0), optax.scale(-0.1)),
    "centralize": lambda: optax.chain(optax.centralize(), optax.scale(-0.1)),
    "weight decay": lambda: optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1)),
    "warmup": lambda: optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)),
    "reduce_on_plateau": lambda: optax.contrib.reduce_on_plateau(),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "freeze": lambda: optax.set_to_zero(),
}


def _optimizer(name: str) -> Callable[[], Any]:
    function = getattr(optax, name, None) or getattr(optax.contrib, name)
    required = [
        parameter
        for parameter, what in inspect.signature(function).parameters.items()
        if what.default is what.empty and what.kind is not what.VAR_KEYWORD
    ]
    values = {"learning_rate": 0.05, "key": jax.random.key(0), "seed": 0, "noise_multiplier": 0.1}
    return lambda: function(**{parameter: values[parameter] for parameter in required})


def three_steps(create: Callable[[], Any]) -> Callable[..., Any]:
    """Return a program: the parameters, state and losses after three steps of an optimizer."""

    def run(batch: Any, labels: Any) -> Any:
        params = {"w": jnp.full((6, 4), 0.1, batch.dtype), "b": jnp.zeros(4, batch.dtype)}
        optimizer = optax.with_extra_args_support(create())

        def loss(p: Any) -> Any:
            logits = batch @ p["w"] + p["b"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        state = optimizer.init(params)
        losses = []
        for _ in range(3):
            value, gradient = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(
                gradient, state, params, value=value, grad=gradient, value_fn=loss, loss=value
            )
            params = optax.apply_updates(params, updates)
            losses.append(value)
        return losses, params, jax.tree.leaves(state)

    return run


def _with_extra_names(create: Callable[[], Any], *names: str) -> Callable[[], Any]:
    """Return an optimizer that is given, of the extra arguments, those it knows."""

    def build() -> Any:
        inner = optax.with_extra_args_support(create())

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            return inner.update(updates, state, params, **{name: extra[name] for name in names})

        return optax.GradientTransformationExtraArgs(inner.init, update)

    return build


EXTRA_NAMES = {
    "lbfgs": ("value", "grad", "value_fn"),
    "polyak_sgd": ("value",),
    "reduce_on_plateau": ("value",),
    "momo": ("value",),
    "momo_adam": ("value",),
    "sophia": (),
}


def losses_of_logits(batch: Any, labels: Any) -> Any:
    logits, hot = batch[:, :4], jax.nn.one_hot(labels, 4)
    found = {
        name: getattr(optax, name)(logits, hot)
        for name in (
            "softmax_cross_entropy sigmoid_binary_cross_entropy squared_error huber_loss l2_loss"
            " cosine_similarity cosine_distance log_cosh hinge_loss sigmoid_focal_loss"
            " safe_softmax_cross_entropy poly_loss_cross_entropy"
        ).split()
    }
    logs = jax.nn.log_softmax(logits)
    found["kl_divergence"] = optax.kl_divergence(logs, hot)
    found["integer labels"] = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    found["smooth_labels"] = optax.smooth_labels(hot, 0.1)
    return found


def ctc_loss(batch: Any, labels: Any) -> Any:
    logits = jnp.stack([batch, batch * 2])
    paddings = jnp.zeros(logits.shape[:2])
    targets = jnp.stack([labels[:3], labels[3:6]]) + 1
    return jax.value_and_grad(
        lambda v: optax.ctc_loss(v, paddings, targets, jnp.zeros(targets.shape)).sum()
    )(logits)


def schedules(at: Any) -> Any:
    made = [
        optax.constant_schedule(0.1),
        optax.cosine_decay_schedule(0.1, 10),
        optax.cosine_onecycle_schedule(10, 0.1),
        optax.exponential_decay(0.1, 5, 0.9, staircase=True),
        optax.linear_schedule(0.1, 0.0, 10),
        optax.linear_onecycle_schedule(10, 0.1),
        optax.piecewise_constant_schedule(0.1, {1: 0.5, 2: 0.1}),
        optax.polynomial_schedule(0.1, 0.0, 2, 10),
        optax.sgdr_schedule(
            [
                {
                    "init_value": 0.0,
                    "peak_value": 0.1,
                    "decay_steps": 9,
                    "warmup_steps": 2,
                    "end_value": 0.0,
                }
            ]
        ),
        optax.warmup_constant_schedule(0.0, 0.1, 3),
        optax.warmup_exponential_decay_schedule(0.0, 0.1, 3, 5, 0.9),
        optax.join_schedules([optax.constant_schedule(0.1), optax.constant_schedule(0.2)], [2]),
    ]
    return [schedule(step) for schedule in made for step in (at, 1, jnp.int32(4))]


def tree_operations(tree: Any) -> Any:
    twice = optax.tree.scale(2.0, tree)
    return (
        optax.tree.add(tree, twice),
        optax.tree.norm(tree),
        optax.tree.sub(twice, tree),
        optax.tree.vdot(tree, twice),
        optax.tree.zeros_like(tree),
        optax.global_norm(tree),
        optax.incremental_update(tree, twice, 0.1),
        optax.periodic_update(tree, twice, jnp.int32(2), 2),
    )


def projections(row: Any) -> Any:
    return (
        optax.projections.projection_simplex(row),
        optax.projections.projection_box(row, -1.0, 1.0),
        optax.projections.projection_l1_ball(row),
        optax.projections.projection_l2_sphere(row),
    )


def sharpness_aware(batch: Any, labels: Any) -> Any:
    optimizer = optax.contrib.sam(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2
    )
    return three_steps(lambda: optimizer)(batch, labels)


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    optimizers = {name: _optimizer(name) for name in (*ALIASES, *CONTRIBUTED)} | WRAPPED
    yield from named_programs(
        "optax optimizers",
        {
            f"optax {name}": three_steps(_with_extra_names(create, *EXTRA_NAMES.get(name, ())))
            for name, create in optimizers.items()
        },
    )
    rest = (losses_of_logits, ctc_loss, schedules, tree_operations, projections, sharpness_aware)
    yield from named_programs("optax, the rest", {f"optax {f.__name__}": f for f in rest})
