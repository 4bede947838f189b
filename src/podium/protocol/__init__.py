"""What travels between the driver and the workers."""

from podium.protocol.data_proto import DataProto, Mergeable, object_column

__all__ = ["DataProto", "Mergeable", "object_column"]
