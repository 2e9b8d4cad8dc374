"""Redaction: nothing of what was taken out is left in the file, and the rest still runs."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import zstandard
from recordings import record

from snaprt import jaxapi
from snaprt.errors import SnapshotError
from snaprt.snapshot.format import schema, seeded
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot, sibling_outputs
from snaprt.snapshot.format.store import ArrayStore
from snaprt.snapshot.recorder.describe import Cause, error_text
from snaprt.snapshot.share.pack import pack

TABLE = np.arange(3000, dtype=np.float32) ** 1.5


@jax.jit
def undisclosed_activation(x: jax.Array) -> jax.Array:
    with jax.named_scope("hush_scope"):
        return jnp.where(x > 0, x, jnp.expm1(x))


def classified_model(
    weights: jax.Array, tokens: jax.Array, mask: jax.Array, key: jax.Array
) -> dict[str, jax.Array]:
    hidden = undisclosed_activation(weights[tokens] * mask[:, None])
    noise = jax.random.normal(key, hidden.shape)
    return {"covert_loss": (hidden + noise).sum(), "hidden": hidden @ hidden.T}


NAMES = ("classified", "undisclosed", "hush_scope", "covert", "private_w", "private_t", "jit(")
WEIGHTS = jax.random.normal(jax.random.key(0), (500, 64)) * 0.02
ARGUMENTS = {
    "private_weights": WEIGHTS.at[3:90].set(0).at[7, 7].set(jnp.nan),
    "private_tokens": jnp.arange(40, 80),
    "private_mask": jnp.arange(40) % 4 == 0,
    "private_key": jax.random.key(123456789),
}


def recorded(folder: Path, store: ArrayStore | None = None, **fields: object) -> Path:
    return record(
        folder,
        classified_model,
        ARGUMENTS,
        output_names=("covert_loss", "covert_hidden"),
        store=store,
        **fields,
    )


def members(content: bytes) -> Iterator[bytes]:
    """Yield a file's own bytes and, unpacked, all that is in it."""
    yield content
    if content.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                yield name.encode()
                yield from members(archive.read(name))
    elif content.startswith(b"\x28\xb5\x2f\xfd"):
        yield zstandard.ZstdDecompressor().decompressobj().decompress(content)


def shared(path: Path, *kinds: str) -> tuple[Path, bytes, tuple[str, ...]]:
    packed = pack([path], path.parent / "out" / "shared.pack", kinds, replace=True)
    return packed.path, b"\n".join(members(packed.path.read_bytes())), packed.notes


def opened(pack_file: Path) -> tuple[SnapshotFile, SnapshotFile]:
    inputs = next(p for p in _snapshots(pack_file) if p.name.endswith(".inputs.snap"))
    outputs = sibling_outputs(inputs)
    assert outputs is not None
    return open_snapshot(inputs), open_snapshot(outputs)


def _snapshots(pack_file: Path) -> Sequence[Path]:
    from snaprt.snapshot.format.places import snapshots_in

    return snapshots_in(pack_file)


