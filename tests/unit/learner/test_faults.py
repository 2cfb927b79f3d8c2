"""What failures of learners mean, by the exceptions that Ray and torch really raise; and steps whose gradient is not finite."""

import math
import pickle
import re
import threading
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    OwnerDiedError,
    RayTaskError,
)

from raylight.config import LearnerConfig, LoraConfig
from raylight.errors import (
    ConfigError,
    LearnerError,
    LearnerLostError,
    LearnerMemoryError,
    MismatchError,
    NonFiniteGradientError,
    RaylightError,
)
from raylight.learner.actor import interface_of
from raylight.learner.faults import fault_in_rank, fault_of, is_hearsay, memory_advice
from raylight.learner.grad_guard import MAX_NON_FINITE, GradientWatch
from raylight.learner.stack_dump import take_stacks

CONFIG = LearnerConfig(n=2, max_tokens_per_micro_batch=512)
LOG = "ray logs actor --id abc --err"

Distributed = type("DistBackendError", (type("DistError", (RuntimeError,), {}),), {})
Cuda = type("OutOfMemoryError", (RuntimeError,), {})


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (
            Cuda("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB"),
            LearnerMemoryError,
        ),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            LearnerMemoryError,
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            LearnerMemoryError,
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
            ),
            LearnerMemoryError,
        ),
        (RuntimeError("std::bad_alloc"), LearnerMemoryError),
        (MemoryError("Unable to allocate 8.00 TiB for an array"), LearnerMemoryError),
        (MemoryError(), LearnerMemoryError),
        (Distributed("Watchdog caught collective operation timeout"), LearnerLostError),
        (
            RuntimeError(
                "[/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"
            ),
            LearnerLostError,
        ),
        (
            RuntimeError(
                "[/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms"
            ),
            LearnerLostError,
        ),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), LearnerLostError),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x4 and 5x1)"), None),
        (ValueError("not enough memory of this word"), None),
        (MismatchError("the engine differs"), None),
    ],
)
def test_what_an_exception_in_a_rank_is(error: Exception, meaning: type | None) -> None:
    fault = fault_in_rank(error, 1, CONFIG)
    assert type(fault) is (meaning or type(None))
    if fault is not None:
        assert str(fault).startswith("learner 1 ")
        assert str(error).partition("\n")[0].rstrip(".") in str(fault)
        assert "\n" not in str(fault)


def test_the_types_of_torch_are_known_by_the_names_they_have() -> None:
    import torch
    import torch.distributed as dist

    assert type(fault_in_rank(torch.cuda.OutOfMemoryError("no more"), 0, CONFIG)) is LearnerMemoryError
    for lost in (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError):
        assert type(fault_in_rank(lost("gone"), 0, CONFIG)) is LearnerLostError
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert type(fault_in_rank(caught.value, 0, CONFIG)) is LearnerMemoryError


def test_the_advice_names_three_settings_and_what_they_are() -> None:
    on_cpu, on_gpu = (
        memory_advice(CONFIG),
        memory_advice(LearnerConfig(num_gpus=1, gradient_checkpointing=True, lora=LoraConfig())),
    )
    for setting in ("max_tokens_per_micro_batch (512 now)", "gradient_checkpointing (False now)", "lora"):
        assert setting in on_cpu
    for setting in (
        "(16384 now)",
        "gradient_checkpointing (True now)",
        "param_offload and optimizer_offload (False and False now)",
    ):
        assert setting in on_gpu
    for name in (
        "max_tokens_per_micro_batch",
        "gradient_checkpointing",
        "param_offload",
        "optimizer_offload",
        "lora",
    ):
        assert name in LearnerConfig.model_fields


def died(text: str) -> ActorDiedError:
    """As Ray makes it of a process that ended."""
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    context = ActorDiedErrorContext(
        error_message=text, class_name="LearnerActor", actor_id=bytes(16), pid=7, node_ip_address="10.0.0.1"
    )
    return ActorDiedError(context)


