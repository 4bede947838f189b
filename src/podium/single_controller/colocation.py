"""Several workers in one process per rank: each has a role, its own group on the driver, and access to the others.

`create_colocated_worker_cls` makes one class of several, `group.spawn()` a group for each role. Roles are routed by
(role, method), so that `actor` and `actor_rollout` never mix. An inner worker is constructed as the rank that it is part of;
no environment variable is touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar

from podium.errors import DispatchError, RegistrationError
from podium.single_controller.init import Init
from podium.single_controller.routing.modes import DirectMode
from podium.single_controller.routing.registration import MAGIC_ATTR, registration_of
from podium.single_controller.worker import Worker

IS_FLAT = "_podium_is_flat"
"""The attribute of a method that stands for that of a role."""


class ColocatedWorker(Worker):
    """A worker made of workers. Subclass what `create_colocated_worker_raw_cls` returns to give it methods of its own."""

    raw_cls_dict: ClassVar[Mapping[str, Init[Any]]] = {}
    """What is in the process, by role."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """RegistrationError when the class has something else under the name of a role."""
        super().__init_subclass__(**kwargs)
        taken = [role for role in cls.raw_cls_dict if hasattr(cls, role)]
        if taken:
            names = ", ".join(map(repr, taken))
            raise RegistrationError(
                f"{cls.__name__} has a member of its own named {names}, where a role's worker goes; rename one"
            )

    def __init__(self) -> None:
        """Build the workers in the order of their roles. A `Worker` finds those before it in its `fused_worker_dict`."""
        for role, init in self.raw_cls_dict.items():
            try:
                worker = _build(init, self.fused_worker_dict)
            except Exception as error:
                error.add_note(f"raised by the constructor of role {role!r} ({init.cls.__name__})")
                raise
            self.fused_worker_dict[role] = worker
            setattr(self, role, worker)

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """The worker of that role. DispatchError naming the roles where there is none, or none was built."""
        if worker_name in self.raw_cls_dict and worker_name not in self.fused_worker_dict:
            raise DispatchError(
                f"role {worker_name!r} of {type(self).__name__} has not been built: its __init__ calls super().__init__(), "
                "which builds the roles"
            )
        return super().get_fused_worker_by_name(worker_name)


def create_colocated_worker_raw_cls(class_dict: Mapping[str, Init[Any] | type]) -> type[ColocatedWorker]:
    """The plain class of a worker that holds one of each, as `self.<role>`. RegistrationError for roles that cannot be.

    Options for one runtime belong to the class as a whole: give them to the `Init` that is made of it.
    """
    inits = _inits(class_dict)
    for role, init in inits.items():
        if init.options:
            raise RegistrationError(
                f"role {role!r} has options {init.options} of its own: give them to the class made of the roles"
            )
    return _class_of(inits)


def create_colocated_worker_cls(class_dict: Mapping[str, Init[Any] | type]) -> Init[ColocatedWorker]:
    """What a `WorkerGroup` is made of, to hold one worker of each role per rank: `group.spawn(roles)` gives their groups.

    The roles' options become those of the process that they share. RegistrationError where two roles contradict.
    """
    inits = _inits(class_dict)
    made = Init(_class_of(inits))
    for role, init in inits.items():
        for name, option in init.options.items():
            if made.options.setdefault(name, option) != option:
                raise RegistrationError(
                    f"role {role!r} has option {name}={option!r}, a role before it {made.options[name]!r}: they share a process, "
                    "so give them the same"
                )
    return made


def _inits(class_dict: Mapping[str, Init[Any] | type]) -> dict[str, Init[Any]]:
    if not class_dict:
        raise RegistrationError("colocation needs at least one role, got none")
    for role in class_dict:
        if not isinstance(role, str) or not role.isidentifier() or role.startswith("_"):
            raise RegistrationError(f"a role is named like a Python variable, got {role!r}")
    return {role: init if isinstance(init, Init) else Init(init) for role, init in class_dict.items()}


def _class_of(inits: Mapping[str, Init[Any]]) -> type[ColocatedWorker]:
    members = {"raw_cls_dict": inits, "__module__": __name__, **_flat_methods(inits), **_direct_methods(inits)}
    return type("FusedWorker_" + "_".join(inits), (ColocatedWorker,), members)


def _build(init: Init[Any], colleagues: dict[str, Any]) -> Any:
    """The worker; a `Worker` knows its colleagues before its `__init__` runs, unless it is made of workers itself."""
    if not issubclass(init.cls, Worker) or issubclass(init.cls, ColocatedWorker):
        return init()
    worker = init.cls.__new__(init.cls, *init.args, **init.kwargs)
    object.__setattr__(worker, "fused_worker_dict", colleagues)  # also where the class is frozen
    worker.__init__(*init.args, **init.kwargs)  # type: ignore[misc]  # the second half of calling the class
    return worker


def _direct_methods(inits: Mapping[str, Init[Any]]) -> dict[str, Any]:
    """The methods that are called on a worker's own handle, which knows no roles."""
    found: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for role, init in inits.items():
        for name in dir(init.cls):
            member = inspect.getattr_static(init.cls, name)
            registration = registration_of(member)
            if registration is None or not isinstance(registration.dispatch_mode, DirectMode):
                continue
            _check_direct(role, name, owners)
            owners[name] = role
            found[name] = _forward(role, name, member, is_async=registration.is_async)
    return found


def _flat_methods(inits: Mapping[str, Init[Any]]) -> dict[str, Any]:
    """`<role>_<method>` for every registered method, to be called on a worker's own handle as in verl.

    A name that two roles could mean is left out, and so is one that every worker has itself. The group does not call these: it
    knows methods by their role.
    """
    found: dict[str, Any] = {}
    several: set[str] = set()
    for role, init in inits.items():
        for name in dir(init.cls):
            member = inspect.getattr_static(init.cls, name)
            registration = registration_of(member)
            flat = f"{role}_{name}"
            if registration is None or hasattr(ColocatedWorker, flat):
                continue
            if flat in found:
                several.add(flat)
            found[flat] = _forward(role, name, member, is_async=registration.is_async)
            setattr(found[flat], MAGIC_ATTR, None)
            setattr(found[flat], IS_FLAT, True)
    return {name: method for name, method in found.items() if name not in several}


def _check_direct(role: str, name: str, owners: Mapping[str, str]) -> None:
    if name in owners:
        raise RegistrationError(f"roles {owners[name]!r} and {role!r} both have the direct method {name!r}; rename one")
    if hasattr(ColocatedWorker, name):
        raise RegistrationError(f"role {role!r} has the direct method {name!r}, a name that every worker has itself; rename it")


def _forward(role: str, name: str, method: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """The role's method on the worker that it is part of, registered likewise: the group knows it, and refuses to call it."""
    if is_async:

        @wraps(method)
        async def call_async(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.get_fused_worker_by_name(role), name)(*args, **kwargs)

        return call_async

    @wraps(method)
    def call(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.get_fused_worker_by_name(role), name)(*args, **kwargs)

    return call
