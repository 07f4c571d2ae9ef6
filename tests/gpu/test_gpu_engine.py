"""Engine and trainer on one GPU: CUDA IPC, sleep and wake, agreement in bfloat16, memory."""

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_pair import Pair, Without, open_pair

from minirl.algorithms import kl_estimate
from minirl.rollout.server import RequestRefusedError
from minirl.rollout.vllm_server import VLLMServer
from minirl.rollout.weight_sync import SyncError
from minirl.testing import tiny_model
from minirl.types import MicroBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

AGREEMENT = 0.02  # nats, mean over tokens, bfloat16 on both sides
K3 = 1e-3  # nats, the estimate of KL(engine || trainer)
ENGINE_SHARE = 0.2  # of the card, while the engine is awake
SLACK = 64 * 2**20  # bytes by which two readings of free memory may differ
LONG = {"max_tokens": 64, "ignore_eos": True}
VOCAB_SIZE = 331  # no multiple of 64, to which vLLM pads its tables


def engine_params() -> list[Any]:
    """vLLM and SGLang want another torch each, so only one of them is there."""
    return [
        pytest.param(
            f"{name}-{embeddings}",
            marks=pytest.mark.skipif(not find_spec(name), reason=f"{name} is not installed"),
        )
        for name in ("vllm", "sglang")
        for embeddings in ("untied", "tied")
    ]


@pytest.fixture(scope="session", params=engine_params())
async def pair(request: Any, tmp_path_factory: Any) -> AsyncIterator[Pair]:
    """A model of 2.5 M parameters, which travels in several buckets."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    engine, _, embeddings = request.param.partition("-")
    model = tiny_model(
        folder / "model",
        tied=embeddings == "tied",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_layers=4,
        head_dim=64,
    )
    settings = [
        f"rollout.name={engine}",
        *("trainer.device=cuda", "model.dtype=bfloat16", "rollout.enforce_eager=true"),
        *("data.max_prompt_length=256", "rollout.response_length=256", "rollout.max_num_seqs=64"),
        *(f"rollout.gpu_memory_utilization={ENGINE_SHARE}", "actor.optim.lr=0.01"),
        f"rollout.sync_check.max_logprob_diff={AGREEMENT}",
        "rollout.update_weights_bucket_megabytes=1",
    ]
    async with open_pair(folder, model, *settings) as pair:
        yield pair


async def sleep(pair: Pair, level: int = 2) -> None:
    await pair.client.call("sleep", level=level)
    if isinstance(pair.server, VLLMServer):
        assert await pair.server._engine.is_sleeping()


def assert_agreement(batch: MicroBatch) -> None:
    assert batch.old_logprobs is not None
    sampled = batch.response_mask > 0
    engine, trainer = batch.rollout_logprobs[sampled], batch.old_logprobs[sampled]
    assert len(engine) > 500
    assert (engine - trainer).abs().mean() <= AGREEMENT
    assert kl_estimate(engine, trainer, "k3").mean() <= K3


async def test_weights_arrive_over_rounds_of_sleep_and_wake(pair: Pair) -> None:
    assert len(list(pair.policy.weights)) >= 4  # buckets
    assert await pair.sync_now() <= AGREEMENT
    first, _ = await pair.differences(**LONG)
    assert_agreement(first)
    batch = first
    for level in (2, 2, 1, 2):
        await sleep(pair, level)
        await pair.update(batch)
        assert await pair.sync_now() <= AGREEMENT
        if isinstance(pair.server, VLLMServer):
            assert not await pair.server._engine.is_sleeping()
        batch, _ = await pair.differences(**LONG)
        assert_agreement(batch)
    moved = await pair.on_trainer(pair.policy.compute_logprobs, first)
    assert first.old_logprobs is not None
    assert (moved - first.old_logprobs).abs().max() > 0.1  # the updates did change the policy


async def test_weights_arrive_while_the_engine_stays_awake(pair: Pair) -> None:
    for _ in range(2):
        await pair.sync_now()
        batch, _ = await pair.differences(**LONG)
        assert_agreement(batch)
        await pair.update(batch)


@torch.no_grad()
def scale(pair: Pair, name: str, factor: float) -> None:
    pair.policy.model.get_parameter(name).mul_(factor)


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_tensor_that_is_not_sent_is_caught(pair: Pair, asleep: bool) -> None:
    name = "model.norm.weight"  # the smallest one
    await pair.sync_now()
    if asleep:
        await sleep(pair, level=1)  # it wakes with the old tensor, not with none
    await pair.on_trainer(scale, pair, name, 1.5)
    with pytest.raises(SyncError, match=r"max_logprob_diff=0\.02"):
        await pair.sync_now(Without(pair, name))
    assert await pair.sync_now() <= AGREEMENT
    await pair.on_trainer(scale, pair, name, 1 / 1.5)
    assert await pair.sync_now() <= AGREEMENT


async def test_sleep_gives_the_memory_back_round_after_round(pair: Pair) -> None:
    device = pair.policy.world.device
    total = torch.cuda.get_device_properties(device).total_memory

    async def free() -> int:
        await pair.on_trainer(torch.cuda.empty_cache)
        return torch.cuda.mem_get_info(device)[0]

    awake, asleep = [], []
    for _ in range(5):
        await pair.sync_now()
        batch, _ = await pair.differences()
        awake.append(await free())
        await sleep(pair)
        asleep.append(await free())
        await pair.update(batch)
    await pair.sync_now()
    # The engine's share less what its process keeps: context, kernels, activations.
    assert min(asleep) - max(awake) >= ENGINE_SHARE * total - 6 * 2**30
    assert min(asleep) - max(awake) >= 0.5 * ENGINE_SHARE * total
    for readings in (awake, asleep):
        settled = readings[1:]  # the first round still warms kernels up
        assert max(settled) - min(settled) <= SLACK
        assert readings[0] - readings[-1] <= 8 * SLACK


async def test_a_turn_ends_where_it_should(pair: Pair) -> None:
    """Stop tokens are kept, limits are exact up to the last token, aborts keep what there is."""
    await pair.sync_now()
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "seed": 1}
    cut = await pair.client.generate(list(range(100)), params, "cut")
    assert cut.finish_reason == "length" and len(cut.token_ids) == len(cut.logprobs) == 6
    stop = {**params, "stop_token_ids": list(range(VOCAB_SIZE))}
    ended = await pair.client.generate(list(range(100)), stop, "ended")
    assert ended.finish_reason == "stop" and len(ended.token_ids) == len(ended.logprobs) == 1
    assert ended.num_cached_tokens >= 64
    full = {"temperature": 1.0, "max_tokens": 412, "ignore_eos": True}
    filled = await pair.client.generate(list(range(100)), full, "full")
    assert len(filled.token_ids) == 412, "prompt and answer fill the 512 of the config"
    call = asyncio.create_task(pair.client.generate([5] * 40, full, "aborted"))
    while (await pair.client.stats()).num_running == 0:
        pass
    await pair.client.call("abort", request_id="aborted")
    aborted = await call
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.logprobs) < 412
    with pytest.raises(RequestRefusedError, match="max_tokenz"):
        await pair.client.generate([1, 2, 3], {"max_tokenz": 5}, "typo")
    with pytest.raises(RequestRefusedError, match="512"):
        await pair.client.generate([1] * 1000, {"max_tokens": 5}, "long")


def shared_memory() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").iterdir())


async def test_nothing_in_shared_memory_outgrows_the_rounds(pair: Pair) -> None:
    await pair.sync_now()
    before = shared_memory()
    for _ in range(3):
        await sleep(pair)
        await pair.sync_now()
    assert shared_memory() == before
