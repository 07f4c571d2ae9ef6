"""Each engine beside the real trainer: sampling, the service, weight sync and its proof."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from itertools import compress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from engine_pair import Pair, Without, open_pair
from engine_talk import endpoint, talk
from torch.distributed import rendezvous

from minirl.config import ConfigError, load_config
from minirl.credit import correct_mismatch
from minirl.rollout.server import EngineLostError, RequestRefusedError
from minirl.rollout.vllm_server import VLLMServer, _environment
from minirl.rollout.weight_sync import SyncError, WeightSync
from minirl.run import _watch
from minirl.testing import tiny_model
from minirl.trainer import packing
from minirl.types import MicroBatch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="exact agreement is for vLLM's CPU build; see tests/gpu"
    ),
]

AGREEMENT = 1e-5  # nats, float32 on both sides


SGLANG = pytest.mark.skip(reason="SGLang runs on GPUs only: see tests/gpu/test_gpu_engine.py")


@pytest.fixture(
    scope="module",
    params=[
        *("vllm-untied", "vllm-tied", "transformers-untied", "transformers-tied"),
        *(pytest.param(f"sglang-{embeddings}", marks=SGLANG) for embeddings in ("untied", "tied")),
    ],
)
async def pair(request: Any, tmp_path_factory: Any) -> AsyncIterator[Pair]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    engine, _, embeddings = request.param.partition("-")
    # several buckets per sync, and a vocabulary that vLLM pads to a multiple of 64
    shape = {"vocab_size": 331, "hidden_size": 192, "num_layers": 3}
    model = tiny_model(folder / "model", tied=embeddings == "tied", **shape)
    settings = [
        f"rollout.name={engine}",
        *("model.dtype=float32", "rollout.enforce_eager=true", "trainer.device=cpu"),
        *("data.max_prompt_length=256", "rollout.response_length=256"),
        *("rollout.cpu_kv_cache_gb=0.25", "rollout.max_num_batched_tokens=512"),
        "rollout.sync_check={max_logprob_diff: 1e-5, probe_length: 8}",
        *("actor.optim.lr=0.01", "rollout.update_weights_bucket_megabytes=1"),
    ]
    async with open_pair(folder, model, *settings) as pair:
        yield pair
    if isinstance(pair.server, VLLMServer):
        assert Path(pair.server._folder.name).name not in os.listdir(tempfile.gettempdir())


def test_what_vllm_sets_for_its_children_is_for_them_only(monkeypatch: Any) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    before = dict(os.environ)
    with _environment({"OMP_NUM_THREADS": "7"}):
        assert os.environ["OMP_NUM_THREADS"] == "7"
        os.environ |= {"LD_PRELOAD": "libgomp.so", "LOCAL_WORLD_SIZE": "1"}  # vLLM on a CPU does
    assert dict(os.environ) == before


def test_a_gpu_needs_no_flashinfer(tmp_path: Path, monkeypatch: Any) -> None:
    """vLLM's sampler for GPUs asks the function that is asked here when it is made."""
    from vllm.v1.sample.ops import topk_topp_sampler

    server = VLLMServer(load_config(["model.path=x"]), log_file=tmp_path / "log", device_ids=[0])
    for name, value in server._child_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(topk_topp_sampler.current_platform, "is_cuda", lambda: True)
    assert not topk_topp_sampler.flashinfer_sampler_supported()


