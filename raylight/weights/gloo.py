"""The transport `gloo`: weights travel through host memory, from a learner to engines on CPUs.

It follows vLLM's protocol of weight transfer: the sender opens a group with all workers of all engines, and
broadcasts one layer group after the other. Neither side imports vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from raylight.weights.gloo_group import GlooGroup, close_rendezvous, open_listener
from raylight.weights.protocol import SenderSettings, SyncClient, WeightStream

GROUP_TIMEOUT_SHARE = 0.5
"""Share of a publication's time after which a transmission without progress ends. The rest is for a second
attempt."""


class GlooSender:
    """The learners' side of a transfer. Each method is a collective of all learner ranks; rank 0 sends.

    Raises:
        ConnectionError: a receiver was lost. The sender is closed then.
    """

    def __init__(self, settings: SenderSettings, client: SyncClient, source: WeightStream) -> None:
        self._client, self._source = client, source
        self._group: GlooGroup | None = None
        if settings.rank == 0:
            self._group = self._open(settings)

    def _open(self, settings: SenderSettings) -> GlooGroup:
        host, size = settings.host, settings.world_size
        timeout_s = GROUP_TIMEOUT_SHARE * settings.timeout_s
        port, store = open_listener(host)
        info = {
            "host": host,
            "port": port,
            "rank_offset": 1,
            "world_size": size,
            "timeout_s": timeout_s,
        }

        def initialize() -> None:
            try:
                self._client.init_weight_transfer_engine(info)
            except BaseException:
                close_rendezvous(host, port, size)
                raise

        with _in_background(initialize) as receivers:
            try:
                return GlooGroup(host, port, 0, size, timeout_s, store)
            finally:
                receivers.result()  # its error says which receiver was lost

    def send_weights(self) -> None:
        if self._group is None:
            for _ in self._source.iter_groups():
                pass
            return
        params, groups = self._source.metadata(), self._source.groups()
        info = {
            "names": [param.name for param in params],
            "dtype_names": [str(param.dtype).removeprefix("torch.") for param in params],
            "shapes": [list(param.shape) for param in params],
            "group_lens": [len(group) for group in groups],
        }
        with _in_background(lambda: self._client.send(info)) as receivers:
            try:
                for (names, tensors), expected in zip(self._source.iter_groups(), groups, strict=True):
                    if names != expected:
                        raise ValueError(
                            f"the source yields {names[:3]}, and its groups begin {expected[:3]}"
                        )
                    self._group.broadcast([tensor.detach().cpu().contiguous() for tensor in tensors])
                    tensors.clear()  # before the source gathers the next group
            except BaseException:
                self.shutdown()  # the receivers that are left stop waiting
                raise
            finally:
                receivers.result()

    def shutdown(self) -> None:
        """Close the connections."""
        if self._group is not None:
            self._group.close()


class GlooReceiver:
    """An engine process's side of a transfer."""

    def __init__(self) -> None:
        self._group: GlooGroup | None = None

    def init(self, info: Mapping[str, Any], worker: int = 0) -> None:
        """Join the sender's group, and leave an earlier one.

        Args:
            info: sent by the sender; `rank_offset` is this engine's own.
            worker: number of this process within its engine.

        Raises:
            ConnectionError: the other processes did not come.
        """
        self.close()
        self._group = GlooGroup(
            info["host"], info["port"], info["rank_offset"] + worker, info["world_size"], info["timeout_s"]
        )

    def receive(self, info: Mapping[str, Any]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the names and tensors of one layer group after the other.

        Raises:
            ConnectionError: the sender or another receiver was lost. The group is closed then.
        """
        if self._group is None:
            raise ConnectionError("no weight transfer is open")
        params = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        try:
            for length in info["group_lens"]:
                group = [
                    (name, torch.empty(shape, dtype=getattr(torch, dtype)))
                    for _, (name, dtype, shape) in zip(range(length), params, strict=False)
                ]
                self._group.broadcast([tensor for _, tensor in group])
                yield group
        except BaseException:
            self.close()  # so that the others do not wait for this process
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


@contextlib.contextmanager
def _in_background(call: Callable[[], None]) -> Iterator[Future[None]]:
    """Run a call in a thread while the block runs."""
    with ThreadPoolExecutor(1, "weight-transfer") as executor:
        yield executor.submit(call)
