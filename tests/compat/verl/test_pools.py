from __future__ import annotations

import re
from enum import Enum
from typing import Any

import pytest

from podium.compat.verl import ResourcePoolManager
from podium.compat.verl.pools import extract_groups
from podium.errors import ResourceError


class Role(Enum):
    Actor = 1
    RewardModel = 2


def manager(**options: Any) -> ResourcePoolManager[Role]:
    spec = {"global_pool": [4, 4], "reward_pool": [2]}
    return ResourcePoolManager(spec, {Role.Actor: "global_pool", Role.RewardModel: "reward_pool"}, **options)


def test_the_manager_makes_each_pool_once():
    made = manager()
    pools = made.create_resource_pool()
    assert made.create_resource_pool() == pools == made.resource_pool_dict
    assert made.get_resource_pool(Role.RewardModel) is made.create_resource_pool()["reward_pool"] is pools["reward_pool"]
    assert made.get_resource_pool(Role.Actor).store == [4, 4]
    assert [(pool.name_prefix, pool.max_colocate_count, pool.use_gpu) for pool in pools.values()] == [
        ("global_pool", 3, True),
        ("reward_pool", 3, True),
    ]


def test_the_manager_counts_gpus():
    assert manager().get_n_gpus() == 10
    assert manager(use_gpu=False).get_n_gpus() == 0


def test_a_role_without_a_pool():
    with pytest.raises(ResourceError, match="unknown role 'actr'; did you mean 'actor'"):
        ResourcePoolManager({"global_pool": [1]}, {"actor": "global_pool"}).get_resource_pool("actr")
    only_actor = ResourcePoolManager({"global_pool": [1]}, {Role.Actor: "global_pool"})
    with pytest.raises(ResourceError, match=r"unknown role 'RewardModel'\. Known: Actor"):
        only_actor.get_resource_pool(Role.RewardModel)


def test_a_pool_that_is_not_in_the_spec():
    with pytest.raises(ResourceError, match="role 'teacher': unknown resource pool 'global_pol'; did you mean 'global_pool'"):
        ResourcePoolManager({"global_pool": [1]}, {"teacher": "global_pol"})


@pytest.mark.parametrize("role", [[], ([],), {}, None, 3])
def test_what_cannot_be_a_role_is_an_unknown_one(role: Any):
    with pytest.raises(ResourceError, match=f"unknown role .{re.escape(str(role))}.*Known: Actor, RewardModel"):
        manager().get_resource_pool(role)


@pytest.mark.parametrize(
    ("spec", "mapping", "message"),
    [
        ([2], {}, r"resource_pool_spec must be a dict of pool name -> ranks per node, .*, got \[2\]"),
        (None, {}, "resource_pool_spec must be a dict .*, got None"),
        ({"a": 2}, {}, "resource pool 'a': process_on_nodes .*, got 2;"),
        ({"a": "2"}, {}, "resource pool 'a': process_on_nodes .*, got '2';"),
        ({1: [2]}, {}, "a resource pool must be named by a string, got 1"),
        ({"a": [2]}, ["a"], r"mapping must be a dict of role -> pool name, .*, got \['a'\]"),
        ({"a": [2]}, {"actor": 3}, "role 'actor': unknown resource pool '3'. Known: a"),
        ({"a": [2]}, {"actor": ["a"]}, r"role 'actor': unknown resource pool .*\. Known: a"),
        ({"a": [2]}, {3: "b"}, "role '3': unknown resource pool 'b'. Known: a"),
    ],
)
def test_tables_that_make_no_sense(spec: Any, mapping: Any, message: str):
    with pytest.raises(ResourceError, match=message):
        ResourcePoolManager(spec, mapping)


def test_the_manager_has_lists_of_its_own():
    spec = {"a": [2]}
    made: ResourcePoolManager[str] = ResourcePoolManager(spec, {"actor": "a"})
    spec["a"].append(2)
    assert made.resource_pool_spec == {"a": [2]}


@pytest.mark.parametrize(("option", "value"), [("use_gpu", "no"), ("max_colocate_count", "3")])
def test_the_managers_options_are_checked(option: str, value: Any):
    with pytest.raises(ResourceError, match=f"resource pool 'global_pool': {option} must be .*, got {value!r}"):
        manager(**{option: value})


def test_a_spec_that_makes_no_sense_names_the_pool():
    with pytest.raises(ResourceError, match=r"resource pool 'teacher_pool': process_on_nodes .* got \[0\]"):
        ResourcePoolManager({"teacher_pool": [0]}, {"teacher": "teacher_pool"})


def test_existing_groups_are_given_largest_to_largest_in_the_order_of_the_request():
    assert extract_groups([("two", 2), ("eight", 8), ("four", 4)], [3, 8]) == ["four", "eight"]
    assert extract_groups([("a", 4), ("b", 4)], [4, 4]) == ["a", "b"]


@pytest.mark.parametrize("requested", [[4, 4], [2, 2, 2], [5]])
def test_existing_groups_that_are_too_few_or_too_small(requested: list[int]):
    with pytest.raises(ResourceError, match=r"existing ones have \[4, 2\] bundles"):
        extract_groups([("a", 2), ("b", 4)], requested)
