"""Real models lowered to HLO, and faults planted in one instruction of them, as a compiler bug is.

A plant is keyed by the instruction's name, so that it acts wherever that instruction is compiled:
in the whole program and in any piece cut out of it. Whoever looks for it is not told.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from snaprt_replay.hlo.hlo_module import Editor, root_instruction
from snaprt_replay.localize.program import FlatModule, Line, flatten

from snaprt import jaxapi
from snaprt.hlo.literals import array_to_literal
from snaprt.hlo.proto import HloComputationProto, HloModuleProto, XlaMessage, parse, serialize

_FLOATS = {10: np.float16, 11: np.float32, 12: np.float64, 16: ml_dtypes.bfloat16}
_PRED, _F32 = 1, 11


# --- the models: what takes one step of training ---


def _normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    seed = [len(shape), *shape]
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def mlp() -> tuple[Callable, tuple]:
    """Return the gradient of a three-layer perceptron with cross-entropy, and its arguments."""
    sizes = (24, 32, 32, 10)
    layers = [
        {"w": _normal(one, other, scale=one**-0.5), "b": _normal(other, scale=0.1)}
        for one, other in itertools.pairwise(sizes)
    ]

    def loss(layers, x, labels):
        for layer in layers[:-1]:
            x = jax.nn.gelu(x @ layer["w"] + layer["b"])
        logits = jax.nn.log_softmax(x @ layers[-1]["w"] + layers[-1]["b"])
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))

    labels = np.arange(16, dtype=np.int32) % 10
    return jax.value_and_grad(loss), (layers, _normal(16, 24), labels)


def cnn() -> tuple[Callable, tuple]:
    """Return the gradient of two convolutions, pooling and a dense layer, and its arguments."""
    parameters = {
        "first": _normal(3, 3, 3, 8, scale=0.2),
        "second": _normal(3, 3, 8, 8, scale=0.2),
        "dense": _normal(8 * 4 * 4, 10, scale=0.1),
        "scale": 1 + _normal(8, scale=0.1),
    }

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(p, x, y):
        x = jax.nn.relu(convolve(x, p["first"]))
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        x = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"]
        x = jax.nn.silu(convolve(x, p["second"]))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean((x.reshape(x.shape[0], -1) @ p["dense"] - y) ** 2)

    return jax.value_and_grad(loss), (parameters, _normal(4, 8, 8, 3), _normal(4, 10))


def _attention_block(p, x):
    def normalize(x, scale):
        centred = x - x.mean(-1, keepdims=True)
        return scale * centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    q, k, v = jnp.split(normalize(x, p["n1"]) @ p["qkv"], 3, axis=-1)
    q, k, v = (one.reshape(*one.shape[:2], 4, -1).swapaxes(1, 2) for one in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
    x = x + mixed @ p["o"]
    return x + jax.nn.gelu(normalize(x, p["n2"]) @ p["up"]) @ p["down"]


def transformer(layers: int = 2) -> tuple[Callable, tuple]:
    """Return the gradient of a transformer on tokens, and its arguments."""
    width = 32
    blocks = [
        {
            "n1": 1 + _normal(width, scale=0.1),
            "n2": 1 + _normal(width, scale=0.05),
            "qkv": _normal(width, 3 * width, scale=0.2),
            "o": _normal(width, width, scale=0.2),
            "up": _normal(width, 2 * width, scale=0.2 + layer / 100),
            "down": _normal(2 * width, width, scale=0.2 + layer / 100),
        }
        for layer in range(layers)
    ]
    embedding = _normal(50, width)

    def loss(parameters, tokens):
        embedding, blocks = parameters
        x = embedding[tokens[:, :-1]]
        for block in blocks:
            x = _attention_block(block, x)
        logits = jax.nn.log_softmax(x @ embedding.T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))

    tokens = np.random.default_rng(0).integers(0, 50, (2, 13)).astype(np.int32)
    return jax.value_and_grad(loss), ((embedding, blocks), tokens)


def rnn() -> tuple[Callable, tuple]:
    """Return the gradient of a gated recurrent network run with `scan`, and its arguments."""
    parameters = {name: _normal(16 + index, 16, scale=0.2)[:16] for index, name in enumerate("zrh")}
    inputs = {name: _normal(8 + index, 16, scale=0.3)[:8] for index, name in enumerate("zrh")}

    def loss(p, xs, target):
        recurrent, inward = p

        def cell(hidden, x):
            gate = {n: x @ inward[n] + hidden @ recurrent[n] for n in "zr"}
            z, r = jax.nn.sigmoid(gate["z"]), jax.nn.sigmoid(gate["r"])
            candidate = jnp.tanh(x @ inward["h"] + (r * hidden) @ recurrent["h"])
            hidden = (1 - z) * hidden + z * candidate
            return hidden, hidden

        last, hidden = jax.lax.scan(cell, jnp.zeros((4, 16)), xs)
        return jnp.mean((hidden - target) ** 2) + jnp.sum(last**2) / 64

    return jax.value_and_grad(loss), ((parameters, inputs), _normal(9, 4, 8), _normal(9, 4, 16))


MODELS: Mapping[str, Callable[[], tuple[Callable, tuple]]] = {
    "MLP": mlp,
    "CNN": cnn,
    "transformer": transformer,
    "scan RNN": rnn,
}


LARGE: Mapping[str, Callable[[], tuple[Callable, tuple]]] = {
    "large transformer": lambda: transformer(3),
}
"""Of about 1,000 instructions, which take a while."""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A lowered model.

    Args:
        name: Its key in `MODELS` or `LARGE`.
        program: Its flat HLO.
        inputs: One array for each parameter.
    """

    name: str
    program: FlatModule
    inputs: tuple[np.ndarray, ...]


