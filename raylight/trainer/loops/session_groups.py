"""Groups of rollouts that agents outside the run execute as sessions.

The groups that the pacer allows are offered as places in the store's queue, and sessions take them. A group
is trained once it has a reward, in the order of the rewards.

Laws:
- A session that expired, failed or was cancelled takes no place in a step: another one replaces it.
- A named group ends with the sessions that it has when no other one begins for the time of a lease.
- The reward of an expired session is used as long as its tokens may be trained. Then the run gives the
  session up, and counts a later reward.
- What is open at the end of a process stays in the store, and a resumed run goes on with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from raylight._utils.aio import cancel_all
from raylight.experience.trajectories.staleness import newest_version, oldest_version
from raylight.trainer.loops.awaited_rollouts import Progress, end_unresponsive
from raylight.trainer.loops.training_groups import FinishedGroup, TrainingGroups
from raylight.trainer.output.report import Metrics
from raylight.types import FINISHED, WAITING, FinishedRollout, RolloutState

DROP_REASONS = ("stale", "abandoned", "failed", "cancelled", "timeout", "empty", "incomplete")
"""Reasons for which a group was not trained. stale: its tokens were too old. abandoned: its sessions expired,
and no reward came in time. empty: it has a reward, and no call that can be trained. incomplete: it has too
few sessions with a reward to compare them."""


def closing_delay(states: Sequence[RolloutState], lease_s: float | None) -> float | None:
    """Return the seconds from the last end of a session to the time at which the free places of its group are
    cancelled.

    None: an open session keeps them, or no session has begun.

    Args:
        lease_s: longest pause between two sessions; None: no limit.
    """
    has_begun = any(state.attempt is not None for state in states)
    is_open = any(state.status not in FINISHED | WAITING for state in states)
    return None if len(states) == 1 or not has_begun or is_open else lease_s


class SessionGroups(TrainingGroups):
    """Offers groups to sessions, and hands rewarded ones to the training steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._overdue: dict[int, None] = {}
        """Groups without a reward whose sessions expired, those that have waited longest first."""
        self._most_overdue = self._run.runners.most_rollouts()
        self._late_used = 0
        """Number of groups that were overdue and got a reward in time."""

    async def metrics(self) -> Metrics:
        counts = await self._run.store.statistics()
        named = {
            "open": counts["rollouts_preparing"] + counts["rollouts_running"],
            "begun": counts.get("sessions_begun", 0),
            "refused": counts.get("sessions_refused", 0),
            "overdue": len(self._overdue),
            "late_used": self._late_used,
            "late_unused": counts.get("attempts_late", 0),
            **{f"dropped_{reason}": self._drops[reason] for reason in DROP_REASONS},
        }
        return {f"sessions/{name}": float(count) for name, count in named.items()}

    async def _end(self) -> None:
        """Leave places and sessions in the store."""

    def _to_replace(self) -> int:
        return super()._to_replace() + len(self._overdue)

    async def _until_decided(self, group: int, ids: list[str], show: Progress) -> list[FinishedRollout]:
        was_overdue = False
        while True:
            await self._wait_for_sessions(ids, show)
            rollouts = await self._rollouts.collect(ids)
            if self._is_overdue(rollouts):
                was_overdue = True
                await self._wait_for_late_reward(group, ids, rollouts)
            if await end_unresponsive(self._run.store, rollouts):
                self._late_used += was_overdue and self._has_reward(rollouts)
                return rollouts

    async def _wait_for_sessions(self, ids: list[str], show: Progress) -> None:
        """Wait until the rollouts of a group are decided. Cancel places that no session takes any more."""
        store, lease_s = self._run.store, self._algorithm.rollout.unresponsive_seconds
        clock, n_done, changed_at = asyncio.get_running_loop().time, -1, 0.0
        while True:
            states = await store.get_rollout_states(ids)
            done = sum(state.status in FINISHED for state in states)
            show(done, len(ids))
            if done == len(ids):
                return
            if done != n_done:  # as this process sees it: sessions could begin from its start on
                n_done, changed_at = done, clock()
            delay = closing_delay(states, lease_s)
            timeout = None if delay is None else changed_at + delay - clock()
            if timeout is not None and timeout <= 0:
                await store.cancel_rollouts(ids, waiting_only=True)
            else:
                await store.wait_until_decided(rollout_ids=ids, at_least=done + 1, timeout=timeout)

    def _is_overdue(self, rollouts: list[FinishedRollout]) -> bool:
        """Return True for a group without a reward that may still get one, because a session expired."""
        attempts = [item.rollout.attempt for item in rollouts]
        has_expired = any(attempt is not None and attempt.status == "unresponsive" for attempt in attempts)
        return has_expired and not self._has_reward(rollouts)

    def _has_reward(self, rollouts: list[FinishedRollout]) -> bool:
        return any(item.rollout.status == "succeeded" and item.reward is not None for item in rollouts)

    async def _wait_for_late_reward(
        self, group: int, ids: list[str], rollouts: list[FinishedRollout]
    ) -> None:
        """Wait until an expired session responds, or its tokens are too old to be trained."""
        version = self._version_of(rollouts)
        if version is None and await self._has_open_call(rollouts):
            version = self._run.learners.version  # about the version of the tokens to come
        elif version is None:  # the call may have ended since the rollouts were read
            version = self._version_of(await self._rollouts.collect(ids))
        self._overdue[group] = None
        self._room_changed.notify_all()
        responds = asyncio.ensure_future(self._run.store.wait_until_final(ids))
        responds.add_done_callback(lambda _: self._room_changed.notify_all())
        try:
            await self._room_changed.wait_for(
                lambda: responds.done() or self._is_too_old(version) or self._is_oldest_of_too_many(group)
            )
            if responds.done():
                responds.result()
        finally:
            await cancel_all([responds])
            del self._overdue[group]
            self._room_changed.notify_all()

    def _version_of(self, rollouts: list[FinishedRollout]) -> int | None:
        """Return the version of the tokens by which a group is too old; None without tokens."""
        calls = [call for item in rollouts for call in item.generations]
        return oldest_version(calls) if self._algorithm.stale == "drop" else newest_version(calls)

    async def _has_open_call(self, rollouts: list[FinishedRollout]) -> bool:
        """Return True if a call takes longer than the lease of its session."""
        attempts = [item.rollout.attempt for item in rollouts]
        silent = [item for item in attempts if item is not None and item.status == "unresponsive"]
        return any([await self._run.store.has_open_call(attempt.attempt_id) for attempt in silent])

    def _is_too_old(self, version: int | None) -> bool:
        """Return True for tokens of a version that are not trained any more; None stands for no tokens."""
        return version is None or self._run.learners.version - version > self._algorithm.max_staleness

    def _is_oldest_of_too_many(self, group: int) -> bool:
        return len(self._overdue) > self._most_overdue and next(iter(self._overdue)) == group

    def _oldest_version(self, rollouts: list[FinishedRollout]) -> int | None:
        return self._rules().oldest_version(rollouts)

    def _drop_reason(self, finished: FinishedGroup) -> str | None:
        if finished.oldest_version is not None:
            reward_of = self._algorithm.reward_rules.reward
            n_scored = sum(
                bool(item.generations) and reward_of(item) is not None for item in finished.rollouts
            )
            return "incomplete" if n_scored < self._algorithm.min_group else super()._drop_reason(finished)
        if self._has_reward(finished.rollouts):
            return "empty"
        kinds = [item.rollout.failure.kind for item in finished.rollouts if item.rollout.failure]
        known = {"unresponsive": "abandoned", "cancelled": "cancelled", "timeout": "timeout"}
        return known.get(kinds[0], "failed") if kinds else "cancelled"
