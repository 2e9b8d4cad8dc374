"""Cases of `jax.nn`, its initializers, `jax.image`, `jax.ops`, and of pytrees."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from breadth_cases import Case, expressions, programs

ACTIVATIONS = """
celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log1mexp
log_sigmoid log_softmax logmeanexp logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax
softplus sparse_plus sparse_sigmoid squareplus standardize swish tanh
""".split()

NN = [
    "nn.softmax(x, axis=0, where=mask, initial=-9.0)",
    "nn.softmax(x, axis=0, where=mask)",
    "nn.logsumexp(x, axis=1, b=row, return_sign=True)",
    "nn.one_hot(labels, 4)",
    "nn.one_hot(labels, 4, axis=0, dtype=jnp.bfloat16)",
    "nn.gelu(x, approximate=False)",
    "nn.dot_product_attention(heads, heads, heads)",
    "nn.dot_product_attention(heads, heads * 2, heads, is_causal=True, scale=0.5)",
    *(f"jax.grad(lambda v: nn.{name}(v).sum())(x)" for name in ACTIVATIONS),
]

INITIALIZERS = [
    *(
        f"nn.initializers.{name}()(key, (3, 4), jnp.float32)"
        for name in (
            "glorot_normal glorot_uniform he_normal he_uniform kaiming_normal kaiming_uniform"
            " lecun_normal lecun_uniform normal orthogonal truncated_normal uniform xavier_normal"
            " xavier_uniform"
        ).split()
    ),
    "nn.initializers.constant(number)(key, (3, 4))",
    "nn.initializers.delta_orthogonal()(key, (3, 3, 4, 4))",
    "nn.initializers.ones(key, (3, 4))",
    "nn.initializers.zeros(key, (3, 4))",
    "nn.initializers.variance_scaling(2.0, 'fan_avg', 'normal')(key, (3, 4))",
]

IMAGE = [
    *(
        f"image_of.resize(image, (2, 5, 12, 3), '{method}')"
        for method in ("nearest", "linear", "cubic", "lanczos3", "lanczos5")
    ),
    "image_of.scale_and_translate(image[0], (6, 6, 3), (0, 1), jnp.array([0.7, 0.8]),"
    " jnp.array([0.1, 0.3]), 'linear')",
    "ops.segment_sum(x, index, 4)",
    "ops.segment_max(x, index, 4)",
    "ops.segment_min(x, index, 4)",
    "ops.segment_prod(x, index, 4)",
    "ops.segment_sum(x, index)",
]

TREES = [
    "tree_of.all(tree_of.map(lambda v: (v * 0 == 0).all(), tree))",
    "tree_of.broadcast(scalar, tree)",
    "tree_of.flatten(tree)",
    "tree_of.flatten_with_path(tree)",
    "tree_of.leaves(tree_of.map(jnp.sin, tree))",
    "tree_of.leaves_with_path(tree)",
    "tree_of.map(lambda v, w: v + w * 2, tree, tree)",
    "tree_of.map_with_path(lambda p, v: v * len(p), tree)",
    "tree_of.reduce(lambda a, b: a + b.sum(), tree, 0)",
    "tree_of.reduce_associative(lambda a, b: a.sum() + b.sum(), tree)",
    "tree_of.static(default=1).default",
    "tree_of.structure(tree)",
    "tree_of.transpose(tree_of.structure([0, 0]), None, [tree, tree])",
    "tree_of.unflatten(tree_of.structure(tree), [1, x * 2, 3])",
    "flatten_util.ravel_pytree(tree)[0]",
    "flatten_util.ravel_pytree(tree)[1](flatten_util.ravel_pytree(tree)[0] * 2)",
    "tree_util.all_leaves([x * 2, 1])",
    "tree_util.flatten_one_level([x, x * 2])[0]",
    "tree_util.flatten_one_level_with_keys([x, x * 2])[0]",
    "tree_util.is_tree_node(list)",
    "tree_util.keystr((tree_util.DictKey('a'),))",
    "tree_util.tree_all([x.sum() == x.sum()])",
    "tree_util.tree_broadcast(1, tree)",
    "tree_util.tree_flatten(tree)",
    "tree_util.tree_flatten_with_path(tree)",
    "tree_util.tree_leaves(tree)",
    "tree_util.tree_leaves_with_path(tree)",
    "tree_util.tree_map(lambda v: v * number, tree)",
    "tree_util.tree_map_with_path(lambda p, v: v + len(p), tree)",
    "tree_util.tree_reduce(lambda a, b: a * b.sum(), tree, 1.0)",
    "tree_util.tree_reduce_associative(lambda a, b: a.sum() + b.sum(), tree)",
    "tree_util.tree_structure(tree)",
    "tree_util.tree_transpose(tree_util.tree_structure([0]), tree_util.tree_structure((0, 0)),"
    " [(x, x * 2)])",
    "tree_util.tree_unflatten(tree_util.tree_structure(tree), [x, x * 2, 3])",
    "tree_util.treedef_children(tree_util.tree_structure(tree))",
    "tree_util.treedef_is_leaf(tree_util.tree_structure(x * 2))",
    "tree_util.treedef_tuple([tree_util.tree_structure(tree)])",
    "tree_util.Partial(jnp.add, x)(y)",
    "jax.jit(lambda f: f(2))(tree_util.Partial(jnp.add, x * 2))",
]


def registered_node(x: Any, y: Any) -> Any:
    class Pair:
        def __init__(self, one: Any, two: Any) -> None:
            self.one, self.two = one, two

    jax.tree_util.register_pytree_node(
        Pair, lambda p: ((p.one, p.two), None), lambda _, c: Pair(*c)
    )
    doubled = jax.tree.map(lambda v: v * 2, Pair(x, y))
    return jax.jit(lambda p: p.one + p.two)(doubled)


def registered_node_with_keys(x: Any) -> Any:
    class Box:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    jax.tree_util.register_pytree_with_keys(
        Box,
        lambda box: (((jax.tree_util.GetAttrKey("inside"), box.inside),), None),
        lambda _, children: Box(*children),
    )
    return [v for _, v in jax.tree_util.tree_leaves_with_path(Box(x * 2))]


def registered_classes(x: Any, number: Any) -> Any:
    @jax.tree_util.register_pytree_node_class
    class Scaled:
        def __init__(self, value: Any) -> None:
            self.value = value

        def tree_flatten(self) -> Any:
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, _: Any, children: Any) -> Any:
            return cls(*children)

    @jax.tree_util.register_pytree_with_keys_class
    class Keyed(Scaled):
        def tree_flatten_with_keys(self) -> Any:
            return ((jax.tree_util.GetAttrKey("value"), self.value),), None

    @jax.tree_util.register_static
    class Fixed:
        pass

    record = dataclasses.make_dataclass("Record", ["value", "size"], frozen=True)
    jax.tree_util.register_dataclass(record, ["value"], ["size"])
    nodes = [Scaled(x * number), Keyed(x + 1), Fixed(), record(x - 1, 3)]
    return jax.tree.leaves(jax.tree.map(lambda v: v * 2, nodes))


def saved_and_loaded(x: Any) -> Any:
    file = io.BytesIO()
    jnp.save(file, x * 2)
    file.seek(0)
    archive = io.BytesIO()
    jnp.savez(archive, a=x * 3)
    archive.seek(0)
    return jnp.load(file), np.load(archive)["a"]


def printed_with_options(x: Any) -> Any:
    before = jnp.get_printoptions()
    with jnp.printoptions(precision=2):
        inside = str(x * 2)
    jnp.set_printoptions(precision=3)
    after = str(x * 2)
    jnp.set_printoptions(**before)
    return inside, after


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    yield from expressions(
        "jax.nn",
        {"fhic": [f"nn.{name}(x)" for name in ACTIVATIONS], "fh": NN, "f": INITIALIZERS},
    )
    yield from expressions("jax.image and jax.ops", {"fhi": IMAGE})
    yield from expressions("pytrees", {"fi": TREES})
    yield from programs("pytrees", [registered_node, registered_node_with_keys, registered_classes])
    yield from programs("files and printing", [saved_and_loaded, printed_with_options], "fi")
