"""Groups over gloo: all receive what the sender sends, and a lost process ends the calls of all others."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raylight.weights.gloo_group import GlooGroup, close_rendezvous, open_listener

HOST, TIMEOUT_S = "127.0.0.1", 30.0


def open_groups(executor: ThreadPoolExecutor, size: int) -> list[GlooGroup]:
    """Open the groups of a sender and its receivers, each in a thread."""
    port, store = open_listener(HOST)
    opening = [
        executor.submit(GlooGroup, HOST, port, rank, size, TIMEOUT_S, store if rank == 0 else None)
        for rank in range(size)
    ]
    return [group.result() for group in opening]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_receive_all_tensors(dtype: torch.dtype) -> None:
    sent = [torch.randn(3, 5).to(dtype), torch.tensor(2.5, dtype=dtype), torch.empty(0, dtype=dtype)]
    received = [[torch.zeros_like(tensor) for tensor in sent] for _ in range(2)]
    with ThreadPoolExecutor(3) as executor:
        groups = open_groups(executor, 3)
        calls = [
            executor.submit(group.broadcast, tensors)
            for group, tensors in zip(groups, [sent, *received], strict=True)
        ]
        for call in calls:
            call.result()
    for tensors in received:
        assert all(torch.equal(a, b) for a, b in zip(tensors, sent, strict=True))
    for group in groups:
        group.close()


def test_a_lost_process_ends_the_calls_of_the_others_although_the_senders_error_is_kept() -> None:
    with ThreadPoolExecutor(3) as executor:
        sender, survivor, lost = open_groups(executor, 3)
        lost.close()
        waiting = executor.submit(survivor.broadcast, [torch.zeros(1000) for _ in range(50)])
        with pytest.raises(ConnectionError, match="connection to the other processes"):
            sender.broadcast([torch.ones(1000) for _ in range(50)])
        sender.close()
        with pytest.raises(ConnectionError, match="connection to the other processes"):
            waiting.result(TIMEOUT_S / 2)
        survivor.close()
        with pytest.raises(ConnectionError, match="closed"):
            survivor.broadcast([])


def test_a_rendezvous_that_cannot_complete_can_be_closed() -> None:
    with ThreadPoolExecutor(2) as executor:
        port, store = open_listener(HOST)
        opening = [
            executor.submit(GlooGroup, HOST, port, 0, 3, TIMEOUT_S, store),
            executor.submit(GlooGroup, HOST, port, 1, 3, TIMEOUT_S),
        ]
        close_rendezvous(HOST, port, 3)
        for group in opening:
            with pytest.raises(ConnectionError, match="did not meet"):
                group.result(TIMEOUT_S / 2)
