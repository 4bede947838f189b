"""The methods of a worker class, as its group finds them: registered ones, those of its roles, and any other by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partialmethod
from typing import Any, cast

from podium.errors import nearest
from podium.single_controller.calls.group_call import Method
from podium.single_controller.colocation import IS_FLAT
from podium.single_controller.routing.modes import Dispatch, Execute
from podium.single_controller.routing.registration import Registration, classes_by_role, registration_of


class Methods:
    """The methods of `worker_class`, which is the class of a role or, if that is None, of the whole process."""

    def __init__(self, worker_class: type, role: str | None, registered: Mapping[str | None, list[Method]]) -> None:
        self.worker_class = worker_class
        self._role = role
        self._registered = registered

    @classmethod
    def of(cls, worker_class: type) -> Methods:
        """Those of a class and of its roles."""
        classes = classes_by_role(worker_class)
        return cls(worker_class, None, {role: _registered_methods(member, role) for role, member in classes.items()})

    @property
    def own(self) -> list[Method]:
        """The registered ones that the group offers by their plain names."""
        return self._registered[self._role]

    @property
    def registered_names(self) -> list[str]:
        """The plain names of all registered ones, the roles' included."""
        return [method.name for methods in self._registered.values() for method in methods]

    @property
    def roles(self) -> list[str]:
        """The roles that share a process, if the group is not of one role."""
        return [role for role in self._registered if role is not None and role != self._role]

    def of_role(self, role: str) -> Methods:
        """Those of one role."""
        return Methods(classes_by_role(self.worker_class)[role], role, {role: self._registered[role]})

    def flat(self, name: str) -> Method | None:
        """The method of a role by its flat name, `<role>_<method>`, or None. AttributeError if there are two."""
        found = [method for role in self.roles for method in self._registered[role] if f"{role}_{method.name}" == name]
        if len(found) > 1:
            meant = " or ".join(f"spawn()[{method.role!r}].{method.name}" for method in found)
            raise AttributeError(f"{name!r} could mean {meant}: use one of these", name=name)
        return found[0] if found else None

    def any(self, name: str, execute: Execute) -> Method:
        """A method of the worker, registered or not, or of a role by its flat name. Its arguments are copied to the ranks.

        AttributeError, with the nearest name, if there is no such method.
        """
        role = self._role
        if not is_method(self.worker_class, name):
            flat = self.flat(name)
            if flat is None:
                raise AttributeError(self._no_such_method(name), name=name)
            name, role = flat.name, flat.role
        registration = Registration(Dispatch.ONE_TO_ALL, execute, blocking=False, materialize_futures=True, is_async=False)
        return Method(name, role, registration, inspect.Signature(), None)

    def why_not(self, name: str) -> str:
        """The error text for an attribute that the group does not have."""
        if is_method(self.worker_class, name):
            return (
                f"{self.worker_class.__name__}.{name} exists but is not registered; decorate it with @register(dispatch_mode=...)"
            )
        if name in self.roles:
            return f"{name!r} is a role: spawn()[{name!r}] is its group, fuse() makes it an attribute"
        public = [method.name for method in self.own if not method.name.startswith("_")]
        near = nearest(name, public)
        return f"{self.worker_class.__name__} has no method {name!r}{near}; registered are: {', '.join(public) or 'none'}"

    def _no_such_method(self, name: str) -> str:
        known = [
            member for member in dir(self.worker_class) if not member.startswith("_") and is_method(self.worker_class, member)
        ]
        known += [f"{role}_{method.name}" for role in self.roles for method in self._registered[role]]
        return f"{self.worker_class.__name__} has no method {name!r}{nearest(name, known)}"


def is_method(owner: type, name: str) -> bool:
    """Whether the class has a callable of that name, static and class methods included; does not run properties.

    Methods that only forward to a role's method do not count: `flat` finds those.
    """
    member = inspect.getattr_static(owner, name, None)
    is_callable = callable(member) or isinstance(member, classmethod | staticmethod | partialmethod)
    return is_callable and not hasattr(member, IS_FLAT)


def _registered_methods(worker_class: type, role: str | None) -> list[Method]:
    # getattr_static: looking for methods must not run properties
    found = {name: inspect.getattr_static(worker_class, name) for name in dir(worker_class)}
    return [
        Method.of(name, cast(Callable[..., Any], member), registered, role)
        for name, member in found.items()
        if (registered := registration_of(member))
    ]
