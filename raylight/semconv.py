"""Names of spans and attributes. They are agent-lightning 0.3's, so that traces stay interchangeable."""

ANNOTATION = "agentlightning.annotation"
"""Name of a span that says something about the rollout or another span: a reward, a tag."""
MESSAGE = "agentlightning.message"
OBJECT = "agentlightning.object"
EXCEPTION = "agentlightning.exception"
OPERATION = "agentlightning.operation"
VIRTUAL = "agentlightning.virtual"
"""Name of a span that stands for something without a span of its own, such as a missing parent."""

ROLLOUT_ID = "agentlightning.rollout_id"
ATTEMPT_ID = "agentlightning.attempt_id"
SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
"""Resource attributes by which a span from another process names its attempt."""

REWARD_PREFIX = "agentlightning.reward"
"""Attributes `agentlightning.reward.N.name` and `agentlightning.reward.N.value`; index 0 is the primary reward."""
PRIMARY = "primary"
"""Name of a reward that was given without one."""
LINK_PREFIX = "agentlightning.link"
"""Attributes `agentlightning.link.N.key_match` and `agentlightning.link.N.value_match`: the spans that this one is about."""
TAG_PREFIX = "agentlightning.tag"
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
"""What a span of a captured call carries beside the request and the response."""
CALL_ID = "raylight.call_id"
"""The captured call that a span is of."""
REQUEST_MODEL = "gen_ai.request.model"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
CHAT_SPAN = "openai.chat.completion"
"""Name of the span of a captured chat completion."""
RESPONSE_ID = "gen_ai.response.id"
AGENT_NAME = "gen_ai.agent.name"


def reward_attributes(rewards: dict[str, float]) -> dict[str, str | float]:
    """Flatten named rewards into span attributes, the primary reward first."""
    flat: dict[str, str | float] = {}
    for index, (name, value) in enumerate(rewards.items()):
        flat[f"{REWARD_PREFIX}.{index}.name"] = name
        flat[f"{REWARD_PREFIX}.{index}.value"] = value
    return flat
