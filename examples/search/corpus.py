"""The corpus: generated facts about people, the questions to them, and their search by BM25."""

from __future__ import annotations

import collections
import math
import random
import re
from dataclasses import dataclass

RELATIONS = {"lives": "Where does {name} live?", "eats": "What does {name} eat?"}
"""Questions by the verb of the fact that answers them."""
K1, B = 1.5, 0.75
"""Constants of BM25: how soon a repeated word counts no more, and how much long documents lose."""


@dataclass(frozen=True)
class Fact:
    """A document of one sentence, with the question that it answers."""

    name: str
    verb: str
    value: str

    @property
    def text(self) -> str:
        return f"{self.name} {self.verb} {self.value}"

    @property
    def question(self) -> str:
        return RELATIONS[self.verb].format(name=self.name)


def make_facts(people: int = 400, seed: int = 0) -> list[Fact]:
    """Return a fact of each verb for each person, whose words are made up."""
    chance = random.Random(seed)
    names = chance.sample([a + b + c for a in "BDFKLMNPRT" for b in "aeiou" for c in "bdfklmnprst"], people)
    values = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    return [Fact(name, verb, chance.choice(values)) for name in names for verb in RELATIONS]


class BM25:
    """Index of documents, whose words are weighed as Robertson and Zaragoza (2009) describe."""

    def __init__(self, documents: list[str]) -> None:
        self._documents = documents
        counts = [collections.Counter(words(document)) for document in documents]
        mean = sum(map(collections.Counter.total, counts)) / len(documents)
        self._weights: dict[str, dict[int, float]] = collections.defaultdict(dict)
        for place, found in enumerate(counts):
            norm = K1 * (1 - B + B * found.total() / mean)
            for word, n in found.items():
                self._weights[word][place] = n * (K1 + 1) / (n + norm)
        for places in self._weights.values():
            rarity = math.log(1 + (len(documents) - len(places) + 0.5) / (len(places) + 0.5))
            for place in places:
                places[place] *= rarity

    def search(self, query: str, count: int = 1) -> list[str]:
        """Return the best of the documents that share a word with the query."""
        scores: collections.Counter[int] = collections.Counter()
        for word in words(query):
            scores.update(self._weights.get(word, {}))
        return [self._documents[place] for place, _ in scores.most_common(count)]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