KILLED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly "
    "exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is killed by SIGKILL "
    "by OOM killer due to high memory usage. (2) ray stop --force is called."
)
IN_INIT = ActorDiedError(
    RayTaskError("__init__", "Traceback\nValueError: no such rank", ValueError("no such rank"))
)


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("call", f"Traceback\n{cause!r}", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "meaning", "told"),
    [
        (
            died(KILLED),
            LearnerLostError,
            "learner 1 died: The actor is dead because its worker process has died",
        ),
        (died("The node (10.0.0.1) that hosted the actor died."), LearnerLostError, "node (10.0.0.1)"),
        (ActorUnavailableError("connection reset", b"0" * 16), LearnerLostError, LOG),
        (NodeDiedError("the node died"), LearnerLostError, LOG),
        (OwnerDiedError("ab" * 28, None, ""), LearnerLostError, LOG),
        (
            OutOfMemoryError("Task was killed due to the node running low on memory."),
            LearnerMemoryError,
            "fewer processes",
        ),
        (
            died("Task was killed due to the node running low on memory.\nMemory on the node"),
            LearnerMemoryError,
            "(512 now)",
        ),
        (IN_INIT, LearnerError, "did not start: ValueError: no such rank"),
        (raised(ValueError("no")), LearnerError, "learner 1 failed: ValueError('no')"),
        (raised(MismatchError("too far")), MismatchError, "too far"),
        (raised(LearnerMemoryError("learner 1 ran out")), LearnerMemoryError, "ran out"),
        (raised(NonFiniteGradientError("nan")), NonFiniteGradientError, "nan"),
        (KeyError("of the driver"), KeyError, "of the driver"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_the_driver_makes_of_it(error: Exception, meaning: type, told: str) -> None:
    fault = fault_of(error, 1, CONFIG, LOG)
    assert type(fault) is meaning
    assert told in str(fault)
    if isinstance(fault, RaylightError):
        assert type(pickle.loads(pickle.dumps(fault))) is meaning


def test_only_a_lost_gang_is_started_anew() -> None:
    assert issubclass(LearnerLostError, LearnerError)
    for hopeless in (LearnerMemoryError, NonFiniteGradientError, MismatchError):
        assert not issubclass(hopeless, LearnerLostError)


def test_a_rank_that_lost_another_tells_less_than_that_one_s_death() -> None:
    assert is_hearsay(raised(LearnerLostError("learner 0 lost the other learners")))
    assert not is_hearsay(raised(LearnerMemoryError("learner 0 ran out")))
    assert not is_hearsay(died(KILLED))


@pytest.mark.parametrize(
    ("n", "gpus", "fits"), [(2, 1, True), (1, 0.5, True), (2, 0, True), (2, 0.5, False), (1, 2, False)]
)
def test_a_rank_has_one_gpu_which_is_its_own(n: int, gpus: float, fits: bool) -> None:
    if fits:
        assert LearnerConfig(n=n, num_gpus=gpus).num_gpus == gpus
        return
    with pytest.raises(ConfigError, match="a rank computes on one GPU"):
        LearnerConfig(n=n, num_gpus=gpus)


def test_ranks_meet_on_the_interface_of_their_node_s_address() -> None:
    assert interface_of("127.0.0.1").startswith("lo")
    with pytest.raises(LearnerError, match=r"has its address 203.0.113.7 .* GLOO_SOCKET_IFNAME "):
        interface_of("203.0.113.7")


def test_stacks_are_of_all_threads_and_summed_up_for_one() -> None:
    started, end = threading.Event(), threading.Event()
    box: list[Any] = []

    def wait_in_vain() -> None:
        box.append(threading.get_ident())
        started.set()
        GradientWatch().seen(Waiting())

    class Waiting:
        def __float__(self) -> float:
            assert end.wait(30)
            return 0.0

    thread = threading.Thread(target=wait_in_vain, name="the one that hangs")
    thread.start()
    try:
        assert started.wait(30)
        while "threading.py" not in (stacks := take_stacks(box[0])).summary:
            pass
        for told in ("thread the one that hangs:", "thread MainThread:", "end.wait(30)", "take_stacks"):
            assert told in stacks.text
        assert re.fullmatch(
            r"learner/grad_guard\.py:\d+ \(seen\) > \S+threading\.py:\d+ \(wait\)", stacks.summary
        )
    finally:
        end.set()
        thread.join()
    assert take_stacks(None).summary == take_stacks(box[0]).summary == ""


def test_steps_without_a_finite_gradient_are_counted_and_too_many_in_a_row_are_an_error() -> None:
    watch = GradientWatch()
    for norm, skipped in ((1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0), (2.0, 0.0)):
        assert watch.seen(norm) == {"learner/skipped_steps": skipped}
    for _ in range(MAX_NON_FINITE - 1):
        watch.seen(math.nan)
    with pytest.raises(NonFiniteGradientError, match="3 times in a row"):
        watch.seen(math.nan)
