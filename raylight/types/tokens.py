"""Sampled tokens, and the token sequences that a learner trains on."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raylight.types.history import HistoryNote
from raylight.types.images import PlacedImage, compared_ids
from raylight.types.json_object import JsonObject
from raylight.types.rollouts import Rollout
from raylight.types.spans import Span
from raylight.types.token_sets import NO_TOKEN_SETS, TokenSets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # its class takes seconds to import

GREEDY_BELOW = 1e-5
"""Temperatures below this limit mean greedy sampling, as in vLLM; dividing logits by them would overflow."""

NEVER_SAMPLED_BELOW = -50.0
"""Log-probs below this limit (a probability of 2e-22) count as excluded. A logit bias of -100, which
providers document as a ban, leads there."""

AUXILIARY = "auxiliary"
"""Key in a generation's `sampling`: the model name that an auxiliary call asked for."""

FinishReason = Literal["stop", "length", "aborted"]

IntArray: TypeAlias = NDArray[np.int32]
"""Token ids or counts, int32 of shape (tokens,)."""
VersionArray: TypeAlias = NDArray[np.int64]
"""Weight versions, int64 of shape (tokens,)."""
LogprobArray: TypeAlias = NDArray[np.float32]
"""Log-probs, float32 of shape (tokens,)."""
MaskArray: TypeAlias = NDArray[np.int8]
"""0 or 1 for each token, int8 of shape (tokens,)."""
RouteArray: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Experts that tokens were sent to by each layer of experts, uint8 for up to 256 experts and else uint16, of
shape (tokens, layers of experts, experts of a token)."""


class TopLogprobs(NamedTuple):
    """The most probable tokens at each of several places, most probable first."""

    ids: NDArray[np.int32]
    """int32 of shape (tokens, k)."""
    logprobs: NDArray[np.float32]
    """float32 of shape (tokens, k)."""


REPEATED = "+"
"""End of the digest of a request that its client sends again."""


@dataclass(frozen=True, slots=True)
class CallKey:
    """Identity of one call to the engine within an attempt."""

    rollout_id: str
    attempt_id: str
    call_id: str
    request: str = field(default="", compare=False, repr=False)
    """Digest of the request, with REPEATED at its end if its client sent it before, to another replica. If
    that one died, one call with the same digest counts as never answered. (That is wrong only for an agent
    that sends equal requests, one of which was answered and lost, while another one reached no replica.)"""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One sampled response with the engine's own token ids.

    The tokens are read-only numpy arrays of shape (tokens,); lists are converted. `a.tolist()` makes Python
    numbers, and `np.concatenate([a, b])` joins two arrays, which `a + b` would add.

    Invariants: `len(output_ids) == len(logprobs) == len(weight_versions)`. Token ids are never re-tokenised.
    `logprobs` refer to the distribution that was sampled from, after temperature, constraint and
    truncation. `policy_logprobs` and `allowed` are empty or have one entry per token.

    A constraint is all that a request does to the policy's distribution, except temperature and truncation: a
    grammar (JSON schema, required tools), allowed or banned tokens, a bias, penalties, a minimum length.

    Raises:
        ValueError: the arrays differ in length.
    """

    key: CallKey
    model: str
    prompt_ids: IntArray
    output_ids: IntArray
    logprobs: LogprobArray
    weight_versions: VersionArray
    finish_reason: FinishReason
    start_time: float
    end_time: float
    sampling: JsonObject = field(default_factory=dict)
    agent: str | None = None
    """Id of the calling agent, if the rollout has several agents and names them (`llm.for_agent`)."""
    history: HistoryNote | None = None
    """Relation of the request to the attempt's conversations; None if nothing compared them."""
    policy_logprobs: LogprobArray = field(default_factory=lambda: np.empty(0, np.float32))
    """Log-probs at the same temperature without constraint and truncation, which a learner can compute too.
    Empty if the request has no constraint: they are then `logprobs`."""
    allowed: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Number of tokens that could have been sampled at each position, with a log-prob above
    NEVER_SAMPLED_BELOW; 0 at a position where constraint and truncation changed nothing. At a position with 1
    the model had no choice. Empty if the request has no constraint."""
    candidates: TokenSets = field(default_factory=lambda: NO_TOKEN_SETS)
    """Tokens that could have been sampled at each position, after truncation and constraint, with which a
    learner computes `logprobs` again. Empty unless the request truncates or penalises."""
    routed_experts: RouteArray | None = None
    """Routes of all tokens of prompt and output but the last, which the engine did not compute; None if they
    were not recorded (`LearnerConfig.router_replay`)."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the prompt, in the order of their places."""

    @property
    def compared_ids(self) -> IntArray:
        """Token ids of prompt and output, different where images differ, shape (tokens,)."""
        return compared_ids(self.token_ids, self.images)

    @property
    def is_replayed(self) -> bool:
        """True if a learner can compute the distribution that was sampled from, penalties and truncation
        included."""
        return len(self.candidates) > 0

    @property
    def penalties(self) -> Penalties:
        """Penalties of the request."""
        given = {name: self.sampling.get(f"{name}_penalty") for name in Penalties._fields}
        return Penalties(**{name: float(value) for name, value in given.items() if value is not None})

    @property
    def temperature(self) -> float:
        """Temperature of the distribution of `logprobs`; 1 for greedy sampling (temperature 0)."""
        temperature = self.sampling.get("temperature", 1.0)
        return temperature if temperature >= GREEDY_BELOW else 1.0

    @property
    def auxiliary_model(self) -> str | None:
        """Model name that an auxiliary call asked for, in place of the attempt's own; None for other calls.

        Harnesses make such calls for titles and summaries.
        """
        return self.sampling.get(AUXILIARY)

    @property
    def token_ids(self) -> IntArray:
        """Token ids of prompt and output, shape (tokens,)."""
        return np.concatenate([self.prompt_ids, self.output_ids])

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "output_ids", "allowed"):
            _set_array(self, name, np.int32)
        _set_array(self, "weight_versions", np.int64)
        for name in ("logprobs", "policy_logprobs"):
            _set_array(self, name, np.float32)
        if not len(self.output_ids) == len(self.logprobs) == len(self.weight_versions):
            raise ValueError(
                f"generation {self.key.call_id}: {len(self.output_ids)} tokens, {len(self.logprobs)} "
                f"log-probs and {len(self.weight_versions)} weight versions must be equally many"
            )
        if not len(self.policy_logprobs) == len(self.allowed) in (0, len(self.output_ids)):
            raise ValueError(
                f"generation {self.key.call_id}: {len(self.policy_logprobs)} policy log-probs and "
                f"{len(self.allowed)} counts of allowed tokens must be none, or as many as the "
                f"{len(self.output_ids)} tokens"
            )
        if len(self.candidates) not in (0, len(self.output_ids)):
            raise ValueError(
                f"generation {self.key.call_id}: {len(self.candidates)} sets of candidates must be none, or "
                f"as many as the {len(self.output_ids)} tokens"
            )
        if self.routed_experts is not None:
            _set_array(self, "routed_experts", self.routed_experts.dtype.type)
            computed = len(self.prompt_ids) + len(self.output_ids) - 1
            if len(self.routed_experts) != computed:
                raise ValueError(
                    f"generation {self.key.call_id}: {len(self.routed_experts)} routes must be for the "
                    f"{computed} tokens before the last"
                )

    def __eq__(self, other: object) -> bool:
        return _equal_fields(self, other)


