"""Shared by the tests of agent loops: calls as text, and a run of the tool agent over a script."""

import json

from minirl.agent_loop import ToolAgentLoop, run_agent_loop
from minirl.testing import ScriptedServer, byte_tokenizer, make_context

TOKENIZER = byte_tokenizer()
ROOMY = ["data.max_prompt_length=8192", "rollout.response_length=4096"]  # a token is a byte here
QUESTION = [{"role": "user", "content": "What is it?"}]


def call(tool, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


async def run_script(
    replies, tools=(), overrides=(), *, loop_class=ToolAgentLoop, params=None, **row
):
    """Hold one conversation; return (trajectory, server)."""
    server = ScriptedServer(TOKENIZER, replies)
    context = make_context(server, tools=tools, overrides=[*ROOMY, *overrides])
    row = {"raw_prompt": QUESTION, **row}
    [trajectory] = await run_agent_loop(loop_class(context), params or {}, row)
    return trajectory, server


def check_invariants(trajectory, server):
    """The stream holds exactly what was sampled and observed, and only the former trains."""
    t = trajectory
    assert len(t.response_ids) == len(t.response_mask) == len(t.response_logprobs)
    assert len(t.turn_ends) == len(t.turn_rewards) == len(t.weight_versions) == t.num_turns
    assert (t.turn_ends[-1] if t.turn_ends else 0) == len(t.response_ids)  # ends with a turn
    for token, mask, logprob in zip(
        t.response_ids, t.response_mask, t.response_logprobs, strict=True
    ):
        assert logprob == (server.logprob(token) if mask else 0.0)
    for request in server.requests[: t.num_turns]:
        assert t.token_ids[: len(request.prompt_ids)] == request.prompt_ids
    starts = [len(r.prompt_ids) - len(t.prompt_ids) for r in server.requests[: t.num_turns]]
    sampled = [0] * len(t.response_ids)
    for start, end in zip(starts, t.turn_ends, strict=True):
        sampled[start:end] = [1] * (end - start)
    assert t.response_mask == sampled
