"""What can be known of the SGLang engine without a GPU: what it is told, what its answers mean, and
the life of its process. tests/gpu has the engine itself."""

import asyncio
import os
import pickle
import signal
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from scripted_engine import ScriptedEngine
from torch.distributed import rendezvous

from minirl.config import Config, ConfigError, load_config
from minirl.rollout import sglang_engine, sglang_server, sglang_weights
from minirl.rollout.processes import visible_devices
from minirl.rollout.server import EngineLostError, RequestRefusedError, ServerService
from minirl.rollout.sglang_engine import (
    EngineSpec,
    _rid,
    engine_arguments,
    to_sampling_params,
    to_token_output,
)
from minirl.rollout.sglang_server import SGLangServer, check_sglang
from minirl.rollout.weight_buffer import WeightBuffer, view_tensors
from minirl.testing import ScriptedServer, byte_tokenizer
from minirl.types import TokenOutput


def make_config(*overrides: str) -> Config:
    return load_config(["model.path=m", "rollout.name=sglang", *overrides])


def test_arguments_come_from_the_config_and_engine_kwargs_win() -> None:
    config = make_config(
        "data.max_prompt_length=100", "rollout.response_length=400", "rollout.max_num_seqs=7",
        "rollout.tensor_parallel_size=2", "rollout.free_cache_engine=false", "trainer.seed=3",
        "rollout.engine_kwargs={log_level: debug, enable_deterministic_inference: true}",
    )  # fmt: skip
    arguments = engine_arguments(config)
    assert arguments["context_length"] == 508  # SGLang keeps some to itself
    assert arguments["tp_size"] == 2 and arguments["max_running_requests"] == 7
    assert arguments["random_seed"] == 3 and arguments["enable_memory_saver"] is False
    assert arguments["skip_tokenizer_init"] and arguments["dtype"] == "bfloat16"
    assert arguments["log_level"] == "debug" and arguments["enable_deterministic_inference"]


def test_sampling_parameters_get_its_names() -> None:
    given = {"temperature": 0.5, "max_tokens": 9, "seed": 4, "stop_token_ids": [1], "top_k": -1}
    assert to_sampling_params(given) == {
        "temperature": 0.5, "max_new_tokens": 9, "sampling_seed": 4, "stop_token_ids": [1],
        "top_k": -1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"type": "stop", "matched": 7}, "stop"),
        ({"type": "length", "length": 2}, "length"),
        ({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, "abort"),
    ],
)
def test_an_answer(reason: dict[str, Any], expected: Any) -> None:
    answer = {
        "output_ids": [5, 7],
        "meta_info": {
            "id": "a#0;", "finish_reason": reason, "prompt_tokens": 40, "weight_version": "default",
            "num_retractions": 1, "reasoning_tokens": 0, "completion_tokens": 2,
            "cached_tokens": 32, "input_token_logprobs": [], "output_token_logprobs_length": 2,
            "output_token_logprobs": [(-0.5, 5, None), (-1.5, 7, None)], "e2e_latency": 0.1,
        },
    }  # fmt: skip
    assert to_token_output(answer, 3) == TokenOutput(
        token_ids=[5, 7], logprobs=[-0.5, -1.5], finish_reason=expected, num_cached_tokens=32,
        num_preempted=1, weight_version=3,
    )  # fmt: skip


def test_an_answer_to_what_was_aborted_in_the_queue() -> None:
    meta = {
        "id": "a#0;", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "default", "e2e_latency": 0.1, "input_token_logprobs": [],
        "output_token_logprobs": [], "output_token_logprobs_length": 0, "completion_tokens": 0,
    }  # fmt: skip
    output = to_token_output({"text": "", "output_ids": [], "meta_info": meta}, 1)
    assert output == TokenOutput(token_ids=[], logprobs=[], finish_reason="abort", weight_version=1)


def test_no_request_id_begins_another() -> None:
    """SGLang aborts by the beginning of the id."""
    assert not _rid("a#12").startswith(_rid("a#1"))


