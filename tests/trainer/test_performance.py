import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trainer_helpers import MODELS, SIZES
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from minirl.trainer import attention, packing
from minirl.trainer.flops import forward_flops, peak_flops
from minirl.trainer.logprobs import token_logprobs
from minirl.trainer.performance import PeakMemory, balance, step_performance
from minirl.types import MicroBatch, TokenOutput, Trajectory

LENGTH = 12


def batch_of(num_sequences: int, prompt_length: int) -> MicroBatch:
    trajectories = []
    for _ in range(num_sequences):
        trajectory = Trajectory(prompt_ids=[1] * prompt_length)
        n = LENGTH - prompt_length
        trajectory.append_sampled(
            TokenOutput(token_ids=[2] * n, logprobs=[-1.0] * n, finish_reason="stop")
        )
        trajectories.append(trajectory)
    rewards = [[0.0] * len(t.response_ids) for t in trajectories]
    return packing.pack(trajectories, rewards, list(range(num_sequences)))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied", "qwen2", "llama"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation=attention.NAME)
    batch = batch_of(num_sequences=3, prompt_length=5)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        token_logprobs(model, batch, 1.0)
    counted = {op.__name__: n for op, n in counter.get_flop_counts()["Global"].items()}
    matrices = counted.get("mm", 0) + counted.get("addmm", 0)
    config = model.config
    width = config.num_attention_heads * getattr(config, "head_dim", 8)
    pairs = 3 * LENGTH * (LENGTH + 1) // 2  # torch does not know the causal ones
    expected = matrices + 4 * config.num_hidden_layers * width * pairs
    assert forward_flops(model, batch) == expected


def test_every_expert_counts() -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16)
    few, many = (
        forward_flops(AutoModelForCausalLM.from_config(config), batch_of(1, 5))
        for config.num_experts in (4, 8)
    )
    experts = config.num_hidden_layers * 4 * 3 * 16 * config.hidden_size
    router = config.num_hidden_layers * 4 * config.hidden_size
    assert many - few == 2 * LENGTH * (experts + router)


def test_balance_of_a_plan() -> None:
    even = balance([8, 8, 8, 8], num_ranks=2, max_tokens=16)
    assert even == {"perf/imbalance": 1.0, "perf/micro_batch_fill": 1.0}
    alone = balance([8], num_ranks=2, max_tokens=16)
    assert alone == {"perf/imbalance": 2.0, "perf/micro_batch_fill": 0.25}


def test_metrics_of_phases(tmp_path) -> None:
    model = AutoModelForCausalLM.from_config(MODELS["qwen3"], attn_implementation=attention.NAME)
    policy, world = _Policy(model), _World()
    batch = batch_of(num_sequences=4, prompt_length=2)
    batch.response_mask[batch.sequence_ids == 0] = 0  # does not train: not computed, not counted
    seconds = {"old_log_prob": 0.5, "gen": 1.0, "update_actor": 3.0}
    metrics = step_performance(policy, batch, world, seconds, 2)
    flops = forward_flops(model, batch.select([1, 2, 3]))
    assert metrics["perf/tokens_per_s/old_log_prob"] == 3 * LENGTH / 0.5
    assert metrics["perf/tflops/old_log_prob"] == pytest.approx(flops / 0.5 / 2 / 1e12)
    assert metrics["perf/tflops/update_actor"] == pytest.approx(2 * 3 * flops / 3.0 / 2 / 1e12)
    assert not [name for name in metrics if "mfu" in name or "gen" in name]
    nothing = batch_of(1, 2)
    nothing.response_mask.zero_()
    assert step_performance(policy, nothing, world, seconds, 1) == {}


class _World:
    world_size, device = 2, torch.device("cpu")


class _Policy:
    max_tokens = 64

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model


def test_what_a_cpu_does_not_tell() -> None:
    assert peak_flops(torch.device("cpu")) is None
    assert PeakMemory(torch.device("cpu")).take() is None


def test_the_longest_name_of_a_card_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["NVIDIA H200", "NVIDIA H20", "NVIDIA H100 PCIe", "NVIDIA GeForce"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    cuda = torch.device("cuda")
    assert [peak_flops(cuda) for _ in range(4)] == [989e12, 148e12, 756e12, None]
