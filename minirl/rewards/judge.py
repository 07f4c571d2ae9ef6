"""A judge: a model behind an OpenAI endpoint grades the solution."""

import asyncio
import importlib.util
import os
import re
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minirl.openai.endpoint import POLICY
from minirl.registry import nearest
from minirl.waits import WAITS

if TYPE_CHECKING:
    from openai import AsyncOpenAI

OWN = "policy"
FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")


class Judge:
    """`reward.custom_reward_function: {path: minirl.rewards.judge, name: Judge}`.

    Its options are reward.reward_kwargs. `prompt` is a format string of data_source, solution_str,
    ground_truth and extra_info (`{extra_info[question]}`), which becomes a user message. The reward
    is `scale` times the number in the first group of the last match of `pattern` in the answer.

    `base_url` is any OpenAI endpoint's, or `policy`: then the policy that is trained judges. The
    environment variable `api_key_env` holds the key; null = none is asked for. `sampling` are
    further parameters of the request. Of a process's requests `max_concurrency` are under way at
    once, each for up to `timeout_s` seconds, and repeated up to `max_retries` times if it fails.

    A judge that cannot be reached, or gives no grade, fails the trajectory; it is no zero.
    """

    def __init__(
        self,
        *,
        base_url: str,
        prompt: str,
        pattern: str,
        model: str = "",
        scale: float = 1.0,
        api_key_env: str | None = "OPENAI_API_KEY",
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float = 120.0,
        max_retries: int = 2,
        max_concurrency: int = 64,
    ) -> None:
        _check_prompt(prompt)
        self._pattern = _compile(pattern)
        if base_url != OWN and not model:
            raise ValueError("model: missing; the endpoint's name of the judge")
        if base_url != OWN and api_key_env and not os.environ.get(api_key_env):
            raise ValueError(f"api_key_env: {api_key_env} is not set; export it, or write null")
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency: got {max_concurrency}; no request could be made")
        if importlib.util.find_spec("openai") is None:
            raise ValueError("it needs openai: pip install 'minirl[openai]'")
        self._base_url, self._model, self._api_key_env = base_url, model, api_key_env
        self._prompt, self._scale, self._sampling = prompt, scale, dict(sampling or {})
        self._limits: dict[str, Any] = {"timeout": timeout_s, "max_retries": max_retries}
        self._slots = asyncio.Semaphore(max_concurrency)
        self._opening = asyncio.Lock()
        self._client: AsyncOpenAI | None = None

    async def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> float:
        """Grade one solution.

        Raises:
            openai.OpenAIError: the judge did not answer.
            ValueError: its answer holds no grade.
        """
        if not isinstance(solution_str, str):
            raise TypeError("the judge grades one solution; use reward_manager naive or dapo")
        values = (data_source, solution_str, ground_truth, extra_info)
        prompt = self._prompt.format(**dict(zip(FIELDS, values, strict=True)))
        client = await self._open()
        async with self._slots:
            with WAITS.on("the judge"):
                completion = await client.chat.completions.create(
                    model=self._model,
                    messages=[{"role": "user", "content": prompt}],
                    **self._sampling,
                )
        return self._scale * self._grade(completion.choices[0].message.content or "")

    def _grade(self, answer: str) -> float:
        grades = [match[1] for match in self._pattern.finditer(answer)]
        if not grades:
            raise ValueError(f"the judge gave no {self._pattern.pattern!r}: {answer[-500:]!r}")
        return float(grades[-1])

    async def _open(self) -> "AsyncOpenAI":
        """The client, once there is an event loop; the policy's address is not known before."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        async with self._opening:
            if self._client is None and self._base_url == OWN:
                own = await POLICY.get().access()
                self._model = own.model
                direct = DefaultAsyncHttpxClient(trust_env=False, verify=False)  # no proxy, no TLS
                access: dict[str, Any] = {"base_url": own.base_url, "api_key": own.api_key}
                self._client = AsyncOpenAI(**access, **self._limits, http_client=direct)
            elif self._client is None:
                key = os.environ[self._api_key_env] if self._api_key_env else "none"
                self._client = AsyncOpenAI(base_url=self._base_url, api_key=key, **self._limits)
        return self._client


def _check_prompt(prompt: str) -> None:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None]
    except ValueError as error:
        raise ValueError(f"prompt: {error}; write {{{{ and }}}} for braces") from error
    for name in names:
        field = re.split(r"[.\[]", name)[0]
        if field not in FIELDS:
            raise ValueError(f"prompt: no field {field!r}{nearest(field, FIELDS)}")
    if "solution_str" not in names:
        raise ValueError("prompt: it does not show {solution_str}")


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern: got {pattern!r}; not a regular expression: {error}") from error
    if not compiled.groups:
        raise ValueError(f"pattern: got {pattern!r}; its first group must be the grade")
    return compiled
