"""XLA's protobuf messages, as far as snaprt reads and edits them.

XLA's `xla/service/hlo.proto` and `xla/xla_data.proto` are not installed with jaxlib. The messages
are built here from a table of the field numbers that snaprt uses. Every other field of a file is
kept as protobuf's unknown fields are: it goes back out as it came in.

A message that only passes through, or is only ever cleared, is declared ``Opaque``: no field of it
is known, so all are kept. The packed numbers of a literal are declared ``bytes``, which looks the
same on the wire: a Python object per element would make a large array cost a hundred times its
size (see `xla_literals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, EncodeError, Message

from snaprt.errors import SnapshotError

PROTOBUF_LIMIT = 2**31 - 1
"""The most bytes a serialized protobuf message may have."""

if TYPE_CHECKING:

    class XlaMessage(Message):
        """Any of the messages below; its fields are those of `FIELDS`."""

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    XlaMessage = Message

ELEMENT_TYPES = (
    (1, "pred", "bool", 2),
    (2, "s8", "int8", 15),
    (3, "s16", "int16", 17),
    (4, "s32", "int32", 4),
    (5, "s64", "int64", 5),
    (6, "u8", "uint8", 3),
    (7, "u16", "uint16", 16),
    (8, "u32", "uint32", 6),
    (9, "u64", "uint64", 7),
    (10, "f16", "float16", 11),
    (11, "f32", "float32", 8),
    (12, "f64", "float64", 9),
    (15, "c64", "complex64", 12),
    (16, "bf16", "bfloat16", 13),
    (18, "c128", "complex128", 18),
    (19, "f8e5m2", "float8_e5m2", 19),
    (20, "f8e4m3fn", "float8_e4m3fn", 20),
    (21, "s4", "int4", 21),
    (22, "u4", "uint4", 22),
    (23, "f8e4m3b11fnuz", "float8_e4m3b11fnuz", 23),
    (24, "f8e5m2fnuz", "float8_e5m2fnuz", 24),
    (25, "f8e4m3fnuz", "float8_e4m3fnuz", 25),
    (26, "s2", "int2", 26),
    (27, "u2", "uint2", 27),
    (28, "f8e4m3", "float8_e4m3", 28),
    (29, "f8e3m4", "float8_e3m4", 29),
    (30, "s1", "int1", 30),
    (31, "u1", "uint1", 31),
    (32, "f4e2m1fn", "float4_e2m1fn", 32),
    (33, "f8e8m0fnu", "float8_e8m0fnu", 33),
)
"""XLA's number and name of an element type, NumPy's or ml_dtypes' name, and the number of the field
of LiteralProto that holds such elements: ``preds`` for ``pred``."""

# Message -> field -> (number, type). Sources: openxla/xla, xla/service/hlo.proto and
# xla/xla_data.proto. Enumerations are int32 here, which is the same on the wire.
FIELDS: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "Opaque": {},
    "LayoutProto": {"minor_to_major": (1, "repeated int64")},
    "ShapeProto": {
        "element_type": (2, "int32"),
        "dimensions": (3, "repeated int64"),
        "tuple_shapes": (4, "repeated ShapeProto"),
        "layout": (5, "LayoutProto"),
        "is_dynamic_dimension": (6, "repeated bool"),
    },
    "ProgramShapeProto": {
        "parameters": (1, "repeated ShapeProto"),
        "result": (2, "ShapeProto"),
        "parameter_names": (3, "repeated string"),
    },
    "LiteralProto": {
        "shape": (1, "ShapeProto"),
        "tuple_literals": (10, "repeated LiteralProto"),
        **{f"{name}s": (number, "bytes") for _, name, _, number in ELEMENT_TYPES},
    },
    "OpMetadata": {
        "op_type": (1, "string"),
        "op_name": (2, "string"),
        "source_file": (3, "string"),
        "source_line": (4, "int32"),
        "stack_frame_id": (15, "int32"),
    },
    "WindowDimension": {"size": (1, "int64")},
    "Window": {"dimensions": (1, "repeated WindowDimension")},
    "DotDimensionNumbers": {
        "lhs_contracting_dimensions": (1, "repeated int64"),
        "rhs_contracting_dimensions": (2, "repeated int64"),
        "lhs_batch_dimensions": (3, "repeated int64"),
        "rhs_batch_dimensions": (4, "repeated int64"),
    },
    "ConvolutionDimensionNumbers": {
        "kernel_input_feature_dimension": (3, "int64"),
        "kernel_output_feature_dimension": (4, "int64"),
        "kernel_spatial_dimensions": (6, "repeated int64"),
        "input_batch_dimension": (7, "int64"),
        "input_feature_dimension": (8, "int64"),
        "output_batch_dimension": (9, "int64"),
        "output_feature_dimension": (10, "int64"),
        "input_spatial_dimensions": (11, "repeated int64"),
        "output_spatial_dimensions": (12, "repeated int64"),
    },
    "PrecisionConfig": {"operand_precision": (1, "repeated int32"), "algorithm": (2, "int32")},
    "SliceDimensions": {"start": (1, "int64"), "limit": (2, "int64"), "stride": (3, "int64")},
    "HloInstructionProto": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "ShapeProto"),
        "metadata": (7, "OpMetadata"),
        "literal": (8, "LiteralProto"),
        "parameter_number": (9, "int64"),
        "fusion_kind": (11, "string"),
        "tuple_index": (13, "int64"),
        "dimensions": (14, "repeated int64"),
        "window": (15, "Window"),
        "convolution_dimension_numbers": (16, "ConvolutionDimensionNumbers"),
        "slice_dimensions": (17, "repeated SliceDimensions"),
        "exponent_bits": (18, "int32"),
        "mantissa_bits": (19, "int32"),
        "dynamic_slice_sizes": (20, "repeated int64"),
        "custom_call_target": (28, "string"),
        "dot_dimension_numbers": (30, "DotDimensionNumbers"),
        "id": (35, "int64"),
        "operand_ids": (36, "repeated int64"),
        "control_predecessor_ids": (37, "repeated int64"),
        "called_computation_ids": (38, "repeated int64"),
        "sharding": (40, "Opaque"),
        "backend_config": (43, "bytes"),
        "feature_group_count": (50, "int64"),
        "precision_config": (51, "PrecisionConfig"),
        "constrain_layout": (56, "bool"),
        "operand_shapes_with_layout": (57, "repeated ShapeProto"),
        "batch_group_count": (61, "int64"),
        "comparison_direction": (63, "string"),
        "custom_call_has_side_effect": (65, "bool"),
        "output_operand_aliasing": (74, "repeated Opaque"),
        "async_execution_thread": (79, "string"),
        "original_value": (88, "Opaque"),
    },
    "HloComputationProto": {
        "name": (1, "string"),
        "instructions": (2, "repeated HloInstructionProto"),
        "program_shape": (4, "ProgramShapeProto"),
        "id": (5, "int64"),
        "root_id": (6, "int64"),
        "is_fusion_computation": (7, "bool"),
        "execution_thread": (8, "string"),
    },
    "HloModuleProto": {
        "name": (1, "string"),
        "entry_computation_name": (2, "string"),
        "computations": (3, "repeated HloComputationProto"),
        "host_program_shape": (4, "ProgramShapeProto"),
        "id": (5, "int64"),
        "entry_computation_id": (6, "int64"),
        "schedule": (7, "Opaque"),
        "input_output_alias": (8, "Opaque"),
        "cross_program_prefetches": (10, "repeated Opaque"),
        "device_assignment": (15, "Opaque"),
        "stack_frame_index": (17, "StackFrameIndexProto"),
        "buffer_donor": (18, "Opaque"),
    },
    "StackFrameIndexProto": {
        "file_names": (1, "repeated string"),
        "function_names": (2, "repeated string"),
        "file_locations": (3, "repeated FileLocation"),
        "stack_frames": (4, "repeated StackFrame"),
    },
    "FileLocation": {
        "file_name_id": (1, "int32"),
        "function_name_id": (2, "int32"),
        "line": (3, "int32"),
    },
    "StackFrame": {"file_location_id": (1, "int32"), "parent_frame_id": (2, "int32")},
    "HloProto": {
        "hlo_module": (1, "HloModuleProto"),
        "buffer_assignment": (3, "Opaque"),
    },
    "HloSnapshot": {
        "hlo": (1, "HloProto"),
        "arguments": (2, "repeated LiteralProto"),
        "result": (3, "LiteralProto"),
        "execution_platform": (4, "string"),
    },
    "HloInputs": {
        "arguments": (1, "repeated LiteralProto"),
        "arguments_descriptors": (2, "repeated LiteralDescriptor"),
    },
    "LiteralDescriptor": {"argument_size_bytes": (2, "int64")},
    "HloUnoptimizedSnapshot": {
        "hlo_module": (1, "HloModuleProto"),
        "partitions": (2, "repeated HloInputs"),
    },
}

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALAR_TYPES = {
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "string": _FIELD.TYPE_STRING,
}


def _build_messages() -> Mapping[str, type[XlaMessage]]:
    file = descriptor_pb2.FileDescriptorProto(
        name="snaprt/xla.proto", package="xla", syntax="proto3"
    )
    for message_name, fields in FIELDS.items():
        message = file.message_type.add(name=message_name)
        for field_name, (number, declared) in fields.items():
            repeated, _, type_name = declared.rpartition(" ")
            field = message.field.add(name=field_name, number=number)
            field.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            if type_name in _SCALAR_TYPES:
                field.type = _SCALAR_TYPES[type_name]
            else:
                field.type = _FIELD.TYPE_MESSAGE
                field.type_name = f".xla.{type_name}"
    # A pool of our own: another library in the process may have the full xla protos in the
    # default one.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: cast(
            "type[XlaMessage]",
            message_factory.GetMessageClass(pool.FindMessageTypeByName(f"xla.{name}")),
        )
        for name in FIELDS
    }


_MESSAGES = _build_messages()
ShapeProto = _MESSAGES["ShapeProto"]
LiteralProto = _MESSAGES["LiteralProto"]
HloInstructionProto = _MESSAGES["HloInstructionProto"]
HloComputationProto = _MESSAGES["HloComputationProto"]
HloModuleProto = _MESSAGES["HloModuleProto"]
HloProto = _MESSAGES["HloProto"]
HloSnapshot = _MESSAGES["HloSnapshot"]
HloInputs = _MESSAGES["HloInputs"]
HloUnoptimizedSnapshot = _MESSAGES["HloUnoptimizedSnapshot"]


def parse(
    message_type: type[XlaMessage], content: bytes | memoryview, source: str | Path
) -> XlaMessage:
    """Parse a serialized message.

    Args:
        message_type: One of this module's classes.
        content: The serialized message.
        source: The file it came from, for the error.

    Raises:
        SnapshotError: The bytes are not such a message, are cut short, or are more than protobuf
            can hold.
    """
    if len(content) > PROTOBUF_LIMIT:
        raise SnapshotError(
            f"{source}: {len(content):,} bytes is more than a protobuf message can hold (2 GiB).",
            hint="Record the program with snaprt: its snapshots have no such limit.",
        )
    message = message_type()
    try:
        message.ParseFromString(cast("bytes", content))  # which takes any buffer, unlike its stub
    except (DecodeError, RuntimeError) as error:
        raise SnapshotError(
            f"{source}: not a complete xla.{message.DESCRIPTOR.name} message ({error}).",
            hint="The file is truncated, damaged, or of another kind; dump it again.",
        ) from error
    return message


def serialize(message: XlaMessage) -> bytes:
    """Serialize a message, its unknown fields included.

    Raises:
        SnapshotError: It would be more than protobuf can hold.
    """
    try:
        return message.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise SnapshotError(
            f"Cannot serialize an xla.{message.DESCRIPTOR.name} message ({error}).",
            hint="A module with more than 2 GiB of constants cannot be replayed from XLA's protos.",
        ) from error
