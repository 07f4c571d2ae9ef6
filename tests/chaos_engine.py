"""A scripted engine that aborts, slows down, refuses and cuts, and what it makes the policy say.

Everything is drawn from the seed of a conversation's first turn, which the manager derives from
trainer.seed, step, prompt and sample: the same in every run and in every process.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from msgspec.structs import replace
from scripted_engine import ScriptedEngine

from minirl.rollout.server import RequestRefusedError
from minirl.testing import ScriptedServer, byte_tokenizer
from minirl.types import TokenOutput

TOKENIZER = byte_tokenizer()
DEEDS = {
    "say": 40, "fail": 4, "refuse": 4, "fail_without_words": 2, "fail_in_other_words": 2,
    "fail_in_parallel": 2, "leave": 2, "cancel": 2, "block": 1, "flood": 1, "binary": 4,
    "forge": 4, "junk": 2, "no_such_deed": 1,
}  # fmt: skip
"""Of ChaosTool, with weights; what hangs is drawn by itself, at most one per conversation."""
HANGS = {"chaos": ("hang", "hang_on"), "thread": ("hang",)}
ENGINE_FATES = {"": 84, "abort": 4, "abort_at_once": 2, "refuse": 2, "slow": 4, "endless": 4}
ENDINGS = {"####": 80, "#### unscorable": 6, "#### nan": 4, "": 10}
GARBAGE = (
    '<tool_call>{"name": "chaos"',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "chaos", "arguments": ' + "[" * 60 + "</tool_call>",
    '<tool_call>{"name": "chaos", "arguments": {"me": 1}}</tool_call>',
    '<tool_call>{"name": "chaso", "arguments": {}}</tool_call>',
)
NOTHING: Mapping[str, int] = {}
MCP_TOOLS = {"echo": 80, "fail": 12, "picture": 8, "die": 10}
STOP = "stop here"
"""rollout.multi_turn.stop_when."""


def name_of(seed: int) -> str:
    """What the conversation is called whose first turn is sampled with `seed`."""
    return f"c{seed}c"


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


class Script:
    """What the policy will say in one conversation, turn by turn, and what the engine does."""

    def __init__(self, seed: int, *, hangs: bool = True, mcp: Mapping[str, int] = NOTHING) -> None:
        draw = Random(seed)
        self.me = name_of(seed)
        self.mcp = mcp
        num_turns = draw.choice((0, 0, 0, 1, 1, 1, 1, 2, 6))
        self.turns = [self._calls(draw) for _ in range(num_turns)]
        if hangs and self.turns and draw.random() < 0.06:
            tool = draw.choice(tuple(HANGS))
            self.turns[0] += call(tool, me=self.me, do=draw.choice(HANGS[tool]))
        if draw.random() < 0.05:
            self.turns.append(STOP + call("chaos", me=self.me, do="say"))
        self.turns.append(f"{self.me} {draw.choices(tuple(ENDINGS), ENDINGS.values())[0]}")
        self.fate = draw.choices(tuple(ENGINE_FATES), ENGINE_FATES.values())[0]
        self.fate_turn = draw.randrange(len(self.turns))
        if self.fate == "endless":
            self.turns[self.fate_turn] = "on and on " * 99
        self.turn = -1

    @property
    def fate_now(self) -> str:
        """What the engine is to do to this turn."""
        return self.fate if self.turn == self.fate_turn else ""

    def text(self, turn: int) -> str:
        """The last one again when there is no further one."""
        return self.turns[min(turn, len(self.turns) - 1)]

    def _calls(self, draw: Random) -> str:
        calls = []
        for _ in range(draw.choice((1, 1, 1, 1, 2, 4))):
            kind = draw.random()
            if self.mcp and kind > 0.4:
                name = draw.choices(tuple(self.mcp), self.mcp.values())[0]
                calls.append(call(f"mcp_{name}", **({"text": self.me} if name == "echo" else {})))
            elif kind < 0.06:
                calls.append(draw.choice(GARBAGE))
            elif kind < 0.12:
                calls.append(call("thread", me=self.me, do=draw.choice(("say", "leave", "bytes"))))
            else:
                do = draw.choices(tuple(DEEDS), DEEDS.values())[0]
                calls.append(call("chaos", me=self.me, do=do))
        return "".join(calls)


class ChaosEngine(ScriptedEngine):
    """One of several that share `scripts`, by the id of the conversation."""

    def __init__(
        self,
        scripts: dict[str, Script],
        *,
        delay_s: float,
        write: Callable[[int], Script] = Script,
    ) -> None:
        super().__init__(ScriptedServer(TOKENIZER, self._reply))
        self.scripts = scripts
        self.delay_s = delay_s
        self.write = write
        self.num_cancelled = 0
        self.hold: asyncio.Event | None = None
        """While there is one that is not set, turns after the first wait for it."""
        self.num_held = 0

    async def _reply(self, conversation: str, *_: Any) -> str:
        script = self.scripts[conversation]
        turn = script.turn
        await asyncio.sleep(0.1 if script.fate_now == "slow" else self.delay_s)
        if self.hold and turn:
            self.num_held += 1
            await self.hold.wait()
            await self.check_health()
        return script.text(turn)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        conversation = request_id.rpartition("#")[0]
        if conversation not in self.scripts:
            self.scripts[conversation] = self.write(sampling_params["seed"])
        script = self.scripts[conversation]
        script.turn += 1
        if script.fate_now == "refuse":
            raise RequestRefusedError("the prompt is not to be had")
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.script.requests.clear()
        kept = {"abort": len(output.token_ids) // 2, "abort_at_once": 0}.get(script.fate_now)
        return output if kept is None else _aborted(output, kept)


def _aborted(output: TokenOutput, kept: int) -> TokenOutput:
    tokens, logprobs = output.token_ids[:kept], output.logprobs[:kept]
    return replace(output, token_ids=tokens, logprobs=logprobs, finish_reason="abort")
