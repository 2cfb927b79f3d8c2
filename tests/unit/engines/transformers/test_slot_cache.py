"""Growth of the cache's slots."""

import torch

from raylight.engines.transformers.slot_cache import GROWTH, SlotCache, SlotLayer


def test_slots_grow_on_demand_and_not_beyond_the_longest_sequence() -> None:
    cache = SlotCache([False], slots=2, longest=GROWTH + 44)
    (layer,) = cache.slot_layers
    assert isinstance(layer, SlotLayer)
    lengths = []
    for width in (8, GROWTH + 1):
        cache.prefill(0, torch.zeros(1, dtype=torch.long), width)
        layer.update(torch.ones(1, 3, width, 4), torch.ones(1, 3, width, 4))
        lengths.append(layer.keys.shape[2])
    assert lengths == [GROWTH, GROWTH + 44]
