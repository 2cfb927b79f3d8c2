"""Classification of learner failures from the exceptions of Ray and torch, stack dumps, and non-finite
gradients."""

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
from raylight.learner.faults import (
    MAX_NON_FINITE,
    GradientGuard,
    classify_in_driver,
    classify_in_rank,
    memory_advice,
    reports_lost_peer,
)
from raylight.learner.progress import dump_stacks

CONFIG = LearnerConfig(n=2, max_tokens_per_micro_batch=512)
LOG = "ray logs actor --id abc --err"

Distributed = type("DistBackendError", (type("DistError", (RuntimeError,), {}),), {})
Cuda = type("OutOfMemoryError", (RuntimeError,), {})


@pytest.mark.parametrize(
    ("error", "expected"),
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
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to"
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
def test_exceptions_in_a_rank_are_classified(error: Exception, expected: type | None) -> None:
    fault = classify_in_rank(error, 1, CONFIG)
    assert type(fault) is (expected or type(None))
    if fault is not None:
        assert str(fault).startswith("learner 1 ")
        assert str(error).partition("\n")[0].rstrip(".") in str(fault)
        assert "\n" not in str(fault)


def test_torch_exceptions_are_recognized_by_name() -> None:
    import torch
    import torch.distributed as dist

    assert type(classify_in_rank(torch.cuda.OutOfMemoryError("no more"), 0, CONFIG)) is LearnerMemoryError
    for lost in (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError):
        assert type(classify_in_rank(lost("gone"), 0, CONFIG)) is LearnerLostError
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert type(classify_in_rank(caught.value, 0, CONFIG)) is LearnerMemoryError


def test_the_memory_advice_names_settings_with_their_values() -> None:
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
    """Make the error that Ray raises for a dead process."""
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    context = ActorDiedErrorContext(
        error_message=text, class_name="LearnerActor", actor_id=bytes(16), pid=7, node_ip_address="10.0.0.1"
    )
    return ActorDiedError(context)


KILLED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
    "detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some "
    "potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. "
    "(2) ray stop --force is called."
)
IN_INIT = ActorDiedError(
    RayTaskError("__init__", "Traceback\nValueError: no such rank", ValueError("no such rank"))
)


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("call", f"Traceback\n{cause!r}", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "expected", "text"),
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
def test_exceptions_in_the_driver_are_classified(error: Exception, expected: type, text: str) -> None:
    fault = classify_in_driver(error, 1, CONFIG, LOG)
    assert type(fault) is expected
    assert text in str(fault)
    if isinstance(fault, RaylightError):
        assert type(pickle.loads(pickle.dumps(fault))) is expected


def test_only_lost_learners_are_restarted() -> None:
    assert issubclass(LearnerLostError, LearnerError)
    for hopeless in (LearnerMemoryError, NonFiniteGradientError, MismatchError):
        assert not issubclass(hopeless, LearnerLostError)


def test_a_report_of_a_lost_peer_is_not_a_root_cause() -> None:
    assert reports_lost_peer(raised(LearnerLostError("learner 0 lost the other learners")))
    assert not reports_lost_peer(raised(LearnerMemoryError("learner 0 ran out")))
    assert not reports_lost_peer(died(KILLED))


@pytest.mark.parametrize(
    ("n", "gpus", "fits"), [(2, 1, True), (1, 0.5, True), (2, 0, True), (2, 0.5, False), (1, 2, False)]
)
def test_several_ranks_need_one_gpu_each(n: int, gpus: float, fits: bool) -> None:
    if fits:
        assert LearnerConfig(n=n, num_gpus=gpus).num_gpus == gpus
        return
    with pytest.raises(ConfigError, match="a rank computes on one GPU"):
        LearnerConfig(n=n, num_gpus=gpus)


@pytest.mark.parametrize(("n", "size", "fits"), [(4, 2, True), (4, 4, True), (4, 3, False), (2, 4, False)])
def test_ranks_are_divided_into_groups_that_share_a_model(n: int, size: int, fits: bool) -> None:
    if fits:
        assert LearnerConfig(n=n, fsdp_size=size).fsdp_size == size
        return
    with pytest.raises(ConfigError, match="give a divisor of n"):
        LearnerConfig(n=n, fsdp_size=size)


def test_a_dump_has_all_threads_and_summarizes_one() -> None:
    started, end = threading.Event(), threading.Event()
    box: list[Any] = []

    def wait_for_end() -> None:
        box.append(threading.get_ident())
        started.set()
        GradientGuard().check(Waiting())

    class Waiting:
        def __float__(self) -> float:
            assert end.wait(30)
            return 0.0

    thread = threading.Thread(target=wait_for_end, name="hanging thread")
    thread.start()
    try:
        assert started.wait(30)
        while "threading.py" not in (stacks := dump_stacks(box[0])).summary:
            pass
        for text in ("thread hanging thread:", "thread MainThread:", "end.wait(30)", "dump_stacks"):
            assert text in stacks.text
        assert re.fullmatch(
            r"learner/faults\.py:\d+ \(check\) > \S+threading\.py:\d+ \(wait\)", stacks.summary
        )
    finally:
        end.set()
        thread.join()
    assert dump_stacks(None).summary == dump_stacks(box[0]).summary == ""


def test_non_finite_gradients_are_counted_and_too_many_in_a_row_raise() -> None:
    guard = GradientGuard()
    for norm, skipped in ((1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0), (2.0, 0.0)):
        assert guard.check(norm) == {"learner/skipped_steps": skipped}
    for _ in range(MAX_NON_FINITE - 1):
        guard.check(math.nan)
    with pytest.raises(NonFiniteGradientError, match="3 times in a row"):
        guard.check(math.nan)
