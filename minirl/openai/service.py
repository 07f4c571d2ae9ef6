"""OpenAI's chat completions over HTTP, by aiohttp."""

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from minirl.agent_loop.base import AgentLoopContext, ServerError
from minirl.openai.answers import Completion, chunk_bodies, completion_body
from minirl.openai.conversation import Conversation
from minirl.openai.protocol import ApiError, ChatRequest, read_request
from minirl.openai.sampling import complete, render_prompt, sample_choices
from minirl.waits import CONVERSATION, NO_CONVERSATION

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
BACKLOG = 4096
"""Connections that wait to be accepted: all agents of a rollout may begin at once."""
MAX_BODY = 2**28


class OpenAIService:
    """Answers the requests of `conversations` (by the id in their URL), and those of nobody."""

    def __init__(
        self, context: AgentLoopContext, api_key: str, conversations: Mapping[str, Conversation]
    ) -> None:
        self.model = context.config.model.path
        self._context = context
        self._api_key = api_key
        self._conversations = conversations
        app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY)
        for prefix in ("/v1", "/{trajectory}/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/models", self._models)
        # A client that is gone cancels its handler, and with it the generation.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def listen(self) -> None:
        """Begin to serve, on a free port of this machine's loopback."""
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0, backlog=BACKLOG).start()
        logger.info("the policy's OpenAI endpoint listens at %s", self.url)

    async def aclose(self) -> None:
        """Stop to serve."""
        await self._runner.cleanup()

    async def _models(self, http: web.Request) -> web.Response:
        self._conversation(http)
        model = {"id": self.model, "object": "model", "created": int(time.time())}
        return web.json_response({"object": "list", "data": [{**model, "owned_by": "minirl"}]})

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        conversation = self._conversation(http)
        body = await http.read()
        request = read_request(body)
        if conversation is None:
            completion = await self._answer(request)
        else:
            is_retry = http.headers.get("x-stainless-retry-count", "0") != "0"
            digest = hashlib.blake2b(body).digest()
            completion = await conversation.answer(request, digest, is_retry)
        if not request.stream:
            return web.json_response(completion_body(completion, self.model))
        return await self._stream(http, request, completion)

    def _conversation(self, http: web.Request) -> Conversation | None:
        """The trajectory that the URL names; None for the plain one."""
        trajectory = http.match_info.get("trajectory")
        if trajectory is None:
            if http.headers.get("authorization") != f"Bearer {self._api_key}":
                raise ApiError("wrong api_key", status=401, code="invalid_api_key")
            return None
        if trajectory not in self._conversations:
            message = f"there is no trajectory {trajectory!r}, or it has ended"
            raise ApiError(message, status=404, code="trajectory_not_found")
        return self._conversations[trajectory]

    async def _answer(self, request: ChatRequest) -> Completion:
        """Outside of any trajectory: the client's sampling parameters count, and no token stays."""
        CONVERSATION.set(NO_CONVERSATION)  # else it is that of the first to use the endpoint
        prompt_ids = await render_prompt(self._context, request)
        limit = self._context.config.max_model_len
        room = limit - len(prompt_ids)
        if room <= 0:
            words = f"the messages are {len(prompt_ids)} tokens long; the engine holds {limit}"
            raise ApiError(f"{words} (rollout.max_model_len)", code="context_length_exceeded")
        given = ((name, getattr(request, name)) for name in ("top_p", "top_k", "min_p", "seed"))
        params = {name: value for name, value in given if value is not None}
        params["temperature"] = 1.0 if request.temperature is None else request.temperature
        params["max_tokens"] = min(room, request.limit or room)
        samples = await sample_choices(self._context, request, uuid.uuid4().hex, prompt_ids, params)
        return complete(samples, len(prompt_ids))

    async def _stream(
        self, http: web.Request, request: ChatRequest, completion: Completion
    ) -> web.StreamResponse:
        """The whole answer as server-sent events: engines hand out finished turns only."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(http)
        options = request.stream_options
        for chunk in chunk_bodies(completion, self.model, bool(options and options.include_usage)):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The boundary where whatever goes wrong becomes OpenAI's error object."""
    try:
        return await handler(request)
    except ApiError as error:
        told = error
    except web.HTTPException as error:  # no such path, or not by this method
        told = ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status)
    except ServerError as error:  # ends the run, too
        told = ApiError(f"the engine failed: {error}", status=500)
    except Exception as error:
        logger.exception("a request to the policy's OpenAI endpoint failed")
        told = ApiError(f"{type(error).__name__}: {error}", status=500)
    # To ask again would not help; OpenAI's client does so on its own after some errors.
    headers = {"x-should-retry": "false"}
    return web.json_response(told.body(), status=told.status, headers=headers)
