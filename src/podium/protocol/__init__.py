"""What travels between the driver and the workers."""

from podium.protocol.balancing import interleave_groups
from podium.protocol.batch import Batch
from podium.protocol.columns import object_column, whole_number
from podium.protocol.data_proto import DataProto
from podium.protocol.jagged import from_padded, jagged_from_rows, to_padded
from podium.protocol.merging import Mergeable
from podium.protocol.meta import AUTO_PADDING_KEY, PADDING_ROWS_KEY
from podium.protocol.padding import marks_of_padding, with_padding, without_padding
from podium.protocol.row_dicts import DataProtoItem
from podium.protocol.rows import (
    column_names,
    concat_rows,
    is_rows,
    num_rows,
    pad_dataproto_to_divisor,
    partition_rows,
    unpad_dataproto,
)
from podium.protocol.schema import Field, check_fields

__all__ = [
    "AUTO_PADDING_KEY",
    "PADDING_ROWS_KEY",
    "Batch",
    "DataProto",
    "DataProtoItem",
    "Field",
    "Mergeable",
    "check_fields",
    "column_names",
    "concat_rows",
    "from_padded",
    "interleave_groups",
    "is_rows",
    "jagged_from_rows",
    "marks_of_padding",
    "num_rows",
    "object_column",
    "pad_dataproto_to_divisor",
    "partition_rows",
    "to_padded",
    "unpad_dataproto",
    "whole_number",
    "with_padding",
    "without_padding",
]
