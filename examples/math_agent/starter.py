"""The quickstart model with a chat template for tools, for test runs on a CPU.

It cannot call tools: it only adds.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from raylight.quickstart import STARTER_MODEL

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}"
    'Call one by <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] "
    "%}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template with tool calls in Hermes' format."""


def make_starter(folder: Path) -> str:
    """Write the model to a folder, overwriting files there; returns its path."""
    shutil.copytree(STARTER_MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)
