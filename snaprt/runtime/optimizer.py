"""An optimizer's step together with the end of the program's step, for optax and nnx.

Neither library is imported before one of its optimizers is given.
"""

from __future__ import annotations

from typing import Any

from snaprt.errors import UsageError
from snaprt.runtime.step import mark_step


def optimizer_step(optimizer: Any, *arguments: Any, barrier: bool = True, **keywords: Any) -> Any:
    """Update parameters with an optimizer, and mark the step.

    The arguments are those of the optimizer's own ``update``::

        params, state = snaprt.optimizer_step(transformation, grads, state, params)  # optax
        snaprt.optimizer_step(optimizer, model, grads)  # flax.nnx.Optimizer, in place

    Unlike in PyTorch/XLA, gradients are not reduced over devices first: in JAX, shardings do that,
    or a `jax.lax.pmean` inside `shard_map`.

    Args:
        optimizer: An `optax.GradientTransformation`, or an `flax.nnx.Optimizer`.
        arguments: The arguments of its ``update``.
        barrier: Whether to call `mark_step` afterwards.
        keywords: The keyword arguments of its ``update``, such as ``value=loss``.

    Returns:
        For optax, the new parameters and the new state; else the result of ``update``.

    Raises:
        UsageError: ``optimizer`` is neither, or an optax optimizer is given no parameters.

    Examples:
        >>> import optax
        >>> optimizer = optax.sgd(0.5)
        >>> params = {"w": jnp.ones(2)}
        >>> state = optimizer.init(params)
        >>> with snaprt.lazy():
        ...     grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params)
        ...     params, state = snaprt.optimizer_step(optimizer, grads, state, params)
        >>> print(params["w"])
        [0. 0.]
    """
    update = getattr(optimizer, "update", None)
    if not callable(update):
        raise UsageError(
            f"a {type(optimizer).__name__} is not an optimizer that snaprt can step",
            hint="pass an optax.GradientTransformation or an flax.nnx.Optimizer",
        )
    if isinstance(optimizer, tuple):  # as every optax.GradientTransformation is
        result: Any = _transform(update, *arguments, **keywords)
    else:
        result = update(*arguments, **keywords)
    if barrier:
        mark_step()
    return result


def _transform(
    update: Any, grads: Any = None, state: Any = None, params: Any = None, **keywords: Any
) -> tuple[Any, Any]:
    if params is None:
        raise UsageError(
            "an optax transformation needs parameters to step",
            hint="params, state = snaprt.optimizer_step(transformation, grads, state, params)",
        )
    import optax

    updates, state = update(grads, state, params, **keywords)
    return optax.apply_updates(params, updates), state
