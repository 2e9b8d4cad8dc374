"""Loading: the content tells the format, and every bad file is an error that says what it is."""

import gzip
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zstandard
from snaprt_replay.load import sniff
from snaprt_replay.load.case import Signature
from snaprt_replay.load.load import load
from snaprt_replay.load.modules import random_inputs, read_inputs
from snaprt_replay.run import player
from snaprt_replay.run.rerun import replay

from snaprt.errors import SnapshotError, UsageError

SNAPSHOTS = Path(__file__).parents[1] / "support" / "snapshots"
BARE = [sniff.MLIR_TEXT, sniff.MLIR_BYTECODE, sniff.HLO_TEXT, sniff.HLO_MODULE]
PARAMETERS = (Signature((4, 3), np.dtype(np.float32)), Signature((3, 2), np.dtype(np.float32)))


@pytest.mark.parametrize("form", BARE)
def test_the_format_is_told_from_the_content_not_the_name(
    form: str, modules: Mapping[str, Path], tmp_path: Path
) -> None:
    renamed = shutil.copy(modules[form], tmp_path / "something.bin")
    assert sniff.sniff(renamed) == form


@pytest.mark.parametrize("form", BARE)
def test_a_bare_module_says_what_it_takes_and_has_no_inputs(
    form: str, modules: Mapping[str, Path]
) -> None:
    case = load(modules[form])
    assert case.parameters == PARAMETERS
    assert case.inputs is None
    assert not case.trusted


@pytest.mark.parametrize("name", ["format-1.0.inputs.snap", "format-2.1.pack"])
def test_what_older_versions_recorded_is_read_and_replays(name: str) -> None:
    """The second one holds bfloat16, PRNG keys, a donated input and arrays of a store."""
    replayed = replay(SNAPSHOTS / name, isolated=False)
    assert replayed.comparison is not None
    assert not replayed.mismatch, replayed.comparison.summary


def test_a_recorded_step_brings_inputs_outputs_and_environment(recorded: Path) -> None:
    case = load(recorded)
    assert case.format == sniff.SNAPSHOT
    assert case.trusted
    assert case.inputs is not None
    assert case.outputs is not None
    assert {array.dtype.name for array in case.outputs} == {"float32", "bfloat16", "bool"}
    assert case.environment["platform"] == "cpu"
    assert {"jax", "jaxlib"} <= set(case.environment)


def test_the_outputs_file_leads_to_the_same_case(recorded: Path) -> None:
    outputs = recorded.with_name(recorded.name.replace(".inputs.", ".outputs."))
    one, other = load(recorded), load(outputs)
    assert [array.name for array in one.inputs or ()] == [
        array.name for array in other.inputs or ()
    ]
    assert len(one.outputs or ()) == len(other.outputs or ())


def test_without_its_sibling_a_file_says_what_is_missing(recorded: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(recorded, tmp_path))
    case = load(alone)
    assert case.outputs is None
    assert "nothing to compare with" in case.notes[0]
    outputs = recorded.with_name(recorded.name.replace(".inputs.", ".outputs."))
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    case = load(shutil.copy(outputs, lonely))
    assert case.inputs is None
    assert "no .inputs.snap next to it" in case.notes[0]


def test_other_inputs_leave_nothing_to_compare_with(recorded: Path) -> None:
    case = load(recorded, random_seed=7)
    assert case.outputs is None
    assert "not the recorded ones" in case.notes[-1]


def test_xlas_snapshot_is_loaded(xla_snapshot: Path) -> None:
    case = load(xla_snapshot)
    assert case.format == sniff.HLO_SNAPSHOT
    assert len(case.inputs or ()) == 2
    assert len(case.outputs or ()) == 3


def test_random_inputs_depend_on_the_seed_alone() -> None:
    dtypes = [np.bool_, np.int8, np.uint64, np.float64, np.complex64]
    dtypes += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ml_dtypes.int2]
    parameters = [Signature((5, 2), np.dtype(dtype)) for dtype in dtypes] + [
        Signature((), np.dtype(np.float32))
    ]
    one, other, another = (random_inputs(seed, parameters) for seed in (1, 1, 2))
    for left, right, wanted in zip(one, other, parameters, strict=True):
        assert (left.shape, left.dtype) == (wanted.shape, wanted.dtype)
        assert left.value.tobytes() == right.value.tobytes()
    assert one[3].value.tobytes() != another[3].value.tobytes()


def test_inputs_are_taken_by_name_or_in_order(tmp_path: Path) -> None:
    x, w = np.ones((4, 3), np.float32), np.zeros((3, 2), np.float32)
    np.savez(tmp_path / "named.npz", arg1=w, arg0=x)
    np.savez(tmp_path / "ordered.npz", x=x, w=w)
    for name in ("named.npz", "ordered.npz"):
        assert [a.value.sum() for a in read_inputs(tmp_path / name, PARAMETERS)] == [12, 0]


