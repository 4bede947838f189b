"""What travels between the driver and the workers."""

from podium.protocol.balancing import interleave_groups
from podium.protocol.columns import object_column
from podium.protocol.data_proto import DataProto
from podium.protocol.meta import AUTO_PADDING_KEY, PADDING_ROWS_KEY, Mergeable
from podium.protocol.rows import concat_rows, is_rows, num_rows, partition_rows

__all__ = [
    "AUTO_PADDING_KEY",
    "PADDING_ROWS_KEY",
    "DataProto",
    "Mergeable",
    "concat_rows",
    "interleave_groups",
    "is_rows",
    "num_rows",
    "object_column",
    "partition_rows",
]