def lower(name: str) -> Model:
    """Lower one of `MODELS` or `LARGE`."""
    function, arguments = {**MODELS, **LARGE}[name]()
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    proto = jaxapi.module_to_hlo_proto(lowered.compiler_ir("stablehlo"))
    module = parse(HloModuleProto, proto, name)
    inputs = tuple(np.asarray(one) for one in jax.tree.leaves(arguments))
    return Model(name, flatten(module), inputs)


# --- the faults ---


@dataclasses.dataclass(frozen=True)
class Plant:
    """One fault.

    Args:
        kind: A key of `KINDS`.
        instruction: The name of the instruction that it breaks.
        seed: Decides where the operation has a choice: which element, which dimension.
    """

    kind: str
    instruction: str
    seed: int = 0


_Break = Callable[["_Broken"], Sequence[XlaMessage]]


@dataclasses.dataclass(eq=False)
class _Broken:
    """An instruction about to be broken; `result` makes what stands in its place."""

    module: XlaMessage
    editor: Editor
    instruction: XlaMessage
    random: random.Random
    added: list[XlaMessage]

    def new(self, opcode: str, shape: XlaMessage, *operands: XlaMessage, **named) -> XlaMessage:
        return self.editor.new(opcode, shape, operands, like=self.instruction, **named)

    def constant(self, value: np.ndarray) -> XlaMessage:
        literal = array_to_literal(value)
        constant = self.new("constant", literal.shape)
        constant.literal.CopyFrom(literal)
        return constant

    def behind(self, *made: XlaMessage) -> list[XlaMessage]:
        """Let the last of `made` be what the users of the instruction read."""
        own = self.editor.new_id(self.instruction)
        old, self.instruction.id = self.instruction.id, own
        for one in made:
            one.operand_ids[:] = [own if operand == old else operand for operand in one.operand_ids]
        made[-1].id = old
        return [self.instruction, *made]


_SWAPPED = {
    "add": "subtract",
    "subtract": "add",
    "multiply": "add",
    "divide": "multiply",
    "maximum": "minimum",
    "minimum": "maximum",
    "and": "or",
    "or": "and",
    "tanh": "sine",
    "exponential": "exponential-minus-one",
    "exponential-minus-one": "exponential",
    "log": "log-plus-one",
    "log-plus-one": "log",
    "negate": "abs",
    "sqrt": "rsqrt",
    "rsqrt": "sqrt",
    "logistic": "tanh",
    "erf": "tanh",
}
_SWAPPED_OPERANDS = ("select", "compare")


def _wrong_operation(broken: _Broken) -> Sequence[XlaMessage]:
    one = broken.instruction
    if one.opcode in _SWAPPED:
        one.opcode = _SWAPPED[one.opcode]
    else:
        *first, left, right = one.operand_ids
        one.operand_ids[:] = [*first, right, left]
    return [one]


def _dropped_precision(broken: _Broken) -> Sequence[XlaMessage]:
    """Round to the 8 bits of mantissa that bfloat16 has."""
    rounded = broken.new("reduce-precision", broken.instruction.shape, broken.instruction)
    rounded.exponent_bits, rounded.mantissa_bits = 8, 7
    return broken.behind(rounded)


def _off_by_one(broken: _Broken) -> Sequence[XlaMessage]:
    """Let every element be its neighbor's: it is read from one further on."""
    shape = broken.instruction.shape
    long = [axis for axis, size in enumerate(shape.dimensions) if size > 1]
    axis = broken.random.choice(long)
    order = [(index + 1) % shape.dimensions[axis] for index in range(shape.dimensions[axis])]
    parts = []
    for start, stop in ((1, len(order)), (0, 1)):
        part = type(shape)()
        part.CopyFrom(shape)
        part.dimensions[axis] = stop - start
        cut = broken.new("slice", part, broken.instruction)
        for index, size in enumerate(shape.dimensions):
            bounds = (start, stop) if index == axis else (0, size)
            cut.slice_dimensions.add(start=bounds[0], limit=bounds[1], stride=1)
        parts.append(cut)
    return broken.behind(*parts, broken.new("concatenate", shape, *parts, dimensions=[axis]))


