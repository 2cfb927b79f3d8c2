"""Reader of the toy page: the first and the last reward of a run. toy_page.js shows it."""

import asyncio

from starlette.requests import Request

from raylight.types import JsonObject
from raylight.ui.app import Ui

ROW = r'[/^\/runs\/([^/]+)\/toy$/, showToy, "overview"],'
"""Row of `PAGES` in app.js, which imports `showToy`."""


class ToyUi(Ui):
    async def toy(self, request: Request) -> JsonObject:
        metrics = self.run(request).folder.metrics
        await asyncio.to_thread(metrics.refresh)
        rewards = [row["train/reward"] for row in metrics.rows if "train/reward" in row]
        return {"first": rewards[0], "last": rewards[-1]}
