"""The worker processes of a group: their lifecycle, the calls in flight on them, and the verdict on each call."""