async def test_an_argument_that_vllm_does_not_have_is_named(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = load_config(["model.path=m", "rollout.engine_kwargs.max_num_sequences=4"])
    with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs: .* 'max_num_sequences'"):
        async with VLLMServer(config, log_file=tmp_path / "engine.log"):
            raise AssertionError("it started")
    assert not [name for name in os.listdir(tmp_path) if name.startswith("minirl-")]


@pytest.mark.parametrize("device_ids", [None, [0]])
def test_under_torchrun_the_workers_can_meet(
    tmp_path: Path, monkeypatch: Any, device_ids: list[int] | None
) -> None:
    """As vLLM 0.25 has them do."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun does
    config = load_config(["model.path=x"])
    server = VLLMServer(config, log_file=tmp_path / "log", device_ids=device_ids)
    for name, value in server._child_environment().items():
        monkeypatch.setenv(name, value)
    patience = timedelta(seconds=120)
    meeting = rendezvous("tcp://127.0.0.1:0", rank=0, world_size=1, timeout=patience)
    _, rank, world_size = next(meeting)
    assert (rank, world_size) == (0, 1)


async def test_the_first_request_of_all_can_be_aborted_as_soon_as_it_has_begun(pair: Pair) -> None:
    """It stands first: with an engine that has served a request it shows nothing."""
    if not isinstance(pair.server, VLLMServer):
        pytest.skip("vLLM asks its engine for something at the first request")
    params = {"temperature": 1.0, "max_tokens": 200, "ignore_eos": True}
    call = asyncio.create_task(pair.server.generate([5] * 40, params, "first"))
    await asyncio.sleep(0)
    await pair.server.abort("first")
    assert (await call).finish_reason == "abort"


async def test_vllms_sockets_are_in_a_folder_that_goes_with_the_engine(pair: Pair) -> None:
    if not isinstance(pair.server, VLLMServer):
        pytest.skip("its engine is this process")
    assert os.listdir(pair.server._folder.name)


async def test_engine_and_trainer_agree_from_the_start_and_over_five_syncs(pair: Pair) -> None:
    assert await pair.sync_now() <= AGREEMENT
    batch, difference = await pair.differences()
    assert len(difference) > 100 and difference.max() <= AGREEMENT
    before = batch
    for _ in range(5):
        await pair.update(batch)
        assert await pair.sync_now() <= AGREEMENT
        batch, difference = await pair.differences()
        assert difference.max() <= AGREEMENT
    moved = await pair.on_trainer(pair.policy.compute_logprobs, before)
    assert before.old_logprobs is not None
    assert (moved - before.old_logprobs).abs().max() > 0.1  # the updates did change the policy


async def test_a_tensor_that_is_not_sent_is_caught(pair: Pair) -> None:
    for name in ("model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        await pair.sync_now()
        batch, _ = await pair.differences()
        await pair.update(batch)
        with pytest.raises(SyncError, match=r"max_logprob_diff=1e-05"):
            await pair.sync_now(Without(pair, name))
    assert await pair.sync_now() <= AGREEMENT


async def test_a_prefix_cache_that_outlives_a_sync_is_caught(pair: Pair, monkeypatch: Any) -> None:
    if not isinstance(pair.server, VLLMServer):
        pytest.skip("only vLLM has a prefix cache")
    await pair.sync_now()
    batch, _ = await pair.differences()
    await pair.update(batch)

    async def forget() -> bool:
        return True

    with monkeypatch.context() as patch:
        patch.setattr(pair.server._engine, "reset_prefix_cache", forget)
        with pytest.raises(SyncError):
            await pair.sync_now()
    assert await pair.sync_now() <= AGREEMENT


async def test_a_wrong_temperature_is_caught_by_probe_and_metric(pair: Pair) -> None:
    await pair.sync_now()
    hot = replace(pair.config, rollout=replace(pair.config.rollout, temperature=1.3))
    sync = WeightSync(hot, pair.policy.world, pair.server, pair.on_trainer, pair.policy.vocab_size)
    with pytest.raises(SyncError):
        await sync.check(pair.policy.score, seed=1)

    def mean_difference(batch: MicroBatch) -> float:
        metrics = correct_mismatch(batch, None)
        return metrics["training/rollout_probs_diff_mean"]

    right, _ = await pair.differences()
    wrong, _ = await pair.differences(temperature=1.3)
    assert mean_difference(right) < 1e-6 < 1e-3 < mean_difference(wrong)


async def test_versions_travel_with_the_tokens(pair: Pair) -> None:
    await pair.sync_now()
    [trajectory] = await pair.sample(1)
    assert trajectory.weight_versions == [pair.syncs]
    assert (await pair.client.stats()).weight_version == pair.syncs


async def test_a_seed_fixes_the_sample_whatever_runs_beside_it(pair: Pair) -> None:
    await pair.sync_now()
    together = await pair.sample(12)
    alone = await pair.sample(1)
    assert alone[0].response_ids == together[0].response_ids
    again = await pair.sample(12)
    assert [t.response_ids for t in again] == [t.response_ids for t in together]
    other = await pair.sample(12, seed=77)
    assert [t.response_ids for t in other] != [t.response_ids for t in together]


async def test_prompts_that_do_not_fit_into_a_step_wait_for_the_next(pair: Pair) -> None:
    prompts = [[5 + i] * (100 + i) for i in range(16)]  # 1720 tokens, of which a step takes 512
    params = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True}
    together = await asyncio.gather(
        *(pair.client.generate(p, {**params, "seed": i}, f"t{i}") for i, p in enumerate(prompts))
    )
    alone = await pair.client.generate(prompts[9], {**params, "seed": 9}, "alone")
    assert together[9].token_ids == alone.token_ids
    assert all(len(output.token_ids) == 4 for output in together)


async def test_finish_reasons_and_cached_tokens(pair: Pair) -> None:
    prompt = list(range(100))
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "seed": 1}
    cut = await pair.client.generate(prompt, params, "cut")
    assert cut.finish_reason == "length" and len(cut.token_ids) == len(cut.logprobs) == 6
    stop = {**params, "stop_token_ids": [cut.token_ids[2]]}
    ended = await pair.client.generate(prompt, stop, "ended")
    first = cut.token_ids.index(cut.token_ids[2])
    assert ended.finish_reason == "stop" and ended.token_ids == cut.token_ids[: first + 1]
    if isinstance(pair.server, VLLMServer):
        assert ended.num_cached_tokens >= 64  # whole blocks of the 100 tokens


async def test_vllm_makes_no_object_per_log_probability(pair: Pair, monkeypatch: Any) -> None:
    if not isinstance(pair.server, VLLMServer):
        pytest.skip("vLLM makes two, unless told otherwise")
    finals, to_tokens = [], pair.server._to_tokens
    monkeypatch.setattr(pair.server, "_to_tokens", lambda f: (finals.append(f), to_tokens(f))[1])
    output = await pair.client.generate([5] * 40, {"temperature": 1.0, "max_tokens": 6}, "flat")
    given = finals[0].outputs[0].logprobs
    assert (type(given).__name__, given.token_ids) == ("FlatLogprobs", output.token_ids)
    assert len(output.logprobs) == len(output.token_ids)


async def until(pair: Pair, condition: Callable[[int], bool]) -> None:
    for _ in range(10_000):
        if condition((await pair.client.stats()).num_running):
            return
    raise AssertionError("the engine did not get there")


async def test_a_cancelled_call_is_aborted_in_the_engine(pair: Pair) -> None:
    before = await pair.client.stats()
    params = {"temperature": 1.0, "max_tokens": 200, "ignore_eos": True}
    call = asyncio.create_task(pair.client.generate([5] * 40, params, "cancelled"))
    await until(pair, lambda running: running > 0)
    assert (await pair.client.stats()).busy_s > before.busy_s  # though it has not ended
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(pair, lambda running: running == 0)
    after = await pair.client.stats()
    assert after.generated_tokens - before.generated_tokens < 200


async def test_requests_that_outlive_their_rollout_do_not_meet_the_next_weights(pair: Pair) -> None:
    """Tasks that an agent loop left behind: what they run is aborted, what they ask waits."""
    params = {"temperature": 1.0, "max_tokens": 200, "ignore_eos": True}

    async def go_on(number: int) -> None:
        for turn in range(10_000):
            await pair.client.generate([5] * 40, params, f"left over {number}.{turn}")

    left_over = [asyncio.create_task(go_on(number)) for number in range(4)]
    for _ in range(2):
        await until(pair, lambda running: running == 4)
        await pair.client.call("sleep", level=2)
        await until(pair, lambda running: running == 4)
        assert await pair.sync_now() <= AGREEMENT
    assert not any(task.done() for task in left_over)
    for task in left_over:
        task.cancel()
    await asyncio.wait(left_over)
    await until(pair, lambda running: running == 0)


async def test_a_request_that_cannot_be_served_says_why(pair: Pair) -> None:
    with pytest.raises(RequestRefusedError, match="max_tokenz"):
        await pair.client.generate([1, 2, 3], {"max_tokenz": 5}, "typo")
    with pytest.raises(RequestRefusedError, match="512"):
        await pair.client.generate([1] * 1000, {"max_tokens": 5}, "long")


async def test_the_tokens_of_an_openai_client_are_the_engines(pair: Pair) -> None:
    """A tool's result between two turns, the first of them streamed, eight conversations at once:
    the trainer scores every sampled token as the engine did, and as the client was told."""
    await pair.sync_now()
    async with endpoint(pair) as context, httpx.AsyncClient(trust_env=False) as http:
        talks = await asyncio.gather(*(talk(context, http, number) for number in range(8)))
    trajectories = [trajectory for trajectory, _ in talks]
    for trajectory, told in talks:
        assert trajectory.num_turns == 2 and 0 in trajectory.response_mask
        if isinstance(pair.server, VLLMServer):  # which caches whole blocks of 32
            prompt = len(trajectory.prompt_ids) // 32 * 32
            assert trajectory.turns[1].num_cached_tokens >= prompt > 0
        pairs = zip(trajectory.response_ids, trajectory.response_mask, strict=True)
        is_told = [m and token not in context.chat.stop_token_ids for token, m in pairs]
        assert told == list(compress(trajectory.response_logprobs, is_told))
    rewards = [[0.0] * len(t.response_ids) for t in trajectories]
    batch = packing.pack(trajectories, rewards, list(range(len(trajectories))))
    scored = await pair.on_trainer(pair.policy.compute_logprobs, batch)
    difference = (scored - batch.rollout_logprobs)[batch.response_mask > 0].abs()
    assert len(difference) > 100 and difference.max() <= AGREEMENT


async def test_an_engine_that_stands_still_is_noticed(pair: Pair) -> None:
    """A stopped process says nothing, and vLLM takes it for healthy."""
    if not isinstance(pair.server, VLLMServer):
        pytest.skip("its engine is this process")
    params = {"temperature": 1.0, "max_tokens": 100, "ignore_eos": True}
    before = (await pair.client.stats()).num_steps
    call = asyncio.create_task(pair.client.generate([5] * 40, params, "stopped"))
    while (await pair.client.stats()).num_steps < before + 3:
        pass
    engines = [p for p in psutil.Process().children() if "EngineCore" in "".join(p.cmdline())]
    for engine in engines:
        engine.suspend()
    try:
        await pair.server.check_health()
        with pytest.raises(EngineLostError, match=r"no step for 1 s .*1 requests in it"):
            await _watch(pair.server, 1.0)
    finally:
        for engine in engines:
            engine.resume()
    assert len((await call).token_ids) == 100
