"""Findings in the metrics of a run, in words, with a remedy each: for the run itself, and for its pages.

`rules.py` is their table, with a condition of `conditions.py` each. Neither Ray nor torch is imported here.
"""

from raylight.advisories.advisor import Advisor, Advisory
from raylight.advisories.conditions import DRIFT_REMEDIES

__all__ = ["DRIFT_REMEDIES", "Advisor", "Advisory"]
