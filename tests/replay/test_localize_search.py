"""Localizing a fault that was planted in one instruction of a real model, on one side only."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from snaprt_replay.hlo.extract import Piece, extract
from snaprt_replay.hlo.hlo_module import instructions
from snaprt_replay.localize.findings import Localization, from_json, to_json
from snaprt_replay.localize.pipeline import search
from snaprt_replay.localize.program import FlatModule
from snaprt_replay.localize.session import Session, Side
from snaprt_replay.run.variants.variants import parse_variant
from snaprt_replay.run.workers import Workers

from snaprt.hlo.proto import HloModuleProto, parse

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
import planted_faults
from flat_programs import flat_program
from planted_faults import Plant

Change = Callable[[bytes], bytes]
Localize = Callable[..., Localization]


@pytest.fixture(scope="module")
def side(workers: Workers) -> Callable[..., Side]:
    """Return a function that makes a side whose compiler changes each module first."""

    def make(
        name: str, program: FlatModule, variant: str, change: Change = lambda hlo: hlo
    ) -> Side:
        parsed = parse_variant(variant)
        return Side(name, program, lambda hlo, inputs: workers.submit(parsed, change(hlo), inputs))

    return make


@dataclasses.dataclass(frozen=True, eq=False)
class Small:
    """A small program and its inputs."""

    program: FlatModule
    inputs: tuple[np.ndarray, ...]


@pytest.fixture(scope="module")
def small() -> Small:
    """Return the gradient of a perceptron of one hidden layer."""

    def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(jnp.tanh(x @ w) @ v)
        return -jnp.mean(logits[:, 1])

    shapes = ((7, 8), (8, 5), (6, 7))
    inputs = tuple(np.random.default_rng(one).normal(size=one).astype(np.float32) for one in shapes)
    return Small(flat_program(jax.value_and_grad(loss, (0, 1)), *inputs), inputs)


@pytest.fixture
def localize(side: Callable[..., Side]) -> Localize:
    """Return a function that searches a program compiled with a change against one without."""

    def run(
        program: FlatModule,
        inputs: Sequence[np.ndarray],
        change: Change,
        session: Session | None = None,
        reference: str = "cpu",
        **named: object,
    ) -> Localization:
        sides = (side("suspect", program, "cpu", change), side("right", program, reference))
        return search(session or Session(), sides, inputs, **named)

    return run


def first_named(program: FlatModule, opcode: str, place: int = 0) -> str:
    found = [
        one.name
        for line in planted_faults.lines(program)
        for one in line.work()
        if one.opcode == opcode
    ]
    return found[place]


def with_fault(plant: Plant) -> Change:
    return lambda hlo: planted_faults.planted(hlo, plant)


def assert_found(found: Localization, name: str) -> None:
    assert found.kind == "instruction", found.sentence
    assert [one.name for one in found.instructions] == [name], found.sentence


@pytest.mark.parametrize(
    "kind",
    [
        "dropped precision",
        "NaN for one value",
        pytest.param("wrong op", marks=pytest.mark.full),
        pytest.param("wrong reduction", marks=pytest.mark.full),
    ],
)
def test_a_broken_instruction_is_found_against_float64(
    localize: Localize, small: Small, kind: str
) -> None:
    name = planted_faults.candidates(small.program, kind)[1]
    fault = with_fault(Plant(kind, name))
    found = localize(small.program, small.inputs, fault, reference="f64")
    assert_found(found, name)
    assert "test_localize_search.py" in found.instructions[0].source
    # 3 log2(n) for the search, and one for each region on the way.
    assert found.compiles <= 3 * np.log2(found.instruction_count) + len(found.path)
    untapped, tapped = found.observer_effect or (0.0, 0.0)
    assert untapped > 1
    assert tapped > 1
    assert from_json(to_json(found)) == found


def test_a_broken_instruction_in_a_loop_is_found_with_its_iteration(localize: Localize) -> None:
    def function(w: jax.Array, xs: jax.Array) -> jax.Array:
        def cell(hidden: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            hidden = jnp.tanh(hidden @ w + x)
            return hidden, hidden * 2

        return jax.lax.scan(cell, jnp.zeros((2, 3)), xs)[1]

    shapes = ((3, 3), (4, 2, 3))
    inputs = [np.random.default_rng(one).normal(size=one).astype(np.float32) for one in shapes]
    program = flat_program(function, *inputs)
    name = first_named(program, "tanh")
    found = localize(program, inputs, with_fault(Plant("wrong op", name)))
    assert_found(found, name)
    assert [one.rpartition(" ")[2] for one in found.instructions[0].frame] == ["0"]


def test_an_iteration_that_alone_goes_wrong_is_the_one_that_is_found(localize: Localize) -> None:
    def function(x: jax.Array) -> jax.Array:
        # 2 is the one number whose square is also its double.
        return jax.lax.fori_loop(
            0, 5, lambda i, x: jnp.where(i < 3, 2.0, 1.5) * jnp.square(x) / x, x
        )

    x = np.full(4, 2.0, np.float32)
    program = flat_program(function, x)
    name = first_named(program, "multiply")
    found = localize(program, [x], lambda hlo: _swap_opcode(hlo, "multiply", "add", name))
    assert_found(found, name)
    assert found.instructions[0].frame[0].endswith("iteration 1")


def test_the_branch_that_was_taken_is_entered(localize: Localize) -> None:
    def function(flag, x):
        return jax.lax.cond(flag, lambda x: jnp.sin(x) * 2, lambda x: jnp.cos(x) + 1, x)

    x = np.linspace(0.1, 1, 5, dtype=np.float32)
    flag = np.asarray(False)
    program = flat_program(function, flag, x)
    found = localize(program, [flag, x], lambda hlo: _swap_opcode(hlo, "cosine", "sine"))
    assert found.instructions[0].opcode == "cosine"
    assert "branch" in found.instructions[0].frame[0]


def _swap_opcode(hlo: bytes, opcode: str, other: str, name: str = "") -> bytes:
    module = parse(HloModuleProto, hlo, "test")
    for instruction in instructions(module):
        if instruction.opcode == opcode and name in ("", instruction.name):
            instruction.opcode = other
    return module.SerializeToString()


def test_an_error_that_vanishes_on_cutting_is_called_an_interaction(localize: Localize) -> None:
    x = np.linspace(0.1, 1, 6, dtype=np.float32)
    program = flat_program(lambda x: jnp.log(jnp.exp(jnp.sin(x)) + 1), x)

    def break_fusion(hlo: bytes) -> bytes:
        """Break `exp` where one module holds all it would be fused with, and shows none of it."""
        module = parse(HloModuleProto, hlo, "test")
        entry = next(one for one in module.computations if one.id == module.entry_computation_id)
        opcodes = {one.opcode for one in entry.instructions}
        root = next(one for one in entry.instructions if one.id == entry.root_id)
        whole = {"sine", "exponential"} <= opcodes and len(root.operand_ids) == 1
        return _swap_opcode(hlo, "exponential", "cosine") if whole else hlo

    found = localize(program, [x], break_fusion)
    assert found.kind == "interaction"
    assert "exponential" in [one.opcode for one in found.instructions]
    assert "when separated" in found.sentence


def test_what_goes_wrong_only_because_it_was_cut_out_is_not_accused(localize: Localize) -> None:
    x = np.linspace(0.1, 1, 6, dtype=np.float32)
    program = flat_program(lambda x: jnp.log(jnp.exp(jnp.sin(x)) + 1), x)

    def break_pieces(hlo: bytes) -> bytes:
        """Break `log` always, and `exp` where it is cut out."""
        module = parse(HloModuleProto, hlo, "test")
        entry = next(one for one in module.computations if one.id == module.entry_computation_id)
        is_cut = len(entry.program_shape.parameters) > 1
        return _swap_opcode(
            _swap_opcode(hlo, "exponential", "cosine") if is_cut else hlo, "log", "sine"
        )

    found = localize(program, [x], break_pieces)
    assert_found(found, first_named(program, "log"))


def test_where_only_cutting_goes_wrong_no_operation_is_accused(localize: Localize) -> None:
    x = np.linspace(0.1, 1, 6, dtype=np.float32)
    program = flat_program(lambda x: jnp.log(jnp.exp(jnp.sin(x)) + 1), x)

    def break_pieces(hlo: bytes) -> bytes:
        """Add up to something wrong, but differently in the pieces."""
        module = parse(HloModuleProto, hlo, "test")
        entry = next(one for one in module.computations if one.id == module.entry_computation_id)
        is_cut = len(entry.program_shape.parameters) > 1
        return _swap_opcode(hlo, *(("sine", "cosine") if is_cut else ("log", "sine")))

    found = localize(program, [x], break_pieces)
    assert found.kind == "candidates"
    assert "no operation can be proven" in found.sentence


def test_rounding_that_is_amplified_is_no_instruction_s_fault(localize: Localize) -> None:
    def variance(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.mean(x * x) - jnp.square(jnp.mean(x)))  # how not to

    x = 1000 + np.linspace(0.1, 1, 6, dtype=np.float32)
    found = localize(flat_program(variance, x), [x], lambda hlo: hlo, reference="f64")
    assert found.kind == "amplification"
    assert found.instructions[0].opcode in ("add", "subtract")
    assert "ill-conditioned" in found.sentence


def test_sides_that_agree_have_nothing_to_localize(localize: Localize, small: Small) -> None:
    found = localize(small.program, small.inputs, lambda hlo: hlo, reference="f64")
    assert found.kind == "nothing"
    assert found.compiles == 2


def test_the_first_operation_that_makes_a_nan_of_finite_values_is_found(
    localize: Localize,
) -> None:
    def function(x):
        masked = jnp.where(x > 0, x, -jnp.inf)  # an infinity that is meant
        weights = jnp.exp(masked - masked.max())
        return jnp.sqrt(weights.sum() - 10.0) * x, jnp.log(x[0] - x[0]) * 0.0

    x = np.linspace(0.1, 1, 6, dtype=np.float32)
    found = localize(flat_program(function, x), [x], lambda hlo: hlo, find="nonfinite")
    assert found.kind == "instruction"
    assert found.instructions[0].opcode == "sqrt"
    assert "produces NaN from finite inputs" in found.sentence


def test_a_nan_that_comes_with_the_inputs_is_no_operation_s_fault(localize: Localize) -> None:
    x = np.asarray([1, np.nan], np.float32)
    found = localize(flat_program(jnp.sin, x), [x], lambda hlo: hlo)
    assert found.kind == "nothing"
    assert "come from the inputs" in found.sentence


def take_out_of_bounds(x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.take(x, jnp.int32(x.sum()) + 9, mode="fill"))


def mark_in_a_scan(x: jax.Array) -> jax.Array:
    def step(i: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(i + x < 2.0, x + 1.0, jnp.nan)

    return jax.lax.fori_loop(0, 3, step, x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: jnp.log(jnp.diag(jnp.linalg.cholesky(-jnp.diag(x)))).sum(), "does not hold"),
        (lambda x: jax.scipy.linalg.solve(-jnp.diag(x), x, assume_a="pos"), "does not hold"),
        (take_out_of_bounds, "does not hold"),
        (
            lambda x: jnp.sin(x.at[jnp.int32(x) + 9].get(mode="fill", fill_value=jnp.nan)),
            "not hold",
        ),
        (lambda x: jnp.where(x > 0.7, jnp.nan, x) * 2.0, "holds"),
        (mark_in_a_scan, "does not hold"),
    ],
)
def test_a_nan_that_is_a_constant_begins_where_the_inputs_choose_it(
    localize: Localize, function: Callable, words: str
) -> None:
    x = np.linspace(0.5, 1, 4, dtype=np.float32)
    found = localize(flat_program(function, x), [x], lambda hlo: hlo)
    assert [one.opcode for one in found.instructions] == ["select"], found.sentence
    assert "takes NaN, a constant of the program, where its predicate " in found.sentence
    assert found.sentence.endswith(words)


def test_a_nan_that_the_program_returns_for_any_input_is_no_operation_s_fault(
    localize: Localize,
) -> None:
    x = np.linspace(0.5, 1, 4, dtype=np.float32)
    program = flat_program(lambda x: jnp.where(jnp.arange(4) < 2, x, jnp.nan), x)
    found = localize(program, [x], lambda hlo: hlo)
    assert found.kind == "nothing"
    assert "constants of the program" in found.sentence


def test_what_a_function_leaves_uncomputed_is_no_difference(localize: Localize) -> None:
    # LAPACK returns the vectors as they were in memory where only the values are requested.
    def function(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.linalg.svd(x, compute_uv=False))

    x = np.random.default_rng(0).normal(size=(40, 40)).astype(np.float32)
    program = flat_program(function, x)
    found = localize(program, [x], lambda hlo: _swap_opcode(hlo, "tanh", "sine"))
    assert_found(found, first_named(program, "tanh"))


def test_a_nan_that_marks_an_overflow_is_followed_to_the_overflow(localize: Localize) -> None:
    def function(x: jax.Array) -> jax.Array:
        grown = jnp.exp(x * 1000.0)
        return jnp.where(jnp.isinf(grown), jnp.nan, grown)

    x = np.linspace(0.5, 1, 4, dtype=np.float32)
    found = localize(flat_program(function, x), [x], lambda hlo: hlo)
    assert [one.opcode for one in found.instructions] == ["exponential"], found.sentence


def test_an_infinity_behind_a_nan_is_followed_to_its_origin_in_a_loop(localize: Localize) -> None:
    def function(x):
        grown = jax.lax.fori_loop(0, 12, lambda _, x: x * x, x)
        return jnp.sin(x) + (grown - grown)

    x = np.asarray([2.0, 0.5], np.float32)
    found = localize(flat_program(function, x), [x], lambda hlo: hlo)
    assert found.instructions[0].opcode == "multiply"
    assert found.instructions[0].frame[0].endswith("iteration 6")  # 2 ** 128 is the first


def softmax_that_overflows(x: jax.Array) -> jax.Array:
    grown = jnp.exp(x * 1000.0)
    return grown / grown.sum()  # inf / inf


def oscillate(x: jax.Array, times: int) -> jax.Array:
    for _ in range(times):
        x = jnp.sin(x) + 1.0
    return x


def overflow_in_a_scan(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = softmax_that_overflows((carry + i) / 25)
        return y, y.max()

    return jax.lax.scan(step, x, jnp.arange(5.0))


def overflow_an_iteration_earlier(x: jax.Array) -> jax.Array:
    def step(i: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.exp(jnp.where(i == 2, 1000.0, 1.0)) + jnp.sin(x)

    return jax.lax.fori_loop(0, 6, step, x)


def overflow_in_the_inner_loop(x: jax.Array) -> jax.Array:
    def outer(i: jax.Array, x: jax.Array) -> jax.Array:
        def inner(j: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sin(jnp.exp(jnp.where(i * 3 + j == 4, 1000.0, 0.0)) + x)

        return jax.lax.fori_loop(0, 3, inner, x) * 0.5

    return jax.lax.fori_loop(0, 4, outer, x)


def overflow_before_the_loop_that_uses_it(x: jax.Array) -> jax.Array:
    grown = jnp.exp(x * 1000.0)

    def step(i: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.where(i == 2, grown - grown, 0.0)

    return jax.lax.fori_loop(0, 4, step, x)


def overflow_beside_a_running_maximum(x: jax.Array) -> jax.Array:
    def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        largest, total = state  # `largest` starts from an infinity that is meant
        score = jnp.exp(x * jnp.where(i == 1, 1000.0, 1.0))
        new = jnp.maximum(largest, score)
        return new, total + jnp.tanh(score - new)

    return jax.lax.fori_loop(0, 3, step, (jnp.full_like(x, -jnp.inf), x))[1]


def overflow_in_a_branch(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0] > 0, softmax_that_overflows, jnp.sin, x) + 1.0


def overflow_in_a_branch_in_a_loop(x: jax.Array) -> jax.Array:
    def step(i: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(i == 1, softmax_that_overflows, jnp.sin, x)

    return jax.lax.fori_loop(0, 3, step, x)


@pytest.mark.parametrize(
    ("function", "frame"),
    [
        (softmax_that_overflows, []),
        (lambda x: oscillate(softmax_that_overflows(oscillate(x, 3)), 20), []),
        (lambda x: oscillate(jax.jit(softmax_that_overflows)(oscillate(x, 13)), 17), []),
        (overflow_in_a_scan, ["iteration 2"]),
        (overflow_an_iteration_earlier, ["iteration 2"]),
        (overflow_in_the_inner_loop, ["iteration 1", "iteration 1"]),
        (overflow_before_the_loop_that_uses_it, []),
        (overflow_beside_a_running_maximum, ["iteration 1"]),
        (overflow_in_a_branch, ["branch 1"]),
        (overflow_in_a_branch_in_a_loop, ["iteration 1", "branch 1"]),
    ],
)
def test_an_infinity_that_became_a_nan_close_by_is_followed_to_its_origin(
    localize: Localize, function: Callable, frame: list[str]
) -> None:
    x = np.linspace(0.5, 1, 4, dtype=np.float32)
    found = localize(flat_program(function, x), [x], lambda hlo: hlo, find="nonfinite")
    assert [one.opcode for one in found.instructions] == ["exponential"], found.sentence
    assert "produces an infinity from finite inputs" in found.sentence
    scopes = [" ".join(scope.split()[1:]) for scope in found.instructions[0].frame]
    assert scopes == frame


@pytest.mark.parametrize(
    "function",
    [
        lambda x: -jnp.log(softmax_that_overflows(x / 10)).mean(),
        lambda x: jax.lax.fori_loop(0, 3, lambda i, x: softmax_that_overflows(x / 10), x),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_where_only_float64_is_wide_enough_the_overflow_is_found(
    localize: Localize, function: Callable
) -> None:
    x = np.linspace(0.5, 1, 4, dtype=np.float32)
    found = localize(flat_program(function, x), [x], lambda hlo: hlo, reference="f64")
    assert found.kind == "instruction"
    assert found.instructions[0].opcode == "exponential"
    assert "produces an infinity from finite inputs" in found.sentence
    assert "the outputs of right are finite" in found.notes[0]


def test_where_float64_is_too_narrow_too_but_elsewhere_the_infinity_is_found(
    localize: Localize,
) -> None:
    # exp(-200) is 0 in float32 alone, exp(-1000) in both.
    x = np.asarray([[0, -200], [0, -1000]], np.float32)
    program = flat_program(lambda x: jnp.log(jax.nn.softmax(x)) * 0.5, x)
    found = localize(program, [x], lambda hlo: hlo, reference="f64")
    assert [one.opcode for one in found.instructions] == ["log"], found.sentence
    assert "produces an infinity from finite inputs" in found.sentence
    assert "have NaN or infinity in fewer or other places" in found.notes[0]


def test_infinities_that_belong_there_do_not_hide_what_is_amplified(localize: Localize) -> None:
    def masked_variance(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(x > 1001, x, -jnp.inf), jnp.mean(x * x) - jnp.square(jnp.mean(x))

    x = 1000 + np.linspace(0.1, 1.5, 6, dtype=np.float32)
    found = localize(flat_program(masked_variance, x), [x], lambda hlo: hlo, reference="f64")
    assert found.kind == "amplification"


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_infinity_that_is_a_finite_float64_is_an_overflow_and_no_difference(
    localize: Localize,
) -> None:
    x = np.linspace(0.5, 1, 4, dtype=np.float32)
    program = flat_program(lambda x: jnp.sin(x) * jnp.exp(x * 100), x)
    found = localize(program, [x], lambda hlo: hlo, reference="f64")
    assert [one.opcode for one in found.instructions] == ["exponential"]
    assert found.notes == ()


def test_a_difference_that_is_asked_for_is_no_search_for_an_overflow(localize: Localize) -> None:
    x = np.linspace(0.5, 1, 4, dtype=np.float32)
    program = flat_program(lambda x: softmax_that_overflows(x / 10), x)
    found = localize(program, [x], lambda hlo: hlo, reference="f64", find="difference")
    assert found.kind == "amplification"


def test_a_spent_budget_leaves_a_search_that_goes_on_later(
    localize: Localize, small: Small, tmp_path: Path
) -> None:
    name = first_named(small.program, "dot", 1)
    fault = with_fault(Plant("NaN for one value", name))
    spent = localize(small.program, small.inputs, fault, Session(tmp_path, budget=0))
    assert spent.kind == "unfinished"
    told: list[str] = []

    def stop(line: str) -> None:
        told.append(line)
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        localize(small.program, small.inputs, fault, Session(tmp_path, tell=stop))
    session = Session(tmp_path)
    assert_found(localize(small.program, small.inputs, fault, session), name)
    assert session.remembered >= 4  # the whole program, and the first round
    again = Session(tmp_path)
    assert_found(localize(small.program, small.inputs, fault, again), name)
    assert again.compiles == 0
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
    damaged = Session(tmp_path)
    assert_found(localize(small.program, small.inputs, fault, damaged), name)
    assert damaged.compiles > 0


def test_pieces_give_the_values_that_the_whole_program_gives(
    workers: Workers, small: Small
) -> None:
    line = small.program.entry
    work = line.work()
    middle, last = work[len(work) // 2], work[-1]
    cpu = parse_variant("cpu")

    def run(made, values) -> Sequence[np.ndarray]:
        inputs = [values[one] for piece in made.parameters for one in piece]
        outcome = workers.run(cpu, made.module.SerializeToString(), inputs)
        assert outcome.outputs is not None, outcome.failure
        return outcome.outputs

    numbers = {one.id: one.parameter_number for one in line.order if one.opcode == "parameter"}
    position = line.position[middle.id] + 1
    live = line.live(position)
    whole = extract(small.program.module, line.computation, [Piece((*live, last.id))])
    arguments = {one: small.inputs[numbers[one.instruction]] for one in whole.parameters[0]}
    values = dict(zip(whole.results[0], run(whole, arguments), strict=True))
    rest = extract(small.program.module, line.computation, [Piece((last.id,), frozenset(live))])
    assert rest.instructions < whole.instructions
    (result,) = run(rest, {**arguments, **values})
    np.testing.assert_allclose(result, values[whole.results[0][-1]], rtol=1e-5)
