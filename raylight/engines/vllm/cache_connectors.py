"""Check of vLLM's connectors to other key-value caches, which must forget what old weights computed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from raylight.errors import EngineStartError


def check_connectors(config: object) -> None:
    """Check that connectors can be emptied after a weight update.

    vLLM empties its own cache then, and asks its connector to do so too. One that does not implement that
    counts as emptied, and later requests would continue from keys and values of old weights.

    Args:
        config: vLLM's argument `kv_transfer_config`; None if there is none.

    Raises:
        EngineStartError: a connector cannot be emptied.
    """
    for single in _single_configs(config):
        connector = KVConnectorFactory.get_connector_class(single)
        if connector.reset_cache is KVConnectorBase_V1.reset_cache:
            raise EngineStartError(
                f"engine.args: the connector {single.kv_connector} of kv_transfer_config cannot be emptied, "
                "so after an update requests would read keys and values of old weights. Leave it out, or use "
                "one that implements reset_cache, such as OffloadingConnector"
            )


def _single_configs(config: Any) -> Iterator[KVTransferConfig]:
    """Yield the configuration of each connector; MultiConnector has several."""
    if config is None:
        return
    if isinstance(config, str):
        config = json.loads(config)
    parsed = KVTransferConfig(**config) if isinstance(config, Mapping) else config
    parts = parsed.kv_connector_extra_config.get("connectors", ())
    if not parts:
        yield parsed
    for part in parts:
        yield from _single_configs(part)
