"""The agent under fault as a program: reads a task as JSON, prints its reward."""

import json
import os
import sys
import urllib.request
from typing import Any

from chaos_log import AttemptLog, questions

TEMPORARY_FAILURE = 75
"""Exit status with which a program reports that a service failed (EX_TEMPFAIL)."""


def ask(messages: list[dict[str, Any]]) -> str:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "temperature": 1.0, "max_tokens": 8}
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def main() -> None:
    task = json.load(sys.stdin)
    messages: list[dict[str, Any]] = []
    ids = [os.environ[f"RAYLIGHT_{name}"] for name in ("ROLLOUT_ID", "ATTEMPT_ID", "MODE")]
    with AttemptLog(*ids) as log:
        for question in questions(task):
            messages.append({"role": "user", "content": question})
            log.answers.append(ask(messages))
            messages.append({"role": "assistant", "content": log.answers[-1]})
        print(log.finish())


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a lost connection, or a status of the server
        print(error, file=sys.stderr)
        sys.exit(TEMPORARY_FAILURE)
