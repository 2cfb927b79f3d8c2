"""The pages of a recorded run, as a browser shows them."""

from dataclasses import dataclass
from typing import Any

from recorded_run import LINEAGE, Recorded

TIMEOUT_S = 30
ROLLOUT = f"/runs/run/rollouts/{LINEAGE}-train-0-0"
PATHS = {
    "/": "main table",
    "/compare?runs=run,other": "main table",
    "/runs/run": "main .uplot",
    "/runs/run/rollouts": "main tbody tr",
    f"/runs/run/groups/{LINEAGE}-train-0": ".side",
    f"/runs/run/groups/{LINEAGE}-train-0/diff/{LINEAGE}-val-1-0": ".difference",
    ROLLOUT: ".message",
    f"{ROLLOUT}?tab=tokens": ".token",
    f"{ROLLOUT}?tab=spans": ".waterfall li",
    f"{ROLLOUT}?tab=raw": "main pre",
    "/runs/run/evaluations": "main table",
    "/runs/run/workers": "main table",
}
"""All pages, and an element that each has once it is complete."""


@dataclass
class Pages:
    """The pages of a run in a browser."""

    driver: Any
    url: str
    run: Recorded

    def open(self, path: str, ready: str = "main h1") -> None:
        """Open a page, and wait until it shows an element."""
        self.driver.get(self.url + path.lstrip("/"))
        self.wait_for(ready)

    def wait_for(self, css: str) -> Any:
        """Wait for an element and return it."""
        from selenium.webdriver.support.ui import WebDriverWait

        find = f"return document.querySelector({css!r})"
        return WebDriverWait(self.driver, TIMEOUT_S, 0.02).until(lambda driver: driver.execute_script(find))

    def wait_until(self, condition: str) -> Any:
        """Wait until an expression of JavaScript is true, and return its value."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, TIMEOUT_S, 0.02).until(
            lambda driver: driver.execute_script(f"return {condition}")
        )

    def run_script(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def point_at(self, css: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).move_to_element(self.wait_for(css)).perform()

    @property
    def text(self) -> str:
        return self.run_script("return document.querySelector('main').innerText")

    def errors(self) -> list[str]:
        """Return the errors in the browser's console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
