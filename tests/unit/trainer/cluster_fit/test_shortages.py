"""Comparison of what roles need with what a cluster has."""

import pytest

from raylight.trainer.cluster_fit.cluster_shape import GIB, ClusterShape, NodeShape
from raylight.trainer.cluster_fit.role_memory import Item, RoleMemory
from raylight.trainer.cluster_fit.shortages import find_shortages, gib


def cluster(nodes: int = 1, gpus: int = 0, gpu_memory: float = 0, memory: float = 100) -> ClusterShape:
    return ClusterShape((NodeShape(int(memory * GIB), gpus, int(gpu_memory * GIB)),) * nodes)


def role(
    name: str = "learner",
    processes: int = 1,
    gpus: float = 0,
    device: float = 0,
    host: float = 0,
    group: int = 1,
):
    items = (Item("weights", int(device * GIB)), Item("libraries", int(host * GIB), "host"))
    return RoleMemory(name, processes, gpus, items, group)


def kinds(roles: list[RoleMemory], on: ClusterShape) -> list[str]:
    return [shortage.what for shortage in find_shortages(roles, on)]


def test_a_run_that_fits_lacks_nothing():
    assert kinds([role(processes=8, gpus=1, device=70, host=10)], cluster(1, 8, 80)) == []


def test_without_a_gpu_everything_is_in_host_memory():
    process = role(device=3, host=1)
    assert (process.total("device"), process.total("host")) == (0, 4 * GIB)
    assert kinds([process], cluster(memory=3.9)) == ["host memory"]
    assert kinds([process], cluster(memory=4.1)) == []


def test_missing_gpus_are_named_by_role():
    (shortage,) = find_shortages(
        [role(processes=4, gpus=1), role("engine", processes=2, gpus=2)], cluster(1, 7, 80)
    )
    assert shortage.message == "the run needs 8 GPUs (4 x 1 for learner, 2 x 2 for engine); there are 7"


def test_roles_with_a_fraction_of_a_gpu_share_it():
    learner, engine = role(gpus=0.6, device=50), role("engine", gpus=0.4, device=40)
    assert kinds([learner, engine], cluster(1, 1, 80)) == ["GPU memory"]
    assert kinds([learner, engine], cluster(1, 1, 96)) == []


def test_roles_that_take_turns_need_the_larger_of_both():
    learner, engine = role(gpus=0.6, device=50), role("engine", gpus=0.4, device=40)
    assert find_shortages([learner, engine], cluster(1, 1, 80), take_turns=True) == []


def test_what_an_idle_role_keeps_counts_while_the_other_computes():
    learner = RoleMemory("learner", 1, 0.6, (Item("weights", 30 * GIB, stays=True), Item("pass", 20 * GIB)))
    engine = role("engine", gpus=0.4, device=50)
    (shortage,) = find_shortages([learner, engine], cluster(1, 1, 80), take_turns=True)
    assert shortage.message.startswith("engine and learner: 80.0 GiB on each GPU")
    assert find_shortages([learner, engine], cluster(1, 1, 90), take_turns=True) == []


def test_roles_that_keep_their_memory_count_in_full_in_each_turn():
    learner, engine = role(gpus=0.4, device=50), role("engine", gpus=0.2, device=40)
    teacher = RoleMemory("teacher", 2, 0.2, (Item("weights", 10 * GIB, stays=True),))
    (shortage,) = find_shortages([learner, engine, teacher], cluster(1, 1, 70), take_turns=True)
    assert shortage.message.startswith("learner and teacher and teacher: 70.0 GiB on each GPU")
    assert find_shortages([learner, engine, teacher], cluster(1, 1, 74), take_turns=True) == []


def test_a_part_of_a_gpu_is_left_for_fragmentation():
    assert kinds([role(gpus=1, device=79)], cluster(1, 1, 80)) == ["GPU memory"]


def test_memory_that_grows_on_demand_counts_at_the_peak():
    items = (Item("weights", GIB), Item("key-value cache", 10 * GIB, grows=True))
    engine = RoleMemory("engine", 1, 0, items)
    assert engine.total("host") == 11 * GIB
    assert find_shortages([engine], cluster(memory=2), at_peak=False) == []
    assert kinds([engine], cluster(memory=2)) == ["host memory"]


