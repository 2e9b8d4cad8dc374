"""What cuts graphs is said, with the user's line and what to write instead; or it raises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting

import snaprt
from snaprt.explain.cuts import GraphBreakRows, explain_rows
from snaprt.runtime.graph_breaks import BREAKS, describe_break
from snaprt.trace.array import READ_METHODS, READ_PROPERTIES

pytestmark = pytest.mark.usefixtures("no_persistent_cache")

X = jnp.linspace(-1.0, 2.0, 12, dtype=jnp.float32).reshape(3, 4)


def train_step(x):
    loss = (x * 2).sum()
    if loss > 3:  # a branch
        loss = loss / 2
    value = float(loss + 1)  # a log
    snaprt.mark_step()
    return loss * value


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_a_call_is_explained_by_its_cuts_in_the_order_they_happened():
    explained = snaprt.explain(train_step, X)
    told = [(cut.cause, cut.place.line, cut.operations) for cut in explained.cuts]
    assert told[0] == ("bool", line_of("# a branch"), told[0][2])
    assert told[1][:2] == ("float", line_of("# a log"))
    assert [cause for cause, _, _ in told] == ["bool", "float", "end"]
    assert explained.cuts[0].place.function == "train_step"
    assert "jnp.where" in explained.cuts[0].advice
    assert [len(cut.graphs) for cut in explained.cuts] == [1, 1, 1]
    assert sum(graph.operations for graph in explained.graphs) == sum(n for _, _, n in told)
    assert float(explained.result) == float(train_step(X))


def test_what_was_compiled_before_is_not_compiled_again():
    def function(x):
        return jnp.tanh(x) * 3.5

    assert snaprt.explain(function, X).compilations == 1
    assert snaprt.explain(function, X).compilations == 0


def test_what_was_pending_before_is_not_explained():
    with snaprt.lazy():
        before = X * 7
        explained = snaprt.explain(lambda: X + 7)
    assert [cut.operations for cut in explained.cuts] == [1]
    assert np.asarray(before).shape == (3, 4)


def test_an_operation_that_runs_at_once_is_among_the_events():
    device = jax.devices()[0]
    explained = snaprt.explain(lambda x: jax.device_put(x * 2, device) + 1, X)
    assert [(one.name, one.cause) for one in explained.at_once] == [("device_put", "device_put")]
    assert [type(event).__name__ for event in explained.events] == [
        "AtOnceRecord",
        "CutRecord",
        "CutRecord",
    ]
    assert "device_put" in str(explained)


def test_the_text_has_a_line_for_each_cut_and_the_advice_once():
    text = str(snaprt.explain(lambda: [float((X + i).sum()) for i in range(3)]))
    lines = [line for line in text.splitlines() if " float " in line]
    assert len(lines) == 3
    assert all("test_explain_cuts.py:" in line for line in lines)
    assert text.count("instead:") == 1


def test_cuts_at_one_place_are_folded_for_a_whole_run():
    rows = GraphBreakRows()
    for event in snaprt.explain(lambda: [float((X + i).sum()) for i in range(4)]).events:
        rows.add(event)
    (row,) = rows()
    assert (row.cause, row.times, row.graphs, row.operations) == ("float", 4, 4, 8)
    assert explain_rows(rows()).startswith("4 graphs, 8 operations, ")


def test_every_cause_has_an_advice_and_functions_of_jax_that_of_dynamic_shapes():
    for cause in (*READ_METHODS.values(), *READ_PROPERTIES.values(), *BREAKS):
        assert describe_break(cause).advice or cause in {"mark_step", "end", "scope_end"}
    assert describe_break("is_deleted").what == "`x.is_deleted`"
    assert "size=" in describe_break("some_function_of_jax").advice


READS = [
    (lambda x: bool(x.sum() > 0), "bool"),
    (lambda x: float(x.sum()), "float"),
    (lambda x: int(x.sum()), "int"),
    (lambda x: x.sum().item(), "item"),
    (lambda x: np.asarray(x), "array"),
    (lambda x: f"{x.sum():.2f}", "format"),
    (lambda x: repr(x), "repr"),
    (lambda x: x.tolist(), "tolist"),
    (lambda x: x[x > 0], "bool_mask"),
    (lambda x: jnp.nonzero(x), "nonzero"),
    (lambda x: jnp.where(x > 0), "nonzero"),
    (lambda x: jnp.unique(x), "unique"),
    (lambda x: jnp.arange(x[2, 3].astype(int)), "arange"),
    (lambda x: jnp.linspace(0, 1, x[2, 3].astype(int)), "linspace"),
    (lambda x: X[: x[2, 3].astype(int)], "slice"),
    (lambda x: jnp.zeros(x[2, 3].astype(int)), "index"),
    (lambda x: [1, 2, 3, 4, 5][x[2, 3].astype(int)], "index"),
    (lambda x: x.block_until_ready(), "block_until_ready"),
    (lambda x: jax.device_get(x), "device_get"),
]


@pytest.mark.parametrize(("read", "cause"), READS)
def test_a_read_is_counted_by_its_cause_and_raises_where_no_cut_may_be(read, cause):
    with counting() as counts, snaprt.lazy():
        read(X * 2)
    assert set(counts.reads) == {cause}
    with (
        counting() as counts,
        snaprt.lazy(fullgraph=True),
        pytest.raises(snaprt.GraphBreakError, match=r"test_explain_cuts\.py:") as caught,
    ):
        read(X * 2)
    assert caught.value.hint == describe_break(cause).advice
    assert counts.graphs == 0


def test_a_full_graph_is_cut_by_steps_alone():
    with counting() as counts, snaprt.lazy(fullgraph=True):
        y = X * 2
        snaprt.mark_step()
        assert np.asarray(y).shape == (3, 4)  # its value is there
        z = y + 1
    assert counts.graphs == 1
    assert np.asarray(z).shape == (3, 4)  # outside, reads are reads


def test_an_operation_that_would_run_alone_raises_in_a_full_graph():
    device = jax.devices()[0]
    with snaprt.lazy(fullgraph=True):
        jax.device_put(np.ones(3), device)  # cuts nothing
        pending = X * 2
        with pytest.raises(snaprt.GraphBreakError, match="device_put"):
            jax.device_put(pending, device)


def test_a_full_graph_inside_of_another_scope_ends_with_its_own():
    with snaprt.lazy():
        with snaprt.lazy(fullgraph=True), snaprt.lazy():
            y = X * 2
            with pytest.raises(snaprt.GraphBreakError):
                float(y.sum())
        assert float(y.sum()) == float((X * 2).sum())


@snaprt.lazy(fullgraph=True)
def decorated(x):
    return float((x * 2).sum())


def test_a_function_may_be_decorated_with_it():
    for _ in range(2):
        with pytest.raises(snaprt.GraphBreakError, match="in decorated"):
            decorated(X)


def test_the_primitives_of_each_graph_are_counted_followed_steps_included():
    before = snaprt.metrics.counter_value("xla::dot_general") or 0
    with snaprt.lazy():
        for _ in range(5):
            y = jnp.matmul(X, X.T) * 2
            snaprt.mark_step()
    assert y.shape == (3, 3)
    assert snaprt.metrics.counter_value("xla::dot_general") - before == 5
    assert snaprt.metrics.counter_value("xla::mul") == 5


def test_the_guards_of_a_call_are_what_makes_it_compile_again():
    def scaled(batch, rate):
        return jnp.arcsinh(batch["x"]) * rate  # scaled here

    batch = {"x": X}
    explained = snaprt.explain(scaled, batch, 0.5)
    guards = {guard.kind: guard for guard in explained.guards}
    assert "`batch['x']` is f32[3,4]" in guards["shape"].text
    assert "0.5" in guards["constant"].text
    assert guards["constant"].place.line == line_of("# scaled here")
    assert "sinh" in guards["operations"].text
    assert "mul" in guards["outputs"].text
    assert "64-bit types disabled" in guards["devices"].text
    assert str(guards["constant"]).endswith("scaled")

    assert snaprt.explain(scaled, batch, 0.5).compilations == 0
    changed = {
        "shape": lambda: scaled({"x": X[:2] + 0}, 0.5),
        "constant": lambda: scaled(batch, 0.25),
        "operations": lambda: jnp.exp(scaled(batch, 0.5)),
    }
    for kind, call in changed.items():
        assert snaprt.explain(call).compilations > 0, kind


def test_a_scalar_that_has_varied_is_no_guard_any_more():
    def scaled(x, rate):
        return jnp.cosh(x) * rate

    kinds = [
        [guard.kind for guard in snaprt.explain(scaled, X, rate).guards] for rate in (1.5, 2.5, 3.5)
    ]
    assert "constant" in kinds[0]
    assert "constant" not in kinds[2]
    assert snaprt.explain(scaled, X, 4.5).compilations == 0