def _wrong_reduction(broken: _Broken) -> Sequence[XlaMessage]:
    by_id = {one.id: one for one in broken.module.computations}
    computation = by_id[broken.instruction.called_computation_ids[0]]
    copy = HloComputationProto()
    copy.CopyFrom(computation)
    copy.id = max(by_id) + 1
    copy.name = f"{computation.name}.wrong"
    renamed = {}
    for one in copy.instructions:
        renamed[one.id] = (copy.id << 32) | (one.id & 0xFFFFFFFF)
        one.name = f"{one.name}.wrong"
    for one in copy.instructions:
        one.id = renamed[one.id]
        one.operand_ids[:] = [renamed[operand] for operand in one.operand_ids]
    copy.root_id = renamed[copy.root_id]
    root = root_instruction(copy)
    root.opcode = {"add": "maximum", "maximum": "add", "minimum": "maximum"}[root.opcode]
    broken.added.append(copy)
    broken.instruction.called_computation_ids[0] = copy.id
    return [broken.instruction]


def _one_nan(broken: _Broken) -> Sequence[XlaMessage]:
    """Let one element be NaN."""
    shape = broken.instruction.shape
    where = np.zeros(tuple(shape.dimensions), np.bool_)
    where.reshape(-1)[broken.random.randrange(where.size)] = True
    mask = broken.constant(where)
    dtype = _FLOATS[shape.element_type]
    nan = broken.constant(np.full(where.shape, np.nan, dtype))
    return broken.behind(mask, nan, broken.new("select", shape, mask, nan, broken.instruction))


def _is_float(one: XlaMessage) -> bool:
    return one.shape.element_type in _FLOATS


def _is_rounding(one: XlaMessage) -> bool:
    return one.shape.element_type == _F32 and one.opcode in (
        *("add", "subtract", "multiply", "divide", "dot", "convolution", "reduce", "tanh"),
        *("exponential", "log", "sqrt", "rsqrt", "logistic", "erf"),
    )


_MOVING = (
    *("slice", "dynamic-slice", "dynamic-update-slice", "gather", "pad", "concatenate"),
    *("transpose", "reverse", "reshape", "scatter"),
)

# Kind -> what it can break, and how.
KINDS: Mapping[str, tuple[Callable[[XlaMessage], bool], _Break]] = {
    "wrong op": (
        lambda one: one.opcode in _SWAPPED or one.opcode in _SWAPPED_OPERANDS,
        _wrong_operation,
    ),
    "dropped precision": (_is_rounding, _dropped_precision),
    "off-by-one slice": (
        lambda one: one.opcode in _MOVING and any(size > 1 for size in one.shape.dimensions),
        _off_by_one,
    ),
    "wrong reduction": (
        lambda one: one.opcode == "reduce" and one.shape.element_type == _F32,
        _wrong_reduction,
    ),
    "NaN for one value": (_is_float, _one_nan),
}


def lines(program: FlatModule) -> Iterator[Line]:
    """Yield the program's entry and the bodies of its loops."""
    yield program.entry
    for computation in program.module.computations:
        for one in computation.instructions:
            if one.opcode == "while":
                yield program.line(one.called_computation_ids[0])


def candidates(program: FlatModule, kind: str) -> list[str]:
    """Return the names of the instructions that a kind of fault can break."""
    breakable, _ = KINDS[kind]
    return [one.name for line in lines(program) for one in line.work() if breakable(one)]


def planted(hlo: bytes, plant: Plant) -> bytes:
    """Return a module as the compiler with the fault takes it; unchanged if it does not apply."""
    module = parse(HloModuleProto, hlo, "module")
    editor = Editor(module)
    _, change = KINDS[plant.kind]
    added: list[XlaMessage] = []

    def replace(one: XlaMessage) -> Sequence[XlaMessage]:
        if one.name != plant.instruction:
            return [one]
        return change(_Broken(module, editor, one, random.Random(plant.seed), added))

    for computation in module.computations:
        editor.replace_each(computation, replace)
    # A computation comes before those that call it.
    ordered = [
        *added,
        *(HloComputationProto.FromString(one.SerializeToString()) for one in module.computations),
    ]
    module.ClearField("computations")
    module.computations.extend(ordered)
    return serialize(module)


def draw(program: FlatModule, kind: str, seed: int) -> Iterator[Plant]:
    """Yield plants of one kind, no instruction twice, in random order."""
    names = candidates(program, kind)
    generator = random.Random(f"{kind} {seed}")
    generator.shuffle(names)
    for name in names:
        yield Plant(kind, name, generator.randrange(1 << 30))