def test_sizes_are_readable():
    assert [gib(size) for size in (0, 5 * 2**20, GIB, 80 * GIB)] == ["0 MiB", "5 MiB", "1.0 GiB", "80.0 GiB"]


def test_memory_is_compared_on_each_machine():
    learners = role("learner", processes=2, gpus=1, host=30)
    nodes = (NodeShape(40 * GIB, 2, GIB), NodeShape(40 * GIB))
    (shortage,) = find_shortages([learners], ClusterShape(nodes))
    assert shortage.message == (
        "the processes of one machine need 60.0 GiB of host memory (2 x learner); it has 40.0 GiB"
    )
    assert kinds([learners], cluster(2, 1, 1, memory=40)) == []


def test_processes_without_gpus_are_spread():
    assert kinds([role(processes=4, host=30)], cluster(2, memory=70)) == []
    assert kinds([role(processes=5, host=30)], cluster(2, memory=70)) == ["host memory"]


def test_two_fractions_above_a_half_do_not_fit_on_one_gpu():
    (shortage,) = find_shortages([role(processes=3, gpus=0.6)], cluster(1, 2, 80))
    assert shortage.what == "GPUs"
    assert shortage.message == "the run needs 3 GPUs (3 x 0.6 for learner); there are 2"


PLACED = [
    ([role(gpus=0.4), role("engine", processes=2, gpus=0.6)], (2,)),
    ([role(gpus=0.4), role("engine", processes=2, gpus=0.6)], (1, 1)),
    ([role(gpus=0.3), role("engine", gpus=0.5), role("teacher", processes=2, gpus=0.6)], (3,)),
    ([role(gpus=0.3), role("engine", gpus=0.8), role("teacher", gpus=0.2), role("judge", gpus=0.7)], (2,)),
    ([role("engine", processes=2, gpus=0.4), role("teacher", processes=2, gpus=0.6)], (1, 1)),
    ([role(gpus=0.5), role("engine", processes=2, gpus=1), role("teacher", gpus=0.5)], (1, 2)),
    ([role(processes=2, gpus=0.6, group=2), role("engine", gpus=0.35), role("teacher", gpus=0.6)], (2, 1)),
]
NOT_PLACED = [
    ([role("engine", processes=2, gpus=0.4), role("teacher", processes=2, gpus=0.6)], (2,)),
    ([role(processes=2, gpus=0.4, group=2), role("engine", processes=2, gpus=0.6)], (1, 1)),
    ([role(gpus=1), role("engine", gpus=2)], (2, 1)),  # the learner starts on the machine with two
    ([role("engine", processes=2, gpus=1), role("teacher", gpus=2)], (2, 2, 1)),
]


@pytest.mark.parametrize(("roles", "gpus"), PLACED)
def test_a_placement_that_ray_makes_is_found(roles, gpus):
    nodes = ClusterShape(tuple(NodeShape(GIB, count, GIB) for count in gpus))
    assert find_shortages(roles, nodes) == []


@pytest.mark.parametrize(("roles", "gpus"), NOT_PLACED)
def test_a_placement_that_ray_does_not_make_is_not_promised(roles, gpus):
    nodes = ClusterShape(tuple(NodeShape(GIB, count, GIB) for count in gpus))
    assert [shortage.what for shortage in find_shortages(roles, nodes)] == ["GPUs"]


def test_enough_gpus_on_the_wrong_machines_are_missing():
    nodes = ClusterShape((NodeShape(GIB, 2, GIB), NodeShape(GIB, 1, GIB)))
    (shortage,) = find_shortages([role(gpus=1), role("engine", gpus=2)], nodes)
    assert shortage.message.endswith("there are 3, on which Ray cannot place them in this order")


def test_the_processes_of_a_placement_group_fill_a_machine():
    nodes = cluster(2, 2, 80, memory=50)
    assert kinds([role(processes=2, gpus=1, host=30)], nodes) == []
    assert kinds([role(processes=2, gpus=1, host=30, group=2)], nodes) == ["host memory"]