def test_every_scheduler_is_told_where_its_bucket_is() -> None:
    buffer = WeightBuffer(4096, torch.device("cpu"))
    tensors = [("a.weight", torch.randn(3, 5)), ("b", torch.arange(4).to(torch.bfloat16))]
    handles = [{"storage_handle": b"one", "storage_device": 0}, {"storage_handle": b"two"}]
    init_info = {"num_bytes": 4096, "path": None, "ipc_handles": handles}
    sent = sglang_weights.payloads(init_info, buffer.write(tensors))
    for payload, handle in zip(sent, handles, strict=True):
        [(_, content)] = pickle.loads(payload)
        info = msgspec.msgpack.decode(content.numpy().tobytes())
        assert info["handle"] == handle and info["num_bytes"] == 4096
        for (name, tensor), (found, view) in zip(
            tensors, view_tensors(buffer.bytes, info), strict=True
        ):
            assert found == name and torch.equal(view, tensor)
    module, _, function = sglang_weights.LOADER.rpartition(".")
    assert module == sglang_weights.__name__ and callable(getattr(sglang_weights, function))


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, "1,2"), ("4,5,6", "5,6"), ("GPU-a,GPU-b,GPU-c", "GPU-b,GPU-c")]
)
def test_its_devices_are_among_those_that_the_leader_sees(
    monkeypatch: Any, visible: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices([1, 2]) == expected


def test_under_torchrun_its_schedulers_can_meet(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun does
    for name in ("print_to", "end_with"):
        monkeypatch.setattr(sglang_engine, name, lambda *_: None)
    monkeypatch.setattr(sglang_engine.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sglang_engine.uvloop, "run", lambda serving: serving.close())
    spec = EngineSpec(
        config=make_config(),
        name="engine",
        address="",
        device_ids=[0],
        log_file=tmp_path / "log",
        leader_pid=os.getpid(),
    )
    sglang_engine.serve_engine(spec)
    patience = timedelta(seconds=120)
    meeting = rendezvous("tcp://127.0.0.1:0", rank=0, world_size=1, timeout=patience)
    _, rank, world_size = next(meeting)
    assert (rank, world_size) == (0, 1)


def test_what_is_missing_is_said_at_the_start(monkeypatch: Any) -> None:
    def problem(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            check_sglang(make_config(*overrides))
        return str(caught.value)

    if not find_spec("sglang"):
        assert "rollout.name: sglang is not installed; say `pip install minirl[sg" in problem()
    monkeypatch.setattr(sglang_server, "version", lambda name: "0.4.9.post1")
    assert "sglang 0.4.9.post1 is installed; minirl is made for 0.5.22, 0.5.23" in problem()
    monkeypatch.setattr(sglang_server, "version", lambda name: "0.5.23.post1")
    assert "it runs on GPUs only" in problem("trainer.device=cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_sglang(make_config())
    cut = problem("rollout.top_p=0.9", "rollout.allow_truncated_sampling=true")
    assert "before top_p, top_k and min_p cut" in cut


def placed(tmp_path: Path, *overrides: str) -> SGLangServer:
    return SGLangServer(make_config(*overrides), log_file=tmp_path / "engine.log", device_ids=[0])


@pytest.mark.skipif(bool(find_spec("sglang")), reason="here SGLang is installed")
async def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineLostError, match=r"did not start: .*No module named 'sglang'; see"):
        async with placed(tmp_path):
            raise AssertionError("it cannot have started")


def serve_script(spec: EngineSpec) -> None:
    """In place of serve_engine: the same service, on a script."""
    engine = ScriptedEngine(ScriptedServer(byte_tokenizer(), lambda *_: "hello", delay_s=0.0))
    asyncio.run(ServerService(engine, spec.address).serve())


async def test_calls_are_passed_on_until_the_process_is_lost(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sglang_server, "serve_engine", serve_script)
    lengths = "data.max_prompt_length=10", "rollout.response_length=10", "rollout.sync_check=null"
    async with placed(tmp_path, *lengths) as server:
        output = await server.generate([1, 2], {}, "whole")
        assert byte_tokenizer().decode(output.token_ids) == "hello<|im_end|>"
        last = await server.generate([1] * 18, {"max_tokens": 9}, "cut to the room that is left")
        assert len(last.token_ids) == 2 and last.finish_reason == "length"
        with pytest.raises(RequestRefusedError, match=r"20 tokens of rollout\.max_model_len"):
            await server.generate([1] * 20, {}, "too long")
        await server.sleep(2)
        await server.wake_up(["weights"])
        await server.start_weight_update()
        await server.finish_weight_update(3)
        assert (await server.generate([1], {}, "new")).weight_version == 3
        assert (await server.stats()).num_requests == 3
        await server.check_health()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(EngineLostError, match=r"SGLang; see .*engine\.log"):
            while True:
                await server.check_health()
