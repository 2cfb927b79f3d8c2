"""MCP server over stdio of the standard library alone, which starts in a few milliseconds.

Its first argument says how it misbehaves: "" not at all, "garbage" (writes no JSON), "mute" (answers
nothing), "deaf" (keeps running when its standard input is closed).
"""

import json
import os
import sys
import time

HOW = sys.argv[1] if len(sys.argv) > 1 else ""
TOOLS = {
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "fail": {},
    "die": {},
    "hang": {},
    "freeze": {},
    "flood": {"size": {"type": "integer"}},
    "nonsense": {},
    "environment": {"name": {"type": "string"}},
    "count": {},
}
calls = 0


def answer(method: str, params: dict) -> dict | None:
    """Return the result of a request; None for no answer."""
    global calls
    if method == "initialize":
        info = {"name": "small", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": info,
        }
    if method == "tools/list":
        return {
            "tools": [
                {"name": name, "inputSchema": {"type": "object", "properties": properties}}
                for name, properties in TOOLS.items()
            ]
        }
    arguments, calls = params.get("arguments") or {}, calls + 1
    match params["name"]:
        case "add":
            return text(str(arguments["a"] + arguments["b"]))
        case "fail":
            return text("it is broken") | {"isError": True}
        case "die":
            os._exit(1)
        case "hang":
            return None
        case "freeze":
            time.sleep(3600)
        case "flood":
            return text("x" * arguments["size"])
        case "nonsense":
            return {"content": "not a list"}
        case "environment":
            return text(os.environ.get(arguments["name"], ""))
        case "count":
            return {"content": [], "structuredContent": {"calls": calls}}
    raise ValueError(f"no tool {params['name']}")


def text(said: str) -> dict:
    return {"content": [{"type": "text", "text": said}]}


if HOW == "garbage":
    print("<html>", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if HOW == "mute" or "id" not in request:
        continue
    message = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] not in ("initialize", "tools/list", "tools/call"):
        message["error"] = {"code": -32601, "message": "Method not found"}
    else:
        result = answer(request["method"], request.get("params") or {})
        if result is None:
            continue
        message["result"] = result
    print(json.dumps(message), flush=True)
if HOW == "deaf":
    time.sleep(3600)
