"""An engine without vLLM: the policy itself, in this process, sampling token by token.

It is named by `rollout.name=policy_engine:PolicyServer` and takes its weights from the trainer as
the real one does.
"""

from typing import Any, ClassVar, Self

import torch
from transformers import AutoModelForCausalLM

from minirl.rollout.server import AsyncServerBase, ServerStats
from minirl.rollout.weight_buffer import open_shared, view_tensors
from minirl.types import TokenOutput


class PolicyServer(AsyncServerBase):
    """Samples with the seed of the request; remembers what it was asked."""

    requests: ClassVar[list[dict[str, Any]]] = []  # of all engines; a test clears it

    async def __aenter__(self) -> Self:
        self.model = AutoModelForCausalLM.from_pretrained(self.config.model.path)
        self.version = 0
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> TokenOutput:
        params = sampling_params
        self.requests.append(params | {"prompt_ids": prompt_ids})
        generator = torch.Generator().manual_seed(params["seed"])
        ids, logprobs, cache, new = list(prompt_ids), [], None, torch.tensor([prompt_ids])
        while len(logprobs) < params["max_tokens"]:
            with torch.no_grad():
                output = self.model(new, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            greedy = params["temperature"] == 0
            logits = output.logits[0, -1] / (1 if greedy else params["temperature"])
            logp = torch.log_softmax(logits, -1)
            drawn = torch.multinomial(logp.exp(), 1, generator=generator)
            token = int(logp.argmax() if greedy else drawn)
            ids.append(token)
            logprobs.append(float(logp[token]))
            new = torch.tensor([[token]])
            if token in params.get("stop_token_ids", []):
                break
        sampled = ids[len(prompt_ids) :]
        stopped = sampled[-1] in params.get("stop_token_ids", [])
        return TokenOutput(
            token_ids=sampled,
            logprobs=logprobs,
            finish_reason="stop" if stopped else "length",
            weight_version=self.version,
        )

    async def abort(self, request_id: str) -> None: ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        self.flat = open_shared(init_info["path"], init_info["num_bytes"])

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in view_tensors(self.flat, update_info):
            parameters[name].data.copy_(tensor)

    async def finish_weight_update(self, version: int) -> None:
        self.version = version

    async def stats(self) -> ServerStats:
        return ServerStats(weight_version=self.version)

    async def check_health(self) -> None: ...