def windows(value: jax.Array) -> list[bytes]:
    """Return pieces of 16 bytes of an array which say something."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return [np.asarray(jax.random.key_data(value)).tobytes()]
    content = np.asarray(value).tobytes()
    pieces = [content[at : at + 16] for at in range(0, len(content) - 15, 16)]
    return [piece for piece in pieces if len(set(piece)) > 4]


@pytest.mark.parametrize("with_store", [False, True])
def test_no_value_of_any_array_is_left(with_store: bool, tmp_path: Path) -> None:
    path = recorded(tmp_path, ArrayStore(tmp_path) if with_store else None)
    outputs = open_snapshot(path.with_name(path.name.replace(".inputs.", ".outputs.")))
    _, everything, _ = shared(path, "values")
    results = [jnp.asarray(outputs.array(name)) for name in outputs.array_names]
    checked = 0
    for value in (*ARGUMENTS.values(), *results):
        pieces = windows(value)[:400]
        checked += len(pieces)
        assert not [piece for piece in pieces if piece in everything]
    assert checked > 200
    digests = [one.digest for one in open_snapshot(path).manifest.arrays]
    assert not [digest for digest in digests if digest.encode() in everything]


def test_values_are_drawn_again_with_the_same_statistics(tmp_path: Path) -> None:
    packed, _, _ = shared(recorded(tmp_path), "values")
    inputs, _ = opened(packed)
    weights, true = inputs.array("private_weights"), np.asarray(ARGUMENTS["private_weights"])
    assert (weights.dtype, weights.shape) == (true.dtype, true.shape)
    assert not np.array_equal(weights, true)
    assert np.isnan(weights).sum() == 1
    assert (weights == 0).sum() == pytest.approx((true == 0).sum(), abs=2)
    here, there = weights[np.isfinite(weights)], true[np.isfinite(true)]
    assert here.std() == pytest.approx(there.std(), rel=0.05)
    assert here.mean() == pytest.approx(there.mean(), abs=0.0005)
    assert here.min() == pytest.approx(there.min(), rel=0.02)
    assert here.max() == pytest.approx(there.max(), rel=0.02)
    tokens = inputs.array("private_tokens")
    assert tokens.min() >= 40
    assert tokens.max() <= 79
    assert inputs.array("private_mask").mean() == pytest.approx(0.25, abs=0.2)
    assert inputs.array("private_key").shape == (2,)
    assert np.array_equal(weights, inputs.array("private_weights"), equal_nan=True)


def test_equal_arrays_get_equal_values_within_one_file_and_others_in_another(
    tmp_path: Path,
) -> None:
    weights = ARGUMENTS["private_weights"]
    path = record(tmp_path, lambda a, b: a + b, {"a": weights, "b": weights})
    file = opened(shared(path, "values")[0])[0]
    first = file.array("a")
    assert np.array_equal(first, file.array("b"), equal_nan=True)
    again = opened(shared(path, "values")[0])[0].array("a")
    assert not np.array_equal(first, again, equal_nan=True)


def test_no_name_is_left_in_manifest_module_or_file_names(tmp_path: Path) -> None:
    path = recorded(tmp_path, reason="graph=classified", error="ValueError: classified_model")
    before = b"\n".join(members(path.read_bytes()))
    assert all(name.encode() in before for name in NAMES)
    packed, everything, _ = shared(path, "names")
    assert not [name for name in NAMES if name.encode() in everything]
    inputs, outputs = opened(packed)
    assert inputs.array_names == ("arg0", "arg1", "arg2", "arg3")
    assert outputs.array_names == ("out0", "out1")
    assert np.array_equal(inputs.array("arg1"), ARGUMENTS["private_tokens"])
    assert inputs.manifest.execution.redacted == ("names",)
    text = jaxapi.hlo_text(inputs.module.hlo)
    assert "exponential-minus-one" in text


def test_mesh_axes_lose_their_names(tmp_path: Path) -> None:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:1]), ("covert_axis",))
    value = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec("covert_axis")))
    path = record(tmp_path, lambda v: v * 2, {"v": value})
    assert b"covert_axis" in b"\n".join(members(path.read_bytes()))
    _, everything, _ = shared(path, "names")
    assert b"covert_axis" not in everything


def test_no_path_is_left_but_names_of_operations_are(tmp_path: Path) -> None:
    flags = "--xla_dump_to=/srv/hush/dump --xla_cpu_enable_fast_math=false"
    path = recorded(
        tmp_path,
        xla_flags=flags,
        environment={"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TPU_LIBRARY_PATH": "/srv/hush"},
        error="ValueError: /srv/hush is full",
    )
    here = __file__.encode()
    assert here in b"\n".join(members(path.read_bytes()))
    packed, everything, _ = shared(path, "paths")
    for gone in (here, b"/srv/hush", b"test_snapshot_redact", str(Path.home()).encode() + b"/"):
        assert gone not in everything
    inputs, _ = opened(packed)
    execution = inputs.manifest.execution
    assert execution.environment["JAX_PLATFORMS"] == "cpu"
    assert execution.xla_flags == "--xla_dump_to=(redacted) --xla_cpu_enable_fast_math=false"
    assert inputs.array_names == tuple(ARGUMENTS)
    assert b"hush_scope" in inputs.module.hlo


def test_a_program_on_neutral_names_computes_the_same(tmp_path: Path) -> None:
    from snaprt_replay.run.rerun import replay

    packed, _, _ = shared(recorded(tmp_path), "names", "paths")
    result = replay(packed)
    assert result.comparison is not None
    assert result.comparison.verdict == "identical"
    assert "redacted before sharing: names, paths" in result.case.notes


def test_large_constants_stay_and_are_said_to(tmp_path: Path) -> None:
    path = record(tmp_path, lambda x: x + TABLE, {"x": jnp.zeros(3000)})
    _, everything, notes = shared(path, "values")
    assert TABLE[100:104].tobytes() in everything
    assert any("1 large constants" in note for note in notes)


def test_an_error_raised_while_a_graph_was_recorded_cannot_be_redacted(tmp_path: Path) -> None:
    from snaprt.snapshot.format.write import write_snapshot

    path = recorded(tmp_path)
    file = open_snapshot(path)
    contents = schema.Contents(
        file.manifest.execution,
        file.module,
        [],
        trace_error=schema.TraceErrorRecord("builtins.TypeError", "classified_model", ()),
    )
    write_snapshot(path, contents)
    with pytest.raises(SnapshotError, match="cannot be redacted"):
        shared(path, "names")
    shared(path)


def drawn(value: np.ndarray) -> np.ndarray:
    plain = schema.ArrayRecord(
        name="a", shape=value.shape, dtype=value.dtype.name, weak_type=False, member="",
        compression="none", stored_dtype="", stored_shape=value.shape, stored_bytes=0, raw_bytes=0,
        digest="", key_impl="", sharding="", global_shape=value.shape,
    )  # fmt: skip
    kept = seeded.summarize(value, 5)
    assert all(np.isfinite(number) for number in kept.values())
    return seeded.draw(dataclasses.replace(plain, seeded=kept))


@pytest.mark.parametrize("name", ["int4", "uint2", "int64", "uint64", "float16",
    "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float64", "complex64", "bool"])  # fmt: skip
def test_every_kind_of_dtype_can_be_drawn(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    generator = np.random.default_rng(1)
    values = generator.standard_normal((30, 40)) if "float" in name or "complex" in name else (
        generator.integers(0, 2, (30, 40))
    )  # fmt: skip
    true = np.abs(values).astype(dtype)
    result = drawn(true)
    assert (result.dtype, result.shape) == (true.dtype, true.shape)
    if name.startswith(("int", "uint", "bool")):
        assert {*np.unique(result.astype(int))} == {0, 1}


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((0, 3), np.float32),
        lambda: np.zeros(50, np.float32),
        lambda: np.full(50, -3.5, np.float32),
        lambda: np.array(0.001, np.float32),
        lambda: np.array([np.nan, np.inf, -np.inf] * 20, np.float32),
        lambda: np.array([1e300, -1e300] * 20),
        lambda: np.array([5e-324, 1e-310] * 20),
        lambda: np.array([2**64 - 1, 5] * 20, np.uint64),
        lambda: np.array([-(2**63), 2**63 - 1] * 20),
        lambda: np.repeat(np.array([1.0, 1000.0], np.float32), 30),
    ],
)
def test_odd_arrays_can_be_drawn(make: Callable[[], np.ndarray]) -> None:
    true = make()
    result = drawn(true)
    assert (result.dtype, result.shape) == (true.dtype, true.shape)
    if true.dtype.kind == "f":
        assert np.isnan(result).sum() == np.isnan(true).sum()
        assert (result == 0).sum() == (true == 0).sum()


def test_of_a_few_elements_only_the_magnitude_is_told() -> None:
    kept = seeded.summarize(np.array([0.001234, 5000.0]), 5)
    assert kept["minimum"] == 2.0**-10
    assert kept["maximum"] == 4096.0


def test_what_is_told_never_leaves_the_range_of_the_values() -> None:
    kept = seeded.summarize(np.array([-50256, 50256, 7] * 20), 5)
    assert (kept["minimum"], kept["maximum"]) == (-50200, 50200)


def test_a_record_from_which_nothing_can_be_drawn_is_an_error(tmp_path: Path) -> None:
    inputs, _ = opened(shared(recorded(tmp_path), "values")[0])
    name = inputs.array_names[0]
    object.__setattr__(inputs.record(name), "seeded", {"zeros": 1.0})
    with pytest.raises(SnapshotError, match="cannot draw values"):
        inputs.array(name)


def test_variables_that_nobody_knows_and_credentials_in_urls_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secrets = ("TPU_API_KEY", "NCCL_SECRET", "JAX_MY_TOKEN", "XLA_MY_PASSWORD", "NEURON_AUTH_TOKEN")
    for name in secrets:
        monkeypatch.setenv(name, "hunter22")
    monkeypatch.setenv("SNAPRT_CACHE_REMOTE", "s3://ann:hunter22@host/bucket?X-Signature=hunter22")
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=gs://ann:hunter22@bucket/dump")
    cause = Cause("all", error_text(ValueError("no answer from http://ann:hunter22@host")))
    assert "hunter22" not in repr(cause)
    assert not set(secrets) & set(cause.environment)
    assert cause.environment["JAX_ENABLE_X64"] == "0"
    assert cause.environment["SNAPRT_CACHE_REMOTE"].startswith("s3://(hidden)@host/bucket")
