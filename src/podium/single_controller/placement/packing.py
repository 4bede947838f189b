"""Where entries of some sizes go when each node has some room: whole numbers in, numbers of nodes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

SEARCH_CELLS = 300_000
"""Layouts kept at a time x entries x nodes: holds the search under a second, and misses nothing on clusters of like nodes."""

Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The room left on each node, and the nodes chosen so far."""


def pack(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """For each entry a node with room for all of it, or None.

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


def _together(descending: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    if not _could_fit(descending, rooms):
        return None
    # The first try is first-fit of the largest first, which seldom fails; the second looks at many layouts side by side.
    return _search(descending, rooms, 1) or _search(descending, rooms, SEARCH_CELLS // (len(descending) * len(rooms)))


def _could_fit(descending: Sequence[int], rooms: Sequence[int]) -> bool:
    """What has to hold, and with entries of one size is enough: for each size there are places for those not smaller."""
    places = all(sum(room // size for room in rooms) >= n for n, size in enumerate(descending, 1))
    return places and sum(descending) <= sum(rooms)


def _search(descending: Sequence[int], rooms: Sequence[int], width: int) -> list[int] | None:
    total = sum(descending)
    layouts: list[Layout] = [(tuple(min(room, total) for room in rooms), ())]
    for size in descending:
        grown: dict[tuple[int, ...], Layout] = {}  # layouts that leave the same rooms are as good as one
        for layout in (after for before in layouts for after in _with(size, before)):
            grown.setdefault(tuple(sorted(layout[0])), layout)
            if len(grown) >= width:
                break
        layouts = list(grown.values())
    return list(layouts[0][1]) if layouts else None


def _with(size: int, layout: Layout) -> Iterator[Layout]:
    left, chosen = layout
    first_with = {room: node for node, room in reversed(list(enumerate(left))) if room >= size}
    for node in sorted(first_with.values()):
        yield (*left[:node], left[node] - size, *left[node + 1 :]), (*chosen, node)
