"""The engine class of the serving page answers requests."""

import httpx
from docs_snippets import DOCS, snippet

from raylight.config import EngineConfig
from raylight.engines.protocol import EngineSettings


async def test_the_engine_of_the_page_answers() -> None:
    engine_class = snippet(DOCS / "serving.md", "echo engine").run()["EchoEngine"]
    settings = EngineSettings("", "policy", EngineConfig(kind="my_package.echo:EchoEngine"))
    app = await engine_class(settings, suffix="!").app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("policy", "hi!")