def test_bfloat16_inputs_come_back_from_npz(tmp_path: Path) -> None:
    value = np.arange(4).astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "in.npz", arg0=value)
    (array,) = read_inputs(tmp_path / "in.npz", [Signature((4,), value.dtype)])
    assert array.value.tolist() == [0, 1, 2, 3]
    assert array.dtype == value.dtype


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"arg0": np.ones((4, 3), np.float32)}, "holds 1 arrays, but the module takes 2"),
        (
            {"arg0": np.ones((4, 3)), "arg1": np.ones((3, 2), np.float32)},
            "is float64[4,3], but the module takes float32[4,3]",
        ),
        (
            {"arg0": np.ones((3, 4), np.float32), "arg1": np.ones((3, 2), np.float32)},
            "is float32[3,4], but the module takes float32[4,3]",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    arrays: dict[str, np.ndarray], said: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "in.npz", **arrays)
    with pytest.raises(UsageError) as caught:
        read_inputs(tmp_path / "in.npz", PARAMETERS)
    assert said in caught.value.message


def test_an_inputs_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.npz").write_bytes(b"nonsense")
    np.save(tmp_path / "one.npy", np.ones(3))
    np.savez(tmp_path / "objects.npz", arg0=np.array([{}], dtype=object))
    (tmp_path / "folder").mkdir()
    said = {
        "in.npz": "is not an .npz file",
        "one.npy": "is one .npy array, not an .npz file",
        "objects.npz": "it holds Python objects, not numbers",
        "folder": ": Is a directory",
        "absent.npz": "there is no file",
    }
    for name, words in said.items():
        with pytest.raises(SnapshotError) as caught:
            read_inputs(tmp_path / name, PARAMETERS)
        assert words in caught.value.message
        assert "allow_pickle" not in caught.value.message


def zipped() -> bytes:
    import io

    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones(3))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello, world\n" * 20, "text, but not a module"),
        (zipped(), "a zip archive or .npz"),
        (gzip.compress(b"x" * 100, mtime=0), "gzip"),
        (b'hlo_module {\n  name: "jit_step"\n', "a snapshot or module that XLA wrote as text"),
        (b"\x7fELF" + bytes(200), "a program or library"),
        (bytes(range(256)) * 20, "is not a file that snaprt can replay"),
        (b"ML\xefR" + bytes(50), "cannot read the module"),
        (b"module { nonsense }", "cannot read the module"),
        (b"HloModule nonsense", "HLO text"),
    ],
)
def test_a_foreign_file_is_named_for_what_it_is(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        load(path)
    assert said in caught.value.message
    assert "file.bin" in caught.value.message


@pytest.mark.parametrize(
    ("compress", "command"), [(gzip.compress, "gunzip --keep"), (zstandard.compress, "unzstd")]
)
def test_a_compressed_file_says_how_to_decompress_it(
    compress: Callable[[bytes], bytes], command: str, tmp_path: Path
) -> None:
    path = tmp_path / "module.hlo.pb.gz"
    path.write_bytes(compress(b"x" * 100))
    with pytest.raises(SnapshotError) as caught:
        load(path)
    assert caught.value.hint == f"decompress it: {command} {path}"


def test_missing_files_and_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="there is no file"):
        load(tmp_path / "absent.snap")
    with pytest.raises(SnapshotError, match="is a directory"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["recorded", "xla_snapshot"])
def test_a_truncated_file_is_an_error_wherever_it_is_cut(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    content = request.getfixturevalue(kind).read_bytes()
    path = tmp_path / "cut.bin"
    for share in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(SnapshotError, match=r"cut\.bin"):
            load(path)


def test_flipped_bits_in_a_bytecode_neither_end_this_process_nor_raise_foreign_errors(
    modules: Mapping[str, Path], tmp_path: Path
) -> None:
    content = modules[sniff.MLIR_BYTECODE].read_bytes()
    path = tmp_path / "flipped.stablehlo"
    for position in range(5, len(content), len(content) // 6):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 0x80]) + content[position + 1 :]
        )
        try:
            load(path)
        except SnapshotError:
            continue


def test_a_bytecode_that_hangs_its_reader_is_an_error(
    monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Path]
) -> None:
    monkeypatch.setattr("snaprt_replay.load.modules._PARSE_SECONDS", 0.01)
    with pytest.raises(SnapshotError, match=r"reading it took longer than 0\.01 seconds"):
        load(modules[sniff.MLIR_BYTECODE])


def test_tokens_are_made_where_they_are_needed_and_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "ordered.mlir"
    path.write_text(
        "func.func @main(%token: !stablehlo.token, %x: tensor<2xf32>)"
        " -> (!stablehlo.token, tensor<2xf32>) {\n"
        "  %after = stablehlo.after_all %token : !stablehlo.token\n"
        "  %sum = stablehlo.add %x, %x : tensor<2xf32>\n"
        "  return %after, %sum : !stablehlo.token, tensor<2xf32>\n}"
    )
    case = load(path, random_seed=3)
    assert case.parameters == (Signature((2,), np.dtype("float32")),)
    result = player.play(case)
    assert case.inputs is not None
    np.testing.assert_array_equal(result.outputs[0].value, 2 * case.inputs[0].value)
