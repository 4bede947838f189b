"""The methods of a worker class as its group knows them: the registered ones, those of its roles, and any other by its name."""

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
    """What can be called on a group of `worker_class`, which is the worker of a role or, with None, the whole of a process."""

    def __init__(self, worker_class: type, role: str | None, registered: Mapping[str | None, list[Method]]) -> None:
        self.worker_class = worker_class
        self._role = role
        self._registered = registered

    @classmethod
    def of(cls, worker_class: type) -> Methods:
        """Those of a class, and of its roles if it is made of some."""
        classes = classes_by_role(worker_class)
        return cls(worker_class, None, {role: _registered_methods(member, role) for role, member in classes.items()})

    @property
    def own(self) -> list[Method]:
        """The registered ones that are called by their plain name."""
        return self._registered[self._role]

    @property
    def registered_names(self) -> list[str]:
        """The plain names of all that are registered, the roles' included."""
        return [method.name for methods in self._registered.values() for method in methods]

    @property
    def roles(self) -> list[str]:
        """The roles that share a process, where the group is of all of them."""
        return [role for role in self._registered if role is not None and role != self._role]

    def of_role(self, role: str) -> Methods:
        """Those of one role."""
        return Methods(classes_by_role(self.worker_class)[role], role, {role: self._registered[role]})

    def flat(self, name: str) -> Method | None:
        """The method of a role that verl calls `<role>_<method>`, if there is one. AttributeError where there are two."""
        found = [method for role in self.roles for method in self._registered[role] if f"{role}_{method.name}" == name]
        if len(found) > 1:
            meant = " or ".join(f"spawn()[{method.role!r}].{method.name}" for method in found)
            raise AttributeError(f"{name!r} could mean {meant}: say which", name=name)
        return found[0] if found else None

    def any(self, name: str, execute: Execute) -> Method:
        """A method of the worker, registered or not, or of a role by its flat name, to be called with copies of its arguments.

        AttributeError, with the nearest name, where there is none.
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
        """What to say when the group has no such attribute."""
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
    """Whether the class has something of that name to be called, static and class methods included; runs no property.

    What only stands for a role's method does not count: that is found by its role.
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
