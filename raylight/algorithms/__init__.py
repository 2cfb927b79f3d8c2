"""Algorithms: what turns rollouts into a better agent."""

from raylight.algorithms.apo.algorithm import APO
from raylight.algorithms.policy import GRPO, PolicyAlgorithm
from raylight.algorithms.policy_gradient import (
    CISPO,
    DAPO,
    GMPO,
    GPG,
    GSPO,
    OPO,
    PPO,
    RLOO,
    SAPO,
    ClipCov,
    DrGRPO,
    KLCov,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)

__all__ = [
    "APO",
    "CISPO",
    "DAPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "OPO",
    "PPO",
    "RLOO",
    "SAPO",
    "ClipCov",
    "DrGRPO",
    "KLCov",
    "PolicyAlgorithm",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
]
