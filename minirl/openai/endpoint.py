"""The policy as an OpenAI endpoint, in the process whose event loop runs the agent loops.

http://127.0.0.1:PORT/<trajectory>/v1    for a trajectory's agent
http://127.0.0.1:PORT/v1                 for what belongs to no trajectory, such as a judge
"""

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minirl.agent_loop.base import AgentLoopContext, Endpoint
from minirl.openai.conversation import Conversation

if TYPE_CHECKING:
    from minirl.openai.service import OpenAIService

POLICY: "ContextVar[Endpoint]" = ContextVar("policy endpoint")
"""Of the running conversation, for reward functions that ask the policy."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a client needs."""

    base_url: str
    api_key: str
    model: str


class PolicyEndpoint:
    """Listens from its first use on; `aclose` it in the end.

    A trajectory's URL holds a random id and is its own key. The plain one wants the `api_key`, so
    that other users of the machine cannot ask the policy.
    """

    def __init__(self, context: AgentLoopContext) -> None:
        self._context = context
        self._api_key = secrets.token_hex(16)
        self._conversations: dict[str, Conversation] = {}
        self._starting = asyncio.Lock()
        self._service: OpenAIService | None = None

    async def aclose(self) -> None:
        """Stop to listen."""
        if self._service:
            await self._service.aclose()

    async def access(self, trajectory: str = "") -> Access:
        """For a trajectory, or for requests that belong to none."""
        async with self._starting:
            if self._service is None:
                from minirl.openai.service import OpenAIService  # most runs need no HTTP

                service = OpenAIService(self._context, self._api_key, self._conversations)
                await service.listen()
                self._service = service
        path = f"/{trajectory}/v1" if trajectory else "/v1"
        return Access(self._service.url + path, self._api_key, self._service.model)

    @asynccontextmanager
    async def serving(self, conversation: Conversation) -> AsyncIterator[Access]:
        """Serve the requests of one trajectory inside; what is under way in the end is ended."""
        trajectory = uuid.uuid4().hex
        access = await self.access(trajectory)
        self._conversations[trajectory] = conversation
        try:
            yield access
        finally:
            del self._conversations[trajectory]
            await conversation.close()
