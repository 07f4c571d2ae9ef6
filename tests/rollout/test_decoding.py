"""Sampling and continuous batching of the transformers engine."""

import asyncio
import random
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from minirl.config import load_config
from minirl.rollout.decoding import Batch, Request, SamplingParams, sample
from minirl.rollout.transformers_server import TransformersServer
from minirl.testing import tiny_model

LOOP = asyncio.new_event_loop()
PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def request(prompt_ids: list[int] | None = None, **params: Any) -> Request:
    done: asyncio.Future[Any] = asyncio.Future(loop=LOOP)  # that nobody waits for
    numbers = random.Random(params.get("seed"))
    return Request(prompt_ids or [1], SamplingParams(**params), done, numbers)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PROBS.tolist()),
        ({"temperature": 0.5}, (PROBS**2 / (PROBS**2).sum()).tolist()),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.7}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.71}, [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        ({"min_p": 0.3}, [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_they_should(params: dict[str, Any], expected: list[float]) -> None:
    """And their log-probabilities are those of the distribution that was sampled."""
    count = 4000
    requests = [request(seed=seed, **params) for seed in range(count)]
    # a neighbour with parameters of its own changes nothing
    tokens, logprobs = sample(PROBS.log().repeat(count, 1), [*requests[:-1], request(top_k=1)])
    for token, share in enumerate(expected):
        assert tokens[:-1].count(token) / count == pytest.approx(share, abs=0.03)
    sampled_from = PROBS.tolist() if params.get("temperature") == 0 else expected
    for token, logprob in set(zip(tokens[:-1], logprobs[:-1], strict=True)):
        assert logprob == pytest.approx(torch.tensor(sampled_from[token]).log().item(), abs=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_who_else_is_in_the_batch_changes_nothing(model: Path) -> None:
    """Requests that join late and leave early, of all lengths, against each one alone."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    numbers = random.Random(0)

    def make(seed: int) -> Request:
        prompt = [numbers.randrange(256) for _ in range(1 + numbers.randrange(40))]
        return request(prompt, seed=seed, max_tokens=1 + numbers.randrange(12))

    waiting = [make(seed) for seed in range(24)]
    alone = [request(r.prompt_ids, seed=i, max_tokens=r.params.max_tokens)
             for i, r in enumerate(waiting)]  # fmt: skip
    batch, ended = Batch(loaded), []
    everyone = list(waiting)
    while waiting or batch.requests:
        joining = [waiting.pop(0) for _ in range(min(len(waiting), numbers.randrange(4)))]
        if joining or batch.requests:
            ended += batch.step(joining)
    assert len(ended) == 24
    for mine, other in zip(everyone, alone, strict=True):
        single = Batch(loaded)
        single.step([other])
        while single.requests:
            single.step([])
        assert mine.token_ids == other.token_ids
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert mine.finish_reason == "length"


def test_keys_and_values_are_written_where_they_stay(model: Path) -> None:
    """Not copied for every token, nor when a request joins or leaves."""
    batch = Batch(AutoModelForCausalLM.from_pretrained(model))
    batch.step([request([1, 2, 3], seed=i, max_tokens=30 + 10 * i) for i in range(4)])
    places = list[int]()
    for count in range(60):
        if batch.requests:
            batch.step([request([4, 5], max_tokens=5)] if count % 10 == 9 else [])
        if batch.requests:
            places.append(batch._buffers[0][0].data_ptr())
            rows, _, columns, _ = batch._buffers[0][0].shape
            assert len(batch.requests) <= rows <= 7 and columns <= 1.5 * (3 + 60)
    moves = sum(a != b for a, b in pairwise(places))
    assert len(places) > 50 and moves < 10


async def test_asleep_its_weights_are_gone_and_awake_they_are_back(
    model: Path, tmp_path: Path
) -> None:
    config = load_config([f"model.path={model}", "model.dtype=float32"])
    params = {"max_tokens": 8, "seed": 3}
    async with TransformersServer(config, log_file=tmp_path / "log") as server:
        before = await server.generate([1, 2, 3], params, "a")
        await server.sleep(1)
        assert sum(p.numel() for p in server._model.parameters()) == 0
        await server.wake_up(["weights"])
        await server.wake_up(["kv_cache"])
        after = await server.generate([1, 2, 3], params, "b")
        assert after.token_ids == before.token_ids
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
        await server.sleep(2)
        await server.wake_up()
        assert all(p.numel() for p in server._model.parameters())


async def test_it_goes_to_sleep_when_an_aborted_request_has_left_the_batch(
    model: Path, tmp_path: Path
) -> None:
    config = load_config([f"model.path={model}", "model.dtype=float32"])
    begun, may_go_on = asyncio.Event(), threading.Event()
    async with TransformersServer(config, log_file=tmp_path / "log") as server:
        step, loop = server._batch.step, asyncio.get_running_loop()

        def slow_step(joining: list[Request]) -> list[Request]:
            loop.call_soon_threadsafe(begun.set)
            assert may_go_on.wait(120)
            return step(joining)

        server._batch.step = slow_step  # type: ignore[method-assign]
        call = asyncio.create_task(server.generate([1, 2, 3], {"max_tokens": 100}, "a"))
        await begun.wait()
        call.cancel()
        falling_asleep = asyncio.create_task(server.sleep(2))
        await asyncio.wait([call])
        may_go_on.set()
        await falling_asleep
        await server.wake_up()
        assert (await server.generate([1, 2, 3], {"max_tokens": 2}, "b")).finish_reason == "length"
