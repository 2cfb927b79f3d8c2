"""Names of spans and attributes.

They come from agent-lightning 0.3 and OpenTelemetry's `gen_ai` conventions, so that traces can be
exchanged.
"""

ANNOTATION = "agentlightning.annotation"
"""Name of a span that annotates the rollout or another span, such as a reward or a tag."""
MESSAGE = "agentlightning.message"
OBJECT = "agentlightning.object"
EXCEPTION = "agentlightning.exception"
OPERATION = "agentlightning.operation"
VIRTUAL = "agentlightning.virtual"
"""Name of a placeholder span, for example for a parent that was not recorded."""

ROLLOUT_ID = "agentlightning.rollout_id"
ATTEMPT_ID = "agentlightning.attempt_id"
SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
"""Resource attributes with which a span from another process names its attempt."""

REWARD_PREFIX = "agentlightning.reward"
"""Attributes `agentlightning.reward.N.name` and `agentlightning.reward.N.value`; index 0 is the primary
reward."""
PRIMARY = "primary"
"""Name of a reward that was emitted without a name."""
REPLICA_HEADER = "x-raylight-replica"
"""Header of every answer of a replica; an answer without it is one of the ingress alone."""
AGENT_REWARD = "raylight.agent_reward"
"""Name of the span of a reward that is one agent's, and not the rollout's."""
REWARD_AGENT = "raylight.reward.agent"
"""Agent that such a reward is for."""
GRADE_SPAN_ID = b"raylight".hex()
"""Id of the span in which a group reward grades an attempt, at most once."""
GRADE_TURNS = "raylight.grade.turns"
"""Attribute of a grade: the rewards of single calls by their ids, as JSON."""
STATE = "raylight.state"
"""Name of a span that names the state in which the next call is made."""
STATE_KEY = "raylight.state.key"
"""Attribute of such a span: the key of the state, as a string."""
GRADE_ERROR = "raylight.grade.error"
"""Attribute of a grade without a reward: the reason why the group reward failed."""
MESSAGE_BODY = "agentlightning.message.body"
OBJECT_TYPE = "agentlightning.object.type"
OBJECT_LITERAL = "agentlightning.object.literal"
OBJECT_JSON = "agentlightning.object.json"
OPERATION_NAME = "agentlightning.operation.name"
OPERATION_INPUT = "agentlightning.operation.input"
OPERATION_OUTPUT = "agentlightning.operation.output"

PROMPT_TOKEN_IDS = "prompt_token_ids"
RESPONSE_TOKEN_IDS = "response_token_ids"
RESPONSE_LOGPROBS = "response_logprobs"
WEIGHT_VERSIONS = "weight_versions"
"""Token-level attributes of the span of a captured call: one entry per token."""
CALL_ID = "raylight.call_id"
"""Id of the captured call that a span records."""
REQUEST_MODEL = "gen_ai.request.model"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
CHAT_SPAN = "openai.chat.completion"
"""Name of the span of a captured chat completion."""
COMPLETION_SPAN = "openai.completion"
RESPONSES_SPAN = "openai.response"
MESSAGES_SPAN = "anthropic.message"
"""Names of the spans of captured calls in the other dialects. Their prompts and answers are recorded as chat
messages too."""
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
"""Reason why sampling ended: "stop", "length" or "aborted". One entry, as each choice is a call of its
own."""
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
"""Seconds from the request to the first chunk of a streamed answer."""
REQUEST_PARAMETERS = "raylight.request.parameters"
"""Fields of the request other than messages and tools, as JSON."""
DIALECT = "raylight.dialect"
"""Dialect of the agent's request: "chat", "completions", "responses" or "messages"."""
PROMPT_SOURCE = "raylight.prompt_source"
"""Source of the prompt tokens: the engine's rendering ("rendered"), the tokens sampled and rendered so far
("spliced"), or both ("partly")."""
AGENT_NAME = "gen_ai.agent.name"


def reward_attributes(rewards: dict[str, float]) -> dict[str, str | float]:
    """Return named rewards as span attributes. The primary reward comes first."""
    flat: dict[str, str | float] = {}
    for index, (name, value) in enumerate(rewards.items()):
        flat[f"{REWARD_PREFIX}.{index}.name"] = name
        flat[f"{REWARD_PREFIX}.{index}.value"] = value
    return flat
