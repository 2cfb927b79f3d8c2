"""A dialect in one file: `POST /v1/toy` with a model and a question answers with an id and a text."""

from typing import Any

from raylight.http.errors import RequestError
from raylight.serving.dialects.answers import BlockReader, read_turn
from raylight.serving.dialects.dialect import AnswerStream, Dialect, Event, Translation


class ToyStream(AnswerStream):
    def __init__(self) -> None:
        self._reader = BlockReader()

    def feed(self, chunk: dict[str, Any]) -> list[Event]:
        return [{"piece": step.text} for step in self._reader.feed(chunk) if step.kind == "delta"]

    def finish(self) -> list[Event]:
        return [{"id": f"toy-{self._reader.turn.id}"}]


class ToyTranslation(Translation):
    def write_answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        turn = read_turn(answer)
        return {"id": f"toy-{turn.id}", "text": turn.message()["content"]}

    def start_stream(self) -> ToyStream:
        return ToyStream()


class ToyDialect(Dialect):
    name, path, span_name, id_prefix = "toy", "/v1/toy", "openai.chat.toy", "toy-"

    def translate(self, path: str, body: dict[str, Any], scope: Any) -> ToyTranslation:
        messages = [{"role": "user", "content": body["question"]}]
        return ToyTranslation({"model": body["model"], "messages": messages, "stream": "stream" in body})

    @classmethod
    def error_body(cls, error: RequestError) -> dict[str, Any]:
        return {"toy_error": error.message}
