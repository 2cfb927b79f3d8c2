"""A metric logger that records its calls: everything that a new tracker needs."""

from typing import Any, ClassVar


class ToyLogger:
    """Records the start, the steps and the end of a run."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, project: str = "none") -> None:
        self.project = project

    def start(self, config: dict[str, Any]) -> None:
        self.calls.append(("start", self.project, config["algorithm"]["name"]))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.calls.append((step, metrics["time/total_s"] >= 0, "train/reward" in metrics))

    def finish(self) -> None:
        self.calls.append("finish")
