"""The record that `@register` attaches to a method: how a group calls it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podium.single_controller.routing.modes import DispatchMode, Execute

MAGIC_ATTR = "attrs_3141562937"  # verl's name, which ported code looks up
ROLES_ATTR = "raw_cls_dict"
"""Where the class of a colocated worker holds its roles; verl's name too."""


@dataclass(frozen=True)
class Registration:
    """How a group calls a method."""

    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool
    is_async: bool
    by_reference: bool = False
    """Whether the rows that it returns stay where they were made."""
    reads: tuple[str, ...] | None = None
    """The columns that it needs; None where not declared."""
    writes: tuple[str, ...] | None = None
    """The columns of its result; None where not declared."""


def registration_of(method: object) -> Registration | None:
    """The record that `register` attached, or None. Only functions are inspected: attributes of other objects may raise."""
    found = getattr(method, MAGIC_ATTR, None) if inspect.isroutine(method) else None
    return found if isinstance(found, Registration) else None


def classes_by_role(worker_class: type) -> dict[str | None, type]:
    """The class itself, under None, and those of the roles that it is made of."""
    roles: Mapping[str, Any] = getattr(worker_class, ROLES_ATTR, {})
    return {None: worker_class, **{role: init.cls for role, init in roles.items()}}
