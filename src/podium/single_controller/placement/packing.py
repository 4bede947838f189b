"""Where entries of some sizes go when each node has some room: whole numbers in, numbers of nodes out."""

from __future__ import annotations

from collections.abc import Sequence


def pack(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """For each entry a node with room for all of it, or None where first fit and best fit find none.

    Entries have nodes of their own where that is possible, and stand in the nodes' order where that is possible too.

    >>> pack([4, 2], [4, 4]), pack([4, 2], [2, 4]), pack([4, 2], [6]), pack([4, 2], [3, 3])
    ([0, 1], [1, 0], [0, 0], None)
    """
    largest_first = sorted(range(len(sizes)), key=lambda entry: sizes[entry], reverse=True)
    descending = [sizes[entry] for entry in largest_first]
    in_order = _apart_in_order(sizes, rooms)
    if in_order is not None:
        return in_order
    chosen = _apart(descending, rooms) or _together(descending, rooms)
    if chosen is None:
        return None
    node_of = dict(zip(largest_first, chosen, strict=True))
    return [node_of[entry] for entry in range(len(sizes))]


def pour(sizes: Sequence[int], rooms: Sequence[int]) -> list[list[int]] | None:
    """For each entry the nodes of its parts, node after node filled up, or None where the sum is too large.

    >>> pour([3, 2], [2, 3])
    [[0, 0, 1], [1, 1]]
    """
    if sum(sizes) > sum(rooms):
        return None
    places = (node for node, room in enumerate(rooms) for _ in range(room))
    return [[next(places) for _ in range(size)] for size in sizes]


def _apart_in_order(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    nodes = iter(range(len(rooms)))  # consumed: each entry looks behind the node of the one before
    chosen = [next((node for node in nodes if rooms[node] >= size), None) for size in sizes]
    found = [node for node in chosen if node is not None]
    return found if len(found) == len(sizes) else None


def _apart(descending: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    # Exact: a node with room for the largest entry has room for any other, so it does not matter which one it takes.
    left = list(range(len(rooms)))
    chosen: list[int] = []
    for size in descending:
        node = next((node for node in left if rooms[node] >= size), None)
        if node is None:
            return None
        left.remove(node)
        chosen.append(node)
    return chosen


def _together(descending: Sequence[int], rooms: Sequence[int], *, tightest: bool = False) -> list[int] | None:
    # First fit of the largest first, then best fit. They find every layout of entries of one size, and seldom miss another one.
    left = list(rooms)
    chosen: list[int] = []
    for size in descending:
        fitting = [node for node, room in enumerate(left) if room >= size]
        if not fitting:
            return None if tightest else _together(descending, rooms, tightest=True)
        node = min(fitting, key=left.__getitem__) if tightest else fitting[0]
        left[node] -= size
        chosen.append(node)
    return chosen
