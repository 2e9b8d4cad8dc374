"""docs/reference/snapshot-format.md: its code works, and it names all that a manifest holds."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from programs import run_program

from snaprt.snapshot.format import schema
from snaprt.snapshot.format.arrays import DTYPE_NAMES

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "snapshot-format.md"


@pytest.mark.parametrize(
    "kind",
    [
        *(schema.ExecutionRecord, schema.DeviceRecord, schema.MemberRecord, schema.ArrayRecord),
        *(schema.Manifest, schema.ShardingRecord, schema.Proof, schema.TraceErrorRecord),
        schema.RecheckRecord,
    ],
)
def test_the_document_names_every_key_of_the_manifest(kind: type) -> None:
    named = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    assert {field.name for field in dataclasses.fields(kind)} <= named


def test_the_document_names_every_kind_of_dtype() -> None:
    text = DOCUMENT.read_text()
    kinds = {re.sub(r"(?<=float[86])_\w+", "", name) for name in DTYPE_NAMES}
    implied = {"int16", "int32", "uint16", "uint32"}
    assert {kind for kind in kinds - implied if kind not in text} == set()


def test_the_code_in_the_document_reads_a_snapshot(tmp_path: Path) -> None:
    import ml_dtypes
    import numpy as np

    from snaprt.snapshot.format.write import write_snapshot

    device = schema.DeviceRecord("cpu", "cpu", 0, 0)
    execution = schema.ExecutionRecord(
        role="inputs", name="g", graph_id="0" * 16, process=0, executable=0, device_index=0,
        execution_count=0, step=0, time=0.0, device=device, devices=(device,),
        platform_version="", versions={}, xla_flags="", environment={}, jax_config={},
        input_names=(), output_names=(), donated=(), source_locations=(),
    )  # fmt: skip
    arrays = {"a": np.ones((2, 3), ml_dtypes.bfloat16), "b": np.zeros(9999)}
    write_snapshot(
        tmp_path / "x.inputs.snap",
        schema.Contents(
            execution,
            schema.ModuleBytes(b"", b"", b""),
            [schema.ArrayContent(n, lambda v=v: v, v.nbytes) for n, v in arrays.items()],
        ),
    )
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert run_program(code, folder=tmp_path).stdout == "a bfloat16 (2, 3)\nb float64 (9999,)\n"
