"""Rows of the key-value cache that keep recent prompts, so that equal prompts are computed once.

The rollouts of a group begin with the same prompt, at about the same time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from raylight.engines.transformers.adapters import LoadedAdapter
from raylight.engines.transformers.sequence import Sequence

SLOTS_PER_PROMPT = 4
"""Slots for each prompt that is kept: the groups of rollouts are rarely smaller."""
PromptKey = tuple[LoadedAdapter | None, bytes]
"""Adapter and token ids of a prompt."""


def count_prompt_rows(slots: int) -> int:
    """Return the number of rows for prompts beside the slots of sequences."""
    return max(slots // SLOTS_PER_PROMPT, 1)


@dataclass
class Admission:
    """Division of new sequences, which are given by their indices.

    Attributes:
        computed: sequences whose tokens are computed.
        kept: those of them whose prompts are kept, and the rows for these.
        copied: sequences whose prompt has been kept before, or is that of one in `kept`, and its row.
    """

    computed: list[int] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    copied: dict[int, int] = field(default_factory=dict)


class PromptRows:
    """The rows `first` to `first + count - 1`, each with the prompt that was used least recently replaced by
    the next one."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))
        self._rows: OrderedDict[PromptKey, int] = OrderedDict()

    def admit(self, sequences: list[Sequence]) -> Admission:
        """Divide new sequences, and assign rows to the prompts of those that are computed.

        A sequence that continues, after a change of weights, is computed. The prompts of one call never
        replace one another; those beyond the number of rows are not kept.
        """
        admission, used = Admission(), set[PromptKey]()
        for index, sequence in enumerate(sequences):
            key = (sequence.adapter, sequence.sample.prompt_ids.tobytes())
            row = None if sequence.sample.output_ids else self._find(key)
            if row is not None:
                admission.copied[index] = row
            else:
                admission.computed.append(index)
                if not sequence.sample.output_ids and (self._free or not self._rows.keys() <= used):
                    admission.kept[index] = self._assign(key)
            used.add(key)
        return admission

    def _find(self, key: PromptKey) -> int | None:
        """Return the row of a prompt, which becomes the one used last."""
        if key in self._rows:
            self._rows.move_to_end(key)
        return self._rows.get(key)

    def _assign(self, key: PromptKey) -> int:
        self._rows[key] = row = self._free.pop() if self._free else self._rows.popitem(last=False)[1]
        return row

    def clear(self) -> None:
        """Forget all prompts: the weights have changed, or some were not computed."""
        self._free += self._rows.values()
        self._rows.clear()
