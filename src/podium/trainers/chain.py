"""Whether the steps of a trainer fit together: no column is read before somebody made it. Checked before anything starts.

What workers read and write is declared at their methods. What the driver's own steps do is written here, by config; a test holds
it against a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.config import RunConfig
from podium.errors import DataError, RegistrationError, nearest
from podium.protocol import Field
from podium.single_controller.routing.registration import registration_of
from podium.trainers.report import LOGGED_COLUMNS
from podium.workers import FIELDS, ActorRolloutRefWorker, TrainingWorker


@dataclass(frozen=True)
class Link:
    """One step of a chain, by the name of the method."""

    name: str
    reads: tuple[str, ...]
    """The columns without which it fails; of others it may make use where they are there."""
    writes: tuple[str, ...] | None
    """None where a method does not say: then any column may have come from it."""


def check_chain(links: Sequence[Link], fields: Mapping[str, Field] = FIELDS) -> None:
    """DataError for the first column that is read before it is made: who reads it, who makes it too late or could make it.

    Behind a link that does not say what it writes nothing can be told, and nothing is checked.
    """
    made: list[str] = []
    for place, link in enumerate(links):
        for name in link.reads:
            if name not in made:
                raise DataError(_gap(link, name, made, links[place:], fields))
        if link.writes is None:
            return
        made += [name for name in link.writes if name not in made]


def ppo_links(config: RunConfig) -> list[Link]:
    """The steps of `PPOTrainer.fit` in order, as the settings make them."""
    return list(_ppo_links(config))


def sft_links() -> list[Link]:
    """The steps of `SFTTrainer.fit` in order; its loss reads the mask."""
    made = ("input_ids", "responses", "response_mask")
    return [Link("batch", (), made), worker_link(TrainingWorker.train_batch, also_reads=("response_mask",))]


def worker_link(method: Callable[..., Any], *, also_reads: tuple[str, ...] = ()) -> Link:
    """What a registered method declares; `also_reads` are columns that it needs under some settings only.

    RegistrationError for a method that is not registered.
    """
    registration = registration_of(method)
    if registration is None:
        raise RegistrationError(f"{method.__qualname__} is not registered, so it is no step: decorate it with @register")
    rows = registration.rows
    return Link(method.__name__, (*(rows.reads or ()), *also_reads), rows.writes)


def _ppo_links(config: RunConfig) -> Iterator[Link]:
    worker, kl_in_reward = ActorRolloutRefWorker, config.algorithm.use_kl_in_reward
    yield Link("rollout", (), ("prompts", "uid", "problem"))
    yield worker_link(worker.generate_sequences)
    yield Link("score", ("response", "problem"), ("rewards", "is_scored"))
    if config.needs_reference:
        yield worker_link(worker.compute_ref_log_prob)
    if config.actor.recompute_old_log_probs:
        yield worker_link(worker.compute_log_prob)
    else:
        yield Link("log_probs", ("rollout_log_probs",), ("old_log_probs",))
    yield Link(
        "advantages",
        ("uid", "responses", "response_mask", "rewards", "is_scored", *_if(kl_in_reward, "old_log_probs", "ref_log_prob")),
        ("response_mask", "advantages", "mini_batch", *_if(kl_in_reward, "reward_kl")),
    )
    yield worker_link(worker.update_actor, also_reads=_if(config.actor.use_kl_loss, "ref_log_prob"))
    yield Link("log", ("responses", "input_ids", *LOGGED_COLUMNS), ())


def _if(condition: bool, *names: str) -> tuple[str, ...]:
    return names if condition else ()


def _gap(link: Link, name: str, made: Sequence[str], rest: Sequence[Link], fields: Mapping[str, Field]) -> str:
    later = [other.name for other in rest if name in (other.writes or ())]
    if later:
        remedy = f"{later[0]} makes it, but only afterwards"
    elif name in fields:
        remedy = f"{' or '.join(fields[name].made_by)} could make it ({fields[name].kind}), and is no step before it"
    else:
        remedy = f"nobody is known to make it{nearest(name, [*made, *fields])}"
    return f"{link.name} reads the column {name!r}, which nobody made before: {remedy}; made so far: {', '.join(made) or 'none'}"
