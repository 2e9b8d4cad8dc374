import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from programs import run_program
from threads import in_threads

import snaprt
from snaprt.compile import loaded, times
from snaprt.explain.times import CompileTimes, GraphTimes


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(times, "_programs", times.OrderedDict())
    monkeypatch.setattr(times, "_forgotten", 0)
    _forget_executables(monkeypatch)


def _forget_executables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process know none, as another process would."""
    monkeypatch.setattr(loaded, "_families", loaded.OrderedDict())


def run_steps(count: int, value: float) -> None:
    x = jnp.full((8, 8), value)
    for _ in range(count):
        with snaprt.lazy():
            y = jnp.tanh(x @ x) * x
            snaprt.mark_step()
    np.asarray(y)


def only_graph() -> GraphTimes:
    (graph,) = snaprt.compile_times().graphs
    return graph


def test_a_graph_that_was_compiled_shows_each_stage_that_it_went_through():
    run_steps(3, 0.25)
    graph = only_graph()
    assert (graph.kind, graph.operations, graph.executions) == ("lazy", 3, 3)
    assert (graph.compiled, graph.loaded) == (1, 0)
    spent = {stage: getattr(graph, stage) for stage in times.STAGES}
    assert spent.pop("load") == 0
    assert all(seconds > 0 for seconds in spent.values()), spent
    assert graph.total == pytest.approx(sum(spent.values()))


def test_a_graph_that_comes_from_the_cache_is_loaded_and_neither_lowered_nor_compiled(
    monkeypatch: pytest.MonkeyPatch,
):
    run_steps(1, 0.25)
    before = only_graph()
    _forget_executables(monkeypatch)
    run_steps(1, 0.25)
    after = only_graph()
    assert after.graph_id == before.graph_id
    assert (after.compiled, after.loaded, after.executions) == (1, 1, 2)
    assert after.load > 0
    assert (after.lower, after.compile) == (before.lower, before.compile)


JIT_PROGRAM = """
import json
import jax, jax.numpy as jnp
import snaprt
from snaprt import cache

cache.install()

@jax.jit
def only_here(x):
    return jnp.cos(x) - 7

for _ in range(2):
    only_here(jnp.arange(5.0)).block_until_ready()
    jax.clear_caches()
print(json.dumps(snaprt.compile_times().to_dict()))
"""


def test_a_program_of_jit_is_seen_where_the_cache_is_under_it():
    done = run_program(JIT_PROGRAM)
    (graph,) = (one for one in json.loads(done.stdout)["graphs"] if one["name"] == "jit_only_here")
    assert (graph["kind"], graph["operations"], graph["executions"]) == ("jit", None, None)
    assert (graph["compiled"], graph["loaded"]) == (1, 1)
    assert min(graph[stage] for stage in ("key", "cache", "compile", "load")) > 0
    assert max(graph[stage] for stage in ("record", "lower", "execute")) == 0


def test_a_stage_does_not_have_the_time_of_those_inside_it(monkeypatch: pytest.MonkeyPatch):
    moments = iter([0, 10, 40, 45])
    monkeypatch.setattr(times.time, "perf_counter_ns", lambda: next(moments))
    with times.measured() as stopwatch, times.stage("cache"), times.stage("compile"):
        pass
    assert stopwatch.nanoseconds == {"cache": 15, "compile": 30}


def test_executions_of_several_threads_are_all_counted():
    program = times.ProgramTimes()

    def execute(_: int) -> None:
        for _ in range(20_000):
            program.executed(3)

    in_threads(4, execute)
    assert (program.executions, program.execute) == (80_000, 240_000)


def test_of_very_many_programs_the_oldest_are_forgotten_and_counted(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(times, "MAX_PROGRAMS", 2)
    for name in ("a", "b", "c"):
        times.prepared(times.LAZY, "graph", name, times.Stopwatch())
    found = snaprt.compile_times()
    assert {graph.graph_id for graph in found.graphs} == {"b", "c"}
    assert found.forgotten == 1
    assert str(found).endswith("and 1 earlier graphs")


def test_the_table_has_a_row_for_each_graph_and_their_sum_below():
    none = dict.fromkeys(times.STAGES, 0.0)
    slow = GraphTimes("aa", "g", "lazy", 4, 1, 0, 5, **{**none, "compile": 1.5, "execute": 2e-3})
    fast = GraphTimes("bb", "jit_f", "jit", None, 0, 1, None, **{**none, "load": 25e-6})
    head, *rows = str(CompileTimes((slow, fast))).splitlines()
    assert head.split()[:6] == ["graph", "name", "ops", "compiled", "loaded", "runs"]
    assert head.split()[6:] == [*times.STAGES, "total"]
    assert [" ".join(row.split()) for row in rows] == [
        "aa g 4 1 0 5 0 0 0 0 1.5 s 0 2 ms 1.5 s",
        "bb jit_f - 0 1 - 0 0 0 0 0 25 us 0 25 us",
        "all 4 1 1 5 0 0 0 0 1.5 s 25 us 2 ms 1.5 s",
    ]


def test_the_numbers_can_be_written_as_json():
    run_steps(1, 0.5)
    shown = json.loads(json.dumps(snaprt.compile_times().to_dict()))
    (graph,) = shown["graphs"]
    assert graph["executions"] == 1
    assert set(times.STAGES) <= graph.keys()
    assert shown["totals"]["compile"] == graph["compile"]
