"""Two programs of which one was edited in its text: only what was edited is accused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from snaprt_replay.hlo import hlo_module
from snaprt_replay.localize.alignment import aligned
from snaprt_replay.localize.edits import Edit, edits_between, substituted
from snaprt_replay.localize.findings import Localization, from_json, to_json
from snaprt_replay.localize.matching import compare
from snaprt_replay.localize.pipeline import search
from snaprt_replay.localize.program import FlatModule, flatten
from snaprt_replay.localize.session import Session, Side
from snaprt_replay.run.variants.variants import parse_variant
from snaprt_replay.run.workers import Workers

from snaprt import jaxapi
from snaprt.hlo.proto import HloModuleProto, parse

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
import text_plants

X = np.linspace(-1.0, 1.5, 12, dtype=np.float32).reshape(3, 4)


def model(x: jax.Array) -> tuple[jax.Array, ...]:
    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x * 1.5) + i

    looped = jax.lax.fori_loop(0, 3, body, x)
    branched = jax.lax.cond(x[0, 0] < 0, jnp.sin, jnp.cos, looped)
    either = jax.nn.relu(branched) - jax.nn.relu(-branched * 2.0)
    chosen = x[jnp.argmax(either, axis=0) % 3]
    ordered = jnp.sort(either, axis=-1)[:, 1:3]
    return ordered.sum(0), jnp.exp(-chosen) / 3.0, looped.max(-1)


def program_of(text: str) -> FlatModule:
    proto = jaxapi.module_to_hlo_proto(jaxapi.parse_module(text.encode()))
    return flatten(parse(HloModuleProto, proto, "test"))


@pytest.fixture(scope="module")
def text() -> text_plants.Text:
    """Return the text of `model`."""
    return text_plants.read(jax.jit(model).lower(X).as_text())


def edits_of(one: FlatModule, other: FlatModule) -> list[Edit]:
    """Return the edits, and assert that they are all that lies between the programs."""
    compared = aligned(one, other)
    ours, theirs = compared.lines
    edits = edits_between(compared)
    made = substituted(compared, frozenset(pair for each in edits for pair in each.pairs))
    hlo_module.verify(made.module)
    assert compare(made.entry, theirs).is_same
    none = substituted(compared, frozenset())
    hlo_module.verify(none.module)
    assert compare(none.entry, ours).is_same
    return edits


NOT_IN_MODEL = (
    *("element of a constant", "padding", "attribute", "dropped rounding", "state of a loop"),
    *("order of results", "another result", "signedness", "bits of a constant", "order of indices"),
    *("removed conversion",),
)


def sizes_of_states(program: FlatModule) -> list[int]:
    found = hlo_module.instructions(program.module)
    return [len(one.shape.tuple_shapes) for one in found if one.opcode == "while"]


def test_a_program_has_no_edit_against_itself_whatever_its_names_and_lines_are(
    text: text_plants.Text,
) -> None:
    plain = "\n".join(text.lines)
    assert edits_of(program_of(text.located), program_of(plain)) == []
    assert edits_of(program_of(plain), program_of(plain)) == []


@pytest.mark.parametrize("kind", text_plants.ALL_KINDS)
def test_an_edit_of_any_kind_is_the_only_one_that_is_named(
    text: text_plants.Text, kind: str
) -> None:
    original = program_of(text.located)
    tried = 0
    for plant in text_plants.draw(text, kind, seed=1):
        try:
            edited = program_of(plant.text)
        except ValueError:
            continue  # not every edit is a valid program
        if compare(original.entry, edited.entry).is_same:
            continue  # such as of a branch's operand that is not used
        edits = edits_of(original, edited)
        if len(edits) > 1 and sizes_of_states(original) != sizes_of_states(edited):
            continue  # a value that does not change any more is none of the loop's state
        named = [one for edit in edits for one in edit.places]
        assert named, plant
        for place in named:
            names = place.op_name.rpartition("/")[2].split(";")
            # What was folded to a constant that the program has already is known by its readers.
            names += [one.partition(".")[0] for one in place.operands]
            assert plant.accepted.intersection(names), (plant.before, plant.after, place)
        tried += 1
        if tried == 4:
            break
    assert tried or kind in NOT_IN_MODEL


def edited(text: text_plants.Text, old: str, new: str, count: int = 1) -> FlatModule:
    plain = "\n".join(text.lines)
    assert old in plain
    return program_of(plain.replace(old, new, count))


def test_a_function_that_is_called_twice_is_one_operation(text: text_plants.Text) -> None:
    (edit,) = edits_of(
        program_of(text.located),
        edited(text, "stablehlo.maximum %arg0", "stablehlo.minimum %arg0"),
    )
    assert [one.opcode for one in edit.places] == ["maximum"]
    assert len(edit.pairs) == 2
    assert edit.reasons == ("opcode maximum, minimum in the reference",)


def test_a_function_that_does_nothing_any_more_is_one_operation_too(
    text: text_plants.Text,
) -> None:
    (edit,) = edits_of(
        program_of(text.located), edited(text, "stablehlo.maximum %arg0", "stablehlo.add %arg0")
    )
    assert [one.opcode for one in edit.places] == ["maximum"]
    assert edit.reasons == ("is not in the reference",)


def test_an_edit_in_a_loop_or_a_sort_says_where(text: text_plants.Text) -> None:
    original = program_of(text.located)
    (in_loop,) = edits_of(original, edited(text, "stablehlo.tanh", "stablehlo.sine"))
    assert in_loop.places[0].frame[0].startswith("the body of ")
    (in_branch,) = edits_of(original, edited(text, "stablehlo.cosine", "stablehlo.tanh"))
    assert in_branch.places[0].frame[0].startswith("branch ")
    old = next(one for one in text.lines if "TOTALORDER" in one).strip()
    (in_sort,) = edits_of(original, edited(text, old, old.replace(" LT,", " GT,")))
    assert [one.opcode for one in in_sort.places] == ["sort"]
    assert "comparison_direction LT, GT in the reference" in in_sort.reasons[0]


Localize = Callable[..., Localization]


@pytest.fixture
def localize(workers: Workers, text: text_plants.Text) -> Localize:
    """Return a function that localizes the difference of `model` and an edited text."""

    def run(
        *changes: tuple[str, str], suspect: str = "cpu", reference: str = "cpu"
    ) -> Localization:
        plain = "\n".join(text.lines)
        for old, new in changes:
            assert old in plain
            plain = plain.replace(old, new, 1)

        def side(name: str, program: FlatModule, variant: str) -> Side:
            parsed = parse_variant(variant)
            return Side(name, program, lambda hlo, given: workers.submit(parsed, hlo, given))

        sides = (
            side("original", program_of(text.located), suspect),
            side("edited", program_of(plain), "cpu"),
        )
        return search(Session(), sides, [X])

    return run


TANH = ("stablehlo.tanh", "stablehlo.sine")
THREE = ("dense<3.000000e+00>", "dense<5.000000e+00>")
SLIGHTLY = ("dense<3.000000e+00>", "dense<3.000001e+00>")


def test_with_the_operation_of_the_reference_the_difference_is_gone(localize: Localize) -> None:
    found = localize(TANH)
    assert found.kind == "instruction"
    assert [one.opcode for one in found.instructions] == ["tanh"]
    before, after = found.substituted or (0.0, 0.0)
    assert before > 1 >= after
    assert found.difference[0].reason == "opcode tanh, sine in the reference"
    assert found.share_matched == 1.0
    assert from_json(to_json(found)) == found


def test_a_harmless_edit_beside_one_that_is_not_is_left_alone(localize: Localize) -> None:
    found = localize(TANH, SLIGHTLY)
    assert [one.opcode for one in found.instructions] == ["tanh"]
    assert "1 more place" in found.notes[0]


def test_edits_that_only_explain_it_together_are_named_together(localize: Localize) -> None:
    found = localize(TANH, THREE)
    assert found.kind == "interaction"
    assert sorted(one.opcode for one in found.instructions) == ["constant", "tanh"]


def test_an_edit_within_the_tolerance_is_told_of_but_not_accused(localize: Localize) -> None:
    found = localize(SLIGHTLY)
    assert found.kind == "nothing"
    assert "agree within tolerance" in found.sentence
    assert "constant" in found.sentence
    assert localize().sentence == "original and edited agree within tolerance: nothing to localize"


def test_a_variant_that_goes_wrong_is_told_from_an_edit_that_does_not(localize: Localize) -> None:
    found = localize(SLIGHTLY, suspect="tpu-precision=default")
    assert found.kind == "nothing"  # without a dot there is nothing that it rounds


# A loop of three states, which reads three values from around it; and a branch.
CARRYING = """
module {
  func.func public @main(%arg0: tensor<3x4xf32>, %arg1: tensor<3x4xf32>, %arg2: tensor<3x4xf32>)
      -> tensor<3x4xf32> {
    %1 = stablehlo.sine %arg0 : tensor<3x4xf32>
    %3 = stablehlo.cosine %arg1 : tensor<3x4xf32>
    %c = stablehlo.constant dense<0> : tensor<i32>
    %4:6 = stablehlo.while(%iterArg = %arg0, %iterArg_3 = %arg1, %iterArg_4 = %arg2, \
%iterArg_5 = %c, %iterArg_6 = %1, %iterArg_7 = %3) : tensor<3x4xf32>, tensor<3x4xf32>, \
tensor<3x4xf32>, tensor<i32>, tensor<3x4xf32>, tensor<3x4xf32>
    cond {
      %c_8 = stablehlo.constant dense<3> : tensor<i32>
      %9 = stablehlo.compare LT, %iterArg_5, %c_8, SIGNED \
: (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %9 : tensor<i1>
    } do {
      %9 = stablehlo.subtract %iterArg_6, %iterArg : tensor<3x4xf32>
      %10 = stablehlo.tanh %9 : tensor<3x4xf32>
      %11 = stablehlo.multiply %10, %iterArg_3 : tensor<3x4xf32>
      %13 = stablehlo.multiply %iterArg_7, %iterArg_7 : tensor<3x4xf32>
      %14 = stablehlo.add %13, %iterArg_4 : tensor<3x4xf32>
      %c_9 = stablehlo.constant dense<1> : tensor<i32>
      %15 = stablehlo.add %iterArg_5, %c_9 : tensor<i32>
      stablehlo.return %iterArg, %iterArg_3, %iterArg_4, %15, %11, %14 : tensor<3x4xf32>, \
tensor<3x4xf32>, tensor<3x4xf32>, tensor<i32>, tensor<3x4xf32>, tensor<3x4xf32>
    }
    %8 = "stablehlo.case"(%4#3) ({
      %9 = stablehlo.subtract %4#5, %arg1 : tensor<3x4xf32>
      stablehlo.return %9 : tensor<3x4xf32>
    }, {
      %9 = stablehlo.divide %4#4, %arg2 : tensor<3x4xf32>
      stablehlo.return %9 : tensor<3x4xf32>
    }) : (tensor<i32>) -> tensor<3x4xf32>
    return %8 : tensor<3x4xf32>
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "opcodes"),
    [
        ("subtract %iterArg_6, %iterArg ", "subtract %iterArg_6, %iterArg_4 ", ["subtract"]),
        ("subtract %iterArg_6, %iterArg ", "subtract %iterArg_6, %arg1 ", ["subtract"]),
        ("subtract %iterArg_6, %iterArg ", "add %iterArg_6, %iterArg_6 ", ["subtract"]),
        ("add %13, %iterArg_4 ", "subtract %13, %arg1 ", ["add"]),
        ("divide %4#4, %arg2 ", "divide %4#4, %4#4 ", ["divide"]),
        ("divide %4#4, %arg2 ", "divide %4#5, %arg0 ", ["divide"]),
        ("subtract %4#5, %arg1 ", "subtract %4#4, %arg1 ", ["subtract"]),
        ("divide %4#4, %arg2 ", "tanh %arg2 ", ["divide"]),
    ],
)
def test_an_edit_that_changes_what_a_loop_or_branch_carries_is_not_one_of_the_whole_loop(
    old: str, new: str, opcodes: list[str]
) -> None:
    text = text_plants.read(CARRYING)
    edits = edits_of(program_of(text.located), edited(text, old, new))
    assert [place.opcode for edit in edits for place in edit.places] == opcodes
    assert edits[0].places[0].frame[0].startswith(("the body of ", "branch "))


def test_two_values_of_a_loop_s_state_that_are_exchanged_are_one_edit_where_it_starts() -> None:
    text = text_plants.read(CARRYING)
    start = "%iterArg_6 = %1, %iterArg_7 = %3)"
    swapped = edited(text, start, "%iterArg_6 = %3, %iterArg_7 = %1)")
    (edit,) = edits_of(program_of(text.located), swapped)
    assert [(one.opcode, one.frame) for one in edit.places] == [("tuple", ())]
