"""Rules of the advisories: each with its condition, its text and its remedy."""

from __future__ import annotations

from typing import Literal, NamedTuple

from raylight.advisories import conditions
from raylight.advisories.conditions import Find

DRIFT_PAGE = "docs/serving.md#one-conversation-one-row"
Level = Literal["alarm", "warning", "hint"]


class Rule(NamedTuple):
    """A condition on the history of a run, and its meaning."""

    kind: str
    level: Level
    find: Find
    text: str
    remedy: str


RULES: tuple[Rule, ...] = (
    Rule(
        "most_failed",
        "alarm",
        conditions.share("train/failed", "train/rollouts", 2, above=0.5),
        "{:.0%} of the rollouts failed",
        "Read their errors: `raylight trace RUN --failed`",
    ),
    Rule(
        "one_reward",
        "alarm",
        conditions.one_reward,
        "all rollouts of the last steps have the reward {:.3g}, so that nothing can be learned",
        "Check the reward function with a good and a bad answer, or take tasks that the model solves "
        "sometimes",
    ),
    Rule(
        "reward_collapsed",
        "alarm",
        conditions.reward_collapsed,
        "the training reward has fallen to {:.3g}, the floor of this run",
        "Continue from an earlier training state with a lower lr; kl_coef keeps the policy near its start",
    ),
    Rule(
        "skipped_gradients",
        "alarm",
        conditions.count("learner/skipped_steps", "critic/skipped_steps"),
        "{:.0f} optimizer steps were skipped, because their gradients were not finite",
        "Lower lr or grad_clip, or set learner.dtype='float32'. Three in a row end the run",
    ),
    Rule(
        "old_weights",
        "alarm",
        conditions.old_weights,
        "no token of the last batches was sampled with the current weights (mismatch/stale_fraction)",
        "Check that the engines load new weights",
    ),
    Rule(
        "infrastructure",
        "warning",
        conditions.share("failures/infrastructure", "train/rollouts", conditions.WINDOW, above=0.05),
        "the infrastructure failed {:.0%} of the rollouts, which are left out",
        "Check the services that the agent calls, and raise rollout.infrastructure_retries",
    ),
    Rule(
        "some_failed",
        "warning",
        conditions.some_failed,
        "the agent failed in {:.0%} of the rollouts",
        "Read the errors: `raylight trace RUN --failed`. failure_reward trains on failures, "
        "rollout.max_attempts repeats them",
    ),
    Rule(
        "unscored",
        "warning",
        conditions.share("train/unscored", "train/rollouts", conditions.WINDOW, above=0.05),
        "{:.0%} of the rollouts have no reward, and are left out",
        "Return a float from the agent in every case",
    ),
    Rule(
        "aborted_calls",
        "warning",
        conditions.share("train/aborted", "trace/calls", conditions.WINDOW, above=0.05),
        "{:.0%} of the calls were cut off before their answers ended, and are not trained",
        "Raise the timeout of the agent's client, or lower runner.max_concurrent",
    ),
    Rule(
        "off_policy_calls",
        "warning",
        conditions.count("off_policy/calls"),
        "{:.0f} calls are left out of the loss, because they were not sampled from the policy's own "
        "distribution (off_policy/* in metrics.jsonl)",
        "override_sampling=True lets raylight set the sampling of training rollouts",
    ),
    Rule(
        "repeated_seeds",
        "warning",
        conditions.count("off_policy/repeated_seeds"),
        "{:.0f} rollouts sampled with the seed of another rollout of their group, so that their responses "
        "are equal where their prompts are (off_policy/repeated_seeds)",
        "Remove `seed` from the agent's requests, or set override_sampling=True",
    ),
    Rule(
        "drifts",
        "warning",
        conditions.drifted_calls,
        "{:.0%} of the calls start a new row although they continue a conversation, so that its tokens are "
        "computed again (trace/drifts_*)",
        "To avoid it, {1} (" + DRIFT_PAGE + ")",
    ),
    Rule(
        "no_signal",
        "warning",
        conditions.no_signal,
        "in {:.0%} of the groups all rewards are equal, so that they give no gradient",
        "Take tasks that the model solves sometimes, raise group_size, or use DAPO, which samples further "
        "groups",
    ),
    Rule(
        "truncated_answers",
        "warning",
        conditions.truncated_answers,
        "{:.0%} of the answers ended at the limit of their length",
        "Raise max_tokens in the agent's requests and engine.max_model_len, or reward shorter answers",
    ),
    Rule(
        "longer_answers",
        "warning",
        conditions.longer_answers,
        "answers have become {:.0f} tokens long, from {:.0f} a few steps before, without a higher reward",
        "Read the longest rollouts. loss_agg_mode and a reward for short answers change what length is worth",
    ),
    Rule(
        "low_entropy",
        "warning",
        conditions.low_entropy,
        "the policy hardly varies its answers: its entropy is {:.2g}, from {:.2g} at first",
        "Lower lr, raise clip_ratio_high or entropy_coef, or sample at a higher temperature",
    ),
    Rule(
        "mismatch",
        "warning",
        conditions.mismatch,
        "log-probs of engine and learner differ by {:.2g} on average and by up to {:.2g} for the same "
        "weights "
        "(mismatch/* in metrics.jsonl): they compute the model differently, for example in other precision",
        "rollout_is or rollout_rs correct for it; warn_logprob_mismatch sets the threshold of this advisory",
    ),
    Rule(
        "rising_mismatch",
        "warning",
        conditions.rising_mismatch,
        "log-probs of engine and learner differ more and more for the same weights: by {:.2g} on average, "
        "from {:.2g} at first",
        "Lower lr, correct with rollout_is or rollout_rs, or serve and train in the same precision",
    ),
    Rule(
        "off_policy_tokens",
        "warning",
        conditions.off_policy_tokens,
        "the tokens are far from the policy that is trained: their effective sample size is {:.0%} "
        "(mismatch/ess)",
        "Lower max_staleness, lr or the number of updates per batch",
    ),
    Rule(
        "validation_falls",
        "warning",
        conditions.validation_falls,
        "the validation reward has fallen to {:.3g}, from {:.3g}, while the training reward has not",
        "The best model is in best/. End early with patience, or train on more tasks",
    ),
    Rule(
        "stalled_phase",
        "warning",
        conditions.stalled_phase,
        "{} took {:.0f} s, which takes {:.0f} s otherwise",
        "Look for a slow rollout in `raylight trace`, and for a loaded or lost node in Ray's dashboard",
    ),
    Rule(
        "solved",
        "hint",
        conditions.solved,
        "most tasks are solved: in {:.0%} of the groups all rewards are equal, close to the highest "
        "reward {:.3g}",
        "Add harder tasks, or end the run",
    ),
    Rule(
        "engine_waits",
        "hint",
        conditions.waiting_share("async/engine_idle_s", per_replica=True),
        "the engines have no request for {:.0%} of the time",
        "Raise max_staleness or runner.max_concurrent, or give engines fewer and learners more devices",
    ),
    Rule(
        "learner_waits",
        "hint",
        conditions.waiting_share("async/trainer_idle_s"),
        "the learners wait for rollouts for {:.0%} of the time",
        "Add engine replicas or runners, or shorten the longest rollouts with rollout.timeout_seconds",
    ),
    Rule(
        "in_turn",
        "hint",
        conditions.no_overlap,
        "engines and learners wait for each other: rollouts take {:.1f} s of a step, update and "
        "publication {:.1f} s",
        "max_staleness=1 overlaps them where they have devices of their own",
    ),
)
"""All rules, alarms first."""
