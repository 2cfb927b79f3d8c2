"""Model of a run without `--model`: raylight's starter model with a chat template for tools and room for the
policy.

It can neither call tools nor hold a conversation, but every part of a training run accepts it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from raylight.quickstart import STARTER_MODEL

POSITIONS = 16384
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools, one JSON schema a line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one by <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build(folder: Path) -> str:
    """Write the model to a folder, overwriting files there; returns its path."""
    shutil.copytree(STARTER_MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {key: POSITIONS}, indent=2))
    return str(folder)
