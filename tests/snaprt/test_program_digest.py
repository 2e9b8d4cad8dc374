"""The digest of a program is the same in every process, and differs where programs differ."""

from pathlib import Path

import jax
import jax.experimental.layout
import jax.numpy as jnp
import pytest
from damage import flip_bit
from programs import run_program

import snaprt
from snaprt.compile import loaded
from snaprt.graph import digest
from snaprt.graph.digest import Unstable, program_digest
from snaprt.runtime.step import thread_trace
from snaprt.trace.cut import plan_cut

X = jnp.linspace(0.0, 1.0, 12).reshape(3, 4)


def digest_of(function, *args, promoted=frozenset()):
    """Return the digest of the program that ``function`` records, without running it."""
    with snaprt.lazy():
        results = jax.tree.leaves(function(*args))
        numbers = [result._result.number for result in results]
        recording = thread_trace().recording
        (part,) = plan_cut(recording, numbers, numbers).parts
        digest = program_digest(part.program(recording, {}, donate=False), promoted)
        thread_trace().begin()
    return digest


PROGRAMS = {
    "base": lambda x: jnp.sum(x * 2.0, axis=0),
    "other literal": lambda x: jnp.sum(x * 3.0, axis=0),
    "other axis": lambda x: jnp.sum(x * 2.0, axis=1),
    "other primitive": lambda x: jnp.max(x * 2.0, axis=0),
    "integer literal": lambda x: jnp.sum(x * 2, axis=0),
    "other order": lambda x: jnp.sum(2.0 * x, axis=0),
    "used twice": lambda x: (jnp.sum(x * 2.0, axis=0), x * 2.0),
    "constant": lambda x: jax.jit(lambda y: y + jax.lax.iota(jnp.float32, 4))(x),
    "scan": lambda x: jax.lax.scan(lambda c, r: (c + r, c), x[0], x),
    "other scan": lambda x: jax.lax.scan(lambda c, r: (c * r, c), x[0], x),
    "reverse scan": lambda x: jax.lax.scan(lambda c, r: (c + r, c), x[0], x, reverse=True),
    "cond": lambda x: jax.lax.cond(True, lambda y: y, lambda y: -y, x * 1.0),
    "relu": lambda x: jax.nn.relu(x),
    "gelu": lambda x: jax.nn.gelu(x),
    "key": lambda x: jax.random.normal(jax.random.key(0), (3,)),
    "checkpoint": lambda x: jax.checkpoint(jnp.sin)(x),
    "gather": lambda x: x[jnp.array([0, 2])],
    "svd": lambda x: jnp.linalg.svd(x),
    "convolution": lambda x: jnp.convolve(x[0], x[1]),
    "negative zero": lambda x: x + -0.0,
    "zero": lambda x: x + 0.0,
}


def test_programs_that_differ_have_digests_that_differ():
    digests = {name: digest_of(program, X) for name, program in PROGRAMS.items()}
    assert len(set(digests.values())) == len(PROGRAMS), digests


def test_shape_dtype_weak_type_and_settings_take_part():
    base = PROGRAMS["base"]
    digests = {
        digest_of(base, X),
        digest_of(base, X[:2]),
        digest_of(base, X.astype(jnp.bfloat16)),
        digest_of(base, jax.device_put(X, jax.devices()[0])),
        digest_of(base, X, promoted=frozenset({0})),
    }
    with jax.default_matmul_precision("highest"):
        digests.add(digest_of(base, X))
    with jax.enable_x64(True):
        digests.add(digest_of(base, X))
    assert len(digests) == 7


def test_the_digest_is_the_same_when_the_program_is_recorded_again():
    for name, program in PROGRAMS.items():
        assert digest_of(program, X) == digest_of(program, X + 1), name


def test_the_digest_is_the_same_in_another_process():
    script = (
        "import json, sys; sys.path.append('../support')\n"
        "import test_program_digest as t\n"
        "print(json.dumps({n: t.digest_of(p, t.X) for n, p in t.PROGRAMS.items()}))"
    )
    seen = set()
    for seed in ("1", "2"):
        done = run_program(script, folder=Path(__file__).parent, PYTHONHASHSEED=seed)
        seen.add(done.stdout)
    assert len(seen) == 1


def test_a_python_function_among_the_parameters_has_no_digest():
    def call(x):
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(Unstable, match="function"):
        digest_of(call, X)


def test_a_program_without_a_digest_still_runs_and_is_counted():
    with snaprt.lazy():
        y = jax.pure_callback(lambda v: v * 2, jax.ShapeDtypeStruct(X.shape, X.dtype), X + 0)
        snaprt.mark_step()
    assert float(y[0, 1]) == pytest.approx(2 * float(X[0, 1]))
    assert any(name.startswith("UnstableProgram::") for name in snaprt.metrics.counter_names())


def _run_in_new_process_state(monkeypatch):
    """Forget what this process has loaded, as a new process would."""
    monkeypatch.setattr(loaded, "_families", type(loaded._families)())


def test_a_known_program_is_loaded_without_being_lowered(monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    results = []
    for _ in range(2):
        _run_in_new_process_state(monkeypatch)
        with snaprt.lazy():
            y = jnp.tanh(X @ X.T) * 1.25
            snaprt.mark_step()
        results.append(float(y.sum()))
    assert results[0] == results[1]
    assert snaprt.metrics.counter_value("LoweringSkipped") == 1
    assert snaprt.metrics.metric_data("LowerTime")[0] == 1


def test_a_damaged_note_is_healed_and_changes_nothing(monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(cache))
    expected = None
    for damage in (None, 60, 200, -5):
        _run_in_new_process_state(monkeypatch)
        for blob in cache.glob("v1/blobs/*/*.blob"):
            if damage is not None and b'"note"' in blob.read_bytes():
                flip_bit(blob, damage)
        with snaprt.lazy():
            y = jnp.tanh(X @ X.T) * 1.75
            snaprt.mark_step()
        expected = float(y.sum()) if expected is None else expected
        assert float(y.sum()) == expected
    assert snaprt.metrics.counter_value("PersistentCacheCorrupt") == 3
    assert snaprt.metrics.counter_value("UncachedCompile") == 1


def form(value):
    content = bytearray()
    digest._encode(value, content)
    return bytes(content)


def test_what_is_written_in_short_is_what_it_would_be_at_length():
    for wires in [(), ((0, 0),), ((-1, 12), (345, 0), (-2, 7))]:
        assert digest._wires_form(wires) == form(wires)
    aval = jax.typeof(X)
    assert form(aval) == form(aval) == form(jax.typeof(X + 1))
    assert form(aval) != form(jax.typeof(X[0]))


@pytest.mark.skipif(not hasattr(jax.typeof(X), "layout"), reason="types have no layout")
def test_the_layout_that_a_type_names_is_part_of_it():
    aval = jax.typeof(X)
    layouts = [jax.experimental.layout.Layout(order) for order in [(0, 1), (1, 0)]]
    assert len({form(aval), *(form(aval.update(layout=layout)) for layout in layouts)}) == 3
