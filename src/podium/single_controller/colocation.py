"""Several workers in one process per rank: each has a role, its own group on the driver, and access to the others.

`create_colocated_worker_cls` makes one class of several, `group.spawn()` a group for each role. Calls are routed by
(role, method), so roles such as `actor` and `actor_rollout` cannot be confused. An inner worker has the rank of its process.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, ClassVar

from podium.errors import DispatchError, RegistrationError
from podium.single_controller.init import Init
from podium.single_controller.routing.modes import DirectMode
from podium.single_controller.routing.registration import MAGIC_ATTR, Registration, registration_of
from podium.single_controller.worker import Worker

IS_FLAT = "_podium_is_flat"
"""The attribute of a method that forwards to the method of a role."""


class ColocatedWorker(Worker):
    """A worker made of workers. Subclass what `create_colocated_worker_raw_cls` returns to give it methods of its own."""

    raw_cls_dict: ClassVar[Mapping[str, Init[Any]]] = {}
    """The workers of the process, by role."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """RegistrationError if the class has another member with the name of a role."""
        super().__init_subclass__(**kwargs)
        taken = [role for role in cls.raw_cls_dict if hasattr(cls, role)]
        if taken:
            names = ", ".join(map(repr, taken))
            raise RegistrationError(
                f"{cls.__name__} must not have a member named {names}, which is the name of a role: rename one of them"
            )

    def __init__(self) -> None:
        """Build the workers in the order of their roles. Each `Worker` finds the earlier ones in its `fused_worker_dict`."""
        for role, init in self.raw_cls_dict.items():
            try:
                worker = _build(init, self.fused_worker_dict)
            except Exception as error:
                error.add_note(f"raised by the constructor of role {role!r} ({init.cls.__name__})")
                raise
            self.fused_worker_dict[role] = worker
            setattr(self, role, worker)

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """The worker of that role. DispatchError, naming the roles, if there is no such role or it was not built."""
        if worker_name in self.raw_cls_dict and worker_name not in self.fused_worker_dict:
            raise DispatchError(
                f"role {worker_name!r} of {type(self).__name__} was not built: call super().__init__() in its __init__, which "
                "builds the roles"
            )
        return super().get_fused_worker_by_name(worker_name)


def create_colocated_worker_raw_cls(class_dict: Mapping[str, Init[Any] | type]) -> type[ColocatedWorker]:
    """The plain class of a worker that has one of each role, as `self.<role>`. RegistrationError for invalid roles.

    Options for one runtime apply to the class as a whole: give them to the `Init` that is made of it.
    """
    inits = _inits(class_dict)
    for role, init in inits.items():
        if init.options:
            raise RegistrationError(
                f"role {role!r} must not have options of its own, got {init.options}: give them to the class made of the roles"
            )
    return _class_of(inits)


def create_colocated_worker_cls(class_dict: Mapping[str, Init[Any] | type]) -> Init[ColocatedWorker]:
    """The `Init` for a `WorkerGroup` with one worker of each role per rank; `group.spawn()` makes the roles' groups.

    The roles' options apply to the process that they share. RegistrationError if two roles have different options.
    """
    inits = _inits(class_dict)
    made = Init(_class_of(inits))
    for role, init in inits.items():
        for name, option in init.options.items():
            if made.options.setdefault(name, option) != option:
                raise RegistrationError(
                    f"role {role!r} must have the same option {name} as the roles before it, {made.options[name]!r}, since they "
                    f"share a process, got {option!r}"
                )
    return made


def _inits(class_dict: Mapping[str, Init[Any] | type]) -> dict[str, Init[Any]]:
    if not class_dict:
        raise RegistrationError("colocation needs at least one role, got none")
    for role in class_dict:
        if not isinstance(role, str) or not role.isidentifier() or role.startswith("_"):
            raise RegistrationError(f"the name of a role must be an identifier without a leading underscore, got {role!r}")
    return {role: init if isinstance(init, Init) else Init(init) for role, init in class_dict.items()}


def _class_of(inits: Mapping[str, Init[Any]]) -> type[ColocatedWorker]:
    members = {"raw_cls_dict": inits, "__module__": __name__, **_flat_methods(inits), **_direct_methods(inits)}
    return type("FusedWorker_" + "_".join(inits), (ColocatedWorker,), members)


def _build(init: Init[Any], colleagues: dict[str, Any]) -> Any:
    """The worker. Before its `__init__` runs, a `Worker` gets the workers of the other roles, unless it has roles itself."""
    if not issubclass(init.cls, Worker) or issubclass(init.cls, ColocatedWorker):
        return init()
    worker = init.cls.__new__(init.cls, *init.args, **init.kwargs)
    object.__setattr__(worker, "fused_worker_dict", colleagues)  # also where the class is frozen
    worker.__init__(*init.args, **init.kwargs)  # type: ignore[misc]  # the second half of calling the class
    return worker


def _registered(inits: Mapping[str, Init[Any]]) -> Iterator[tuple[str, str, Callable[..., Any], Registration]]:
    """(role, name, method, registration) of every registered method."""
    for role, init in inits.items():
        for name in dir(init.cls):
            member = inspect.getattr_static(init.cls, name)
            if (registration := registration_of(member)) is not None:
                yield role, name, member, registration


def _direct_methods(inits: Mapping[str, Init[Any]]) -> dict[str, Any]:
    """The direct methods of the roles, which are called on a worker's own handle by their plain names."""
    found: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for role, name, method, registration in _registered(inits):
        if isinstance(registration.dispatch_mode, DirectMode):
            _check_direct(role, name, owners)
            owners[name] = role
            found[name] = _forward(role, name, method, is_async=registration.is_async)
    return found


def _flat_methods(inits: Mapping[str, Init[Any]]) -> dict[str, Any]:
    """`<role>_<method>` for every registered method, to be called on a worker's own handle as in verl.

    Ambiguous names are left out, and so are names that every worker has. The group itself calls methods by role and name.
    """
    found: dict[str, Any] = {}
    names = Counter(f"{role}_{name}" for role, name, _, _ in _registered(inits))
    for role, name, method, registration in _registered(inits):
        flat = f"{role}_{name}"
        if names[flat] == 1 and not hasattr(ColocatedWorker, flat):
            found[flat] = _forward(role, name, method, is_async=registration.is_async)
            setattr(found[flat], MAGIC_ATTR, None)
            setattr(found[flat], IS_FLAT, True)
    return found


def _check_direct(role: str, name: str, owners: Mapping[str, str]) -> None:
    if name in owners:
        raise RegistrationError(
            f"only one role may have the direct method {name!r}, got {owners[name]!r} and {role!r}: rename one of the methods"
        )
    if hasattr(ColocatedWorker, name):
        raise RegistrationError(
            f"the direct method {name!r} of role {role!r} must not have the name of a method of every worker: rename it"
        )


def _forward(role: str, name: str, method: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """A method that forwards to the role's, with the same registration."""
    if is_async:

        @wraps(method)
        async def call_async(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.get_fused_worker_by_name(role), name)(*args, **kwargs)

        return call_async

    @wraps(method)
    def call(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.get_fused_worker_by_name(role), name)(*args, **kwargs)

    return call
