"""A scripted engine behind the real service, for the tests of routing, service and manager."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from minirl.config import load_config
from minirl.rollout.server import (
    AsyncServerBase,
    EngineLostError,
    ServerClient,
    ServerService,
    ServerStats,
)
from minirl.testing import ScriptedServer
from minirl.types import TokenOutput


class ScriptedEngine(AsyncServerBase):
    """An inference server that samples what a ScriptedServer's script says, and notes its calls."""

    def __init__(self, script: ScriptedServer) -> None:
        super().__init__(load_config(["model.path=scripted"]), log_file=Path("unused"))
        self.script = script
        self.calls: list[tuple[str, Any]] = []
        self.aborted: list[str] = []
        self.is_dead = False
        self.num_running = 0
        self.most_running = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        await self.check_health()
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self.script.generate(
                request_id.rpartition("#")[0],  # of the conversation
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
            )
        finally:
            self.num_running -= 1

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        self.calls.append(("init_weight_transfer", init_info))

    async def start_weight_update(self) -> None:
        self.calls.append(("start_weight_update", None))

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append(("update_weights", update_info))

    async def finish_weight_update(self, version: int) -> None:
        self.script.weight_version = version
        self.calls.append(("finish_weight_update", version))

    async def stats(self) -> ServerStats:
        return ServerStats(num_requests=len(self.script.requests), num_running=self.num_running)

    async def check_health(self) -> None:
        if self.is_dead:
            raise EngineLostError("the engine died")


@asynccontextmanager
async def serving(engine: ScriptedEngine, socket: Path) -> AsyncIterator[ServerClient]:
    """A client to `engine` over a real socket; the service runs beside it."""
    address = f"ipc://{socket}"
    service = asyncio.create_task(ServerService(engine, address).serve())
    try:
        async with ServerClient(address, "engine 0") as client:
            yield client
    finally:
        service.cancel()
        await asyncio.wait([service])
