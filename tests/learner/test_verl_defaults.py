"""Contract of VERL(config) with verl: the file of defaults and its keys."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf

from raylight.algorithms.verl_config.keys import KEYS
from raylight.algorithms.verl_config.merged_config import verl_defaults
from raylight.experience.settings.advantages import ADVANTAGES
from raylight.experience.settings.policy_settings import LossAggregation
from raylight.learner import verl_api

ABSENT = object()
NOT_IN_VERL = (
    "agentlightning.port",
    "algorithm.off_policy_sampling",
    "algorithm.override_sampling",
    *(key for key in KEYS if ".trace_aggregator." in key or ".gdpo_" in key),
    "actor_rollout_ref.model.override_config.attn_implementation",
    "actor_rollout_ref.model.target_parameters",
)
"""Keys that are not in verl's defaults: other programs' keys, and keys that verl reads without a default."""


@pytest.fixture(scope="module")
def defaults() -> Any:
    return OmegaConf.to_container(verl_defaults(), resolve=False)


@pytest.mark.parametrize("key", sorted(KEYS.keys() - set(NOT_IN_VERL)))
def test_verl_has_the_key(key: str, defaults: Any) -> None:
    node = defaults
    for name in key.split("."):
        assert name in node, f"verl's defaults have no {key}"
        node = node[name]


def test_other_keys_do_not_exist_in_verl() -> None:
    assert not [
        key for key in NOT_IN_VERL if OmegaConf.select(verl_defaults(), key, default=ABSENT) is not ABSENT
    ]


def test_the_file_matches_verls_dataclasses() -> None:
    """The file is generated; a difference means that it is stale."""
    classes = {
        "actor_rollout_ref.actor": verl_api.ActorConfig,
        "actor_rollout_ref.actor.policy_loss": verl_api.PolicyLossConfig,
        "actor_rollout_ref.actor.fsdp_config": verl_api.FSDPEngineConfig,
        "actor_rollout_ref.model": verl_api.HFModelConfig,
        "algorithm": verl_api.AlgoConfig,
    }
    for section, cls in classes.items():
        fields = {field.name: field for field in dataclasses.fields(cls)}
        rows = [
            key.removeprefix(f"{section}.")
            for key in KEYS.keys() - set(NOT_IN_VERL)
            if key.startswith(f"{section}.")
        ]
        own = {name for name in rows if "." not in name}
        assert own - fields.keys() <= OF_SUBCLASSES, section
        for name in own & fields.keys():
            default = fields[name].default
            if default is dataclasses.MISSING or default == "???" or (section, name) in DIFFER:
                continue
            assert OmegaConf.select(verl_defaults(), f"{section}.{name}") == default, f"{section}.{name}"


OF_SUBCLASSES = {
    "grad_clip",
    "ulysses_sequence_parallel_size",
    "entropy_from_logits_with_chunking",
    "entropy_from_logits_chunk_size",
    "entropy_checkpointing",
}
"""Keys of the actor that verl declares in the class for FSDP."""
DIFFER = {
    ("actor_rollout_ref.actor", "strategy"),
    ("actor_rollout_ref.model", "path"),
    ("actor_rollout_ref.actor.fsdp_config", "dtype"),
    ("actor_rollout_ref.actor.fsdp_config", "use_no_sync_for_gradient_accumulation"),
    ("algorithm", "adv_estimator"),
}
"""Keys whose default in the file differs from the dataclass."""


def test_known_names_exist_in_verl() -> None:
    for name in {*ADVANTAGES.names} - {"gigpo", "opd"}:
        assert verl_api.get_adv_estimator_fn(name)
    assert set(get_args(LossAggregation)) == {
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    }


def test_kl_names_have_verls_meaning() -> None:
    import torch
    from verl.trainer.ppo.core_algos import kl_penalty_forward

    ours, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    for verls, name in (KEYS["algorithm.kl_penalty"].values or {}).items():
        assert torch.equal(kl_penalty_forward(ours, ref, verls), kl_penalty_forward(ours, ref, name)), verls


def test_reading_a_configuration_imports_neither_verl_nor_torch() -> None:
    code = (
        "import sys; from raylight.algorithms.verl import VERL; VERL({'actor_rollout_ref': {'model': "
        "{'path': 'm'}, 'rollout': {'name': 'hf'}}}); heavy = {'torch', 'transformers', 'vllm', 'verl', "
        "'ray'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