class Penalties(NamedTuple):
    """Penalties of a response's tokens. By default they change nothing.

    The logit z of a token that is in the prompt or the response so far becomes z / repetition if it is
    positive, else z * repetition. Then a token that occurs n > 0 times in the response so far loses
    presence + n * frequency.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


class PenalisedRange(NamedTuple):
    """Range of a row's tokens that one call sampled with penalties. The tokens before it are its prompt."""

    start: int
    stop: int
    penalties: Penalties


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A token sequence to train on: the prompt, the responses, and the observations between them.

    All arrays are read-only numpy arrays of shape (tokens,); lists are converted.

    Invariants: `mask[i] == 1` exactly where the token was sampled in this attempt, is trained in this
    trajectory, and was neither forced (a constraint allowed no other token) nor sampled off-policy. Where
    `mask[i] == 0`,
    `logprobs[i] == 0` and `weight_versions[i] == -1`. `mask[0] == 0`. A trajectory whose tokens were all
    forced has an empty mask; a batch leaves it out.
    """

    rollout_id: str
    token_ids: IntArray
    mask: MaskArray
    logprobs: LogprobArray
    """Log-probs of the policy that sampled, without the request's constraint; for tokens with candidates or
    penalties the log-probs of the distribution that was sampled from."""
    weight_versions: VersionArray
    temperature: float = 1.0
    """Sampling temperature of all its trained tokens."""
    candidates: TokenSets = field(default_factory=lambda: NO_TOKEN_SETS)
    """Tokens that could have been sampled at each position; empty if nothing was excluded anywhere."""
    penalised: tuple[PenalisedRange, ...] = ()
    """The tokens that were sampled with penalties, in order."""
    observed: MaskArray = field(default_factory=lambda: np.empty(0, np.int8), compare=False)
    """1 for tokens between two responses, which the environment returned; empty if they are not known."""
    routed_experts: RouteArray | None = None
    """Routes of its first tokens, of all but the last one in general; None if they were not recorded."""
    images: tuple[PlacedImage, ...] = ()
    """Images among its tokens, in the order of their places."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained one; all tokens if none is trained."""
        return int(self.mask.argmax()) if self.mask.any() else len(self.mask)

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.mask))

    def first_tokens(self, end: int) -> Trajectory:
        """Return the row's first tokens, without an image that the cut would split."""
        images = tuple(image for image in self.images if image.stop <= end)
        end = min([image.start for image in self.images if image.start < end < image.stop], default=end)
        names = ("token_ids", "mask", "logprobs", "weight_versions", "candidates", "observed")
        routes = None if self.routed_experts is None else self.routed_experts[:end]
        parts = {name: getattr(self, name)[:end] for name in names}
        return replace(self, **parts, routed_experts=routes, images=images)

    def __post_init__(self) -> None:
        _set_array(self, "token_ids", np.int32)
        for name in ("mask", "observed"):
            _set_array(self, name, np.int8)
        _set_array(self, "logprobs", np.float32)
        _set_array(self, "weight_versions", np.int64)
        if self.routed_experts is not None:
            _set_array(self, "routed_experts", self.routed_experts.dtype.type)

    def __eq__(self, other: object) -> bool:
        return _equal_fields(self, other)


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """A finished rollout with the reward, generations and spans of its latest attempt."""

    rollout: Rollout
    reward: float | None
    """Primary reward; None if there is none."""
    generations: list[Generation]
    """Generations in the order in which their calls began."""
    spans: list[Span] = field(default_factory=list)
    """Spans in the order of their sequence ids; empty if only tokens were requested."""
    rewards: dict[str, float] = field(default_factory=dict)
    """All rewards emitted together with `reward`, by name, with `reward` first; empty without a reward."""
    graded: bool = False
    """True if a group reward has graded it: `rewards` are the grade's, then the agent's."""
    grade_error: str | None = None
    """Reason why the group reward failed, so that the rollout has no reward; None if it did not."""

    @property
    def group(self) -> str:
        """Name of its group. A rollout without a group forms its own."""
        return self.rollout.group_id or self.rollout.rollout_id


def _set_array(item: object, name: str, dtype: type[np.generic]) -> None:
    """Replace a field of a frozen dataclass by a read-only array, without a copy if it is one already."""
    values: ArrayLike = getattr(item, name)
    array = np.asarray(values, dtype).view()
    array.flags.writeable = False
    object.__setattr__(item, name, array)


def _equal_fields(item: Any, other: Any) -> bool:
    """Compare two dataclasses with arrays as fields."""
    if type(other) is not type(item):
        return False
    for entry in (entry for entry in fields(item) if entry.compare):
        own, others = getattr(item, entry.name), getattr(other, entry.name)
        if not (np.array_equal(own, others) if isinstance(own, np.ndarray) else own == others):
            return False
    return True
