"""What travels between the driver and the workers."""

from podium.protocol.balancing import interleave_groups
from podium.protocol.data_proto import DataProto, Mergeable, object_column

__all__ = ["DataProto", "Mergeable", "interleave_groups", "object_column"]
