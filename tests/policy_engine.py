"""An engine that remembers what it was asked: `rollout.name=policy_engine:PolicyServer`."""

from typing import Any, ClassVar

from minirl.rollout.transformers_server import TransformersServer
from minirl.types import TokenOutput


class PolicyServer(TransformersServer):
    """The policy itself, without vLLM; a test clears `requests`."""

    requests: ClassVar[list[dict[str, Any]]] = []  # of all engines

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        self.requests.append(sampling_params | {"prompt_ids": prompt_ids})
        return await super().generate(prompt_ids, sampling_params, request_id)
