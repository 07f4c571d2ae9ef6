"""Everything that needs two ranks, in one start of two processes; what else is to be true of four,
in one start of four."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from trainer_helpers import (
    alone,
    make_batch,
    make_config,
    save,
    save_model,
    save_reward_model,
    spawn,
)
from transformers import AutoModelForCausalLM

from minirl import distributed
from minirl.config import (
    Config,
    ConfigError,
    CriticConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RewardModelConfig,
)
from minirl.distributed import Dist
from minirl.testing import tiny_model
from minirl.trainer import checkpoint, lora
from minirl.trainer.buckets import WeightBuckets
from minirl.trainer.critic import CriticTrainer
from minirl.trainer.fsdp import load_model, read_weights, shard
from minirl.trainer.policy import PolicyTrainer
from minirl.trainer.reward_model import RewardModel, pack_sequences
from minirl.types import MicroBatch
from minirl.waits import WAITS

MODELS = {"qwen3": {}, "qwen3_tied": {}, "llama": {"lora_rank": 4}}
"""With what `model` says of each."""


def work_on_all(world: Dist, config: Config, folder: Path) -> None:
    offload = "all" if world.world_size == 2 else "none"
    for name, settings in MODELS.items():
        model = ModelConfig(path=str(folder / name / "model"), **settings)
        actor = replace(config.actor, offload=offload if name == "qwen3_tied" else "none")
        work(world, replace(config, model=model, actor=actor), folder / name)
    if world.world_size == 2:
        check_that_no_rank_holds_the_whole_model(world, config, folder)
        check_that_files_of_other_names_are_read(world, config, folder)
        check_that_master_weights_keep_what_bfloat16_loses(world, config, folder)
        check_that_compiled_layers_compute_the_same(world, config, folder)


def work(world: Dist, config: Config, folder: Path) -> None:
    """Two steps, the second on a batch that leaves all but rank 0 idle, a checkpoint after the
    first."""
    trainer, critic = PolicyTrainer(config, world), CriticTrainer(config, world)
    reward_model = RewardModel(config, world)
    results = []
    for step, (groups, size) in enumerate([(4, 3), (1, 1)]):
        batch = world.broadcast_batch(make_batch(groups, size) if world.is_main else None)
        for f in fields(MicroBatch):
            mine, sent = getattr(batch, f.name), getattr(make_batch(groups, size), f.name)
            assert (mine is None and sent is None) or torch.equal(mine, sent), f.name
        if step == 0:  # else the update gives them
            batch.old_logprobs = trainer.compute_logprobs(batch)
        metrics = trainer.update(batch)
        full = {name: t.clone() for bucket in trainer.weights for name, t in bucket}
        batch.values, batch.returns = critic.compute_values(batch), batch.response_mask * 0.7
        metrics |= critic.update(batch)
        sequences = [t.tolist() for t in batch.tokens.split(batch.lengths.tolist())]
        scores = reward_model.score(world.broadcast_batch(pack_sequences(sequences)))
        probe = trainer.score([5, 6, 7])
        results.append((batch.old_logprobs, metrics, full, probe, batch.values, scores))
        if step == 0:
            save(trainer, folder / f"from_{world.world_size}", 1, {}, critic=critic)
    torch.save(results, folder / f"results_{world.world_size}_{world.rank}.pt")
    if world.world_size == 2:
        resting = [p.to_local().untyped_storage().nbytes() for p in trainer.model.parameters()]
        assert any(resting) == (config.actor.offload == "none")
        check_collectives(world)
        check_that_ranks_share_a_machine(world, folder)
        check_that_a_wait_for_another_rank_is_told(world, folder / "told")
        if not config.model.lora_rank:
            with trainer.on_device():
                check_buckets(trainer)
        trainer.load(folder / "from_1" / "step_000001", critic)
        batch = make_batch(1, 1)
        torch.testing.assert_close(critic.compute_values(batch), results[1][4])
        weights = {name: t for bucket in trainer.weights for name, t in bucket}
        torch.save({n: t.clone() for n, t in weights.items()}, folder / f"loaded_{world.rank}.pt")


def check_collectives(world: Dist) -> None:
    assert world.sum_floats([1.0, float(world.rank)]) == [2.0, 1.0]
    assert world.gather({"rank": world.rank}) == [{"rank": 0}, {"rank": 1}]


def check_that_ranks_share_a_machine(world: Dist, folder: Path) -> None:
    """All ranks are told, whichever of them is elsewhere."""
    world.require_one_machine(folder)
    with pytest.raises(ConfigError, match=r"ranks \[1\] cannot see rank 0's .*TMPDIR"):
        world.require_one_machine(folder if world.is_main else folder / "in another container")
    (other := folder / f"boot_id_{world.rank}").write_text(f"of machine {world.rank}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "BOOT_ID", other)
        with pytest.raises(ConfigError, match=r"ranks \[1\] run on another machine than rank 0"):
            world.require_one_machine(folder)


def check_that_a_wait_for_another_rank_is_told(world: Dist, told: Path) -> None:
    """Rank 1 does not come until rank 0's log would say in which collective it waits."""
    words = "1 for the other ranks in sum_floats: the run ("

    def listen() -> None:
        while words not in WAITS.report(0, logging.INFO):
            time.sleep(0.01)
        told.touch()

    if world.is_main:
        threading.Thread(target=listen, daemon=True).start()
    deadline = time.monotonic() + 120
    while not world.is_main and not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    world.barrier()


def check_buckets(trainer: PolicyTrainer) -> None:
    """Any bucket size and type gives full_tensor(), with 101 rows over two ranks, in HF's names."""
    full = {n: p.full_tensor() for n, p in trainer.model.named_parameters()}
    assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    assert full["model.embed_tokens.weight"].shape[0] % 2 == 1
    for max_bytes in (1, 5000, 10**9):
        for dtype in (torch.float32, torch.bfloat16):
            buckets = WeightBuckets(trainer.model, max_bytes, dtype)
            for _ in range(2):
                seen = []
                for bucket in buckets:
                    sizes = [t.numel() * t.element_size() for _, t in bucket]
                    layers = {name.split(".")[2] for name, _ in bucket if ".layers." in name}
                    one_unit = len(bucket) == 1 or len(layers) == 1  # a layer stays together
                    assert one_unit or sum(sizes) <= max_bytes
                    for name, tensor in bucket:
                        assert torch.equal(tensor, full[name].to(dtype)), name
                        seen.append(name)
                assert seen == list(full)


def peak_bytes(work: Callable[[], object]) -> tuple[int, object]:
    """The most memory that `work` takes beside what this process has, and its result."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, result = resident("VmRSS"), work()
    return resident("VmHWM") - before, result


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def check_that_no_rank_holds_the_whole_model(world: Dist, config: Config, folder: Path) -> None:
    path = folder / "large"
    if world.is_main:
        tiny_model(path, hidden_size=256, num_layers=24)
    world.barrier()
    model = replace(config.model, path=str(path))
    peak, loaded = peak_bytes(lambda: load_model(str(path), model, world))
    whole = sum(p.numel() * 4 for p in loaded.parameters())
    assert whole > 40e6 and peak < 0.75 * whole, (peak, whole)
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name


def check_that_files_of_other_names_are_read(world: Dist, config: Config, folder: Path) -> None:
    """As transformers reads them: here of an older format."""
    path = folder / "pickled"
    if world.is_main:
        save_model(path)
        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
    world.barrier()
    model = load_model(str(path), replace(config.model, path=str(path)), world)
    expected = torch.load(path / "pytorch_model.bin")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name


def check_that_master_weights_keep_what_bfloat16_loses(
    world: Dist, config: Config, folder: Path
) -> None:
    """Products in bfloat16; weights, the gradients' sum over ranks and the update in float32."""
    path = str(folder / "qwen3" / "model")
    model = read_weights(path, ModelConfig(path=path))
    model.set_attn_implementation("eager")
    shard(model, world, torch.bfloat16)
    seen = []
    model.lm_head.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    output = model(torch.tensor([[world.rank + 1, 5, 7]])).logits
    output.square().sum().backward()
    assert seen == [torch.bfloat16] and output.dtype == torch.bfloat16
    weight = model.lm_head.weight
    grad = weight.grad.full_tensor()
    assert weight.dtype == weight.grad.dtype == torch.float32
    assert not torch.equal(grad, grad.bfloat16().float()), "the sum of two was rounded"
    before = weight.full_tensor().clone()
    with torch.no_grad():
        weight.mul_(1 + 2**-12)  # less than half of bfloat16's last place
    assert not torch.equal(weight.full_tensor(), before)


def check_that_compiled_layers_compute_the_same(world: Dist, config: Config, folder: Path) -> None:
    """One layer, with the backend that runs the compiler's graphs as they are: see test_compile."""
    path = folder / "one_layer"
    if world.is_main:
        tiny_model(path, hidden_size=32, num_layers=1)
    world.barrier()
    compile_with = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", compile_with)
        for on in (False, True):
            model = ModelConfig(path=str(path), compile=on)
            trainer = PolicyTrainer(replace(config, model=model), world)
            batch = world.broadcast_batch(make_batch() if world.is_main else None)
            batch.old_logprobs = trainer.compute_logprobs(batch)
            metrics = trainer.update(batch)
            weights = {name: t.clone() for bucket in trainer.weights for name, t in bucket}
            results.append((batch.old_logprobs, metrics, weights))
            assert bool(counters["stats"]["unique_graphs"]) == on
    (logprobs, metrics, weights), (their_logprobs, their_metrics, their_weights) = results
    torch.testing.assert_close(their_logprobs, logprobs, atol=1e-5, rtol=1e-5)
    assert their_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(their_weights, weights, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def all_results(tmp_path_factory, forkserver):
    folder = tmp_path_factory.mktemp("runs")
    for name in MODELS:
        save_model(folder / name / "model", name)
    config = make_config(folder, optim=OptimConfig(lr=1e-3, eps=1e-3))
    reward_model = RewardModelConfig(path=str(save_reward_model(folder / "rm")), param_offload=True)
    config = replace(
        config,
        critic=CriticConfig(optim=OptimConfig(lr=1e-2, eps=1e-3)),
        reward=RewardConfig(reward_model=reward_model),
    )
    with alone(config) as world:
        work_on_all(world, config, folder)
    spawn(work_on_all, config, folder)
    spawn(work_on_all, config, folder, num_ranks=4)
    return folder


@pytest.fixture(params=MODELS)
def results(request, all_results):
    return all_results / request.param


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_more_ranks_train_like_one(results, num_ranks):
    one = torch.load(results / "results_1_0.pt")
    more = [torch.load(results / f"results_{num_ranks}_{rank}.pt") for rank in range(num_ranks)]
    for alone_step, *ranks in zip(one, *more, strict=True):
        for logprobs, metrics, weights, score, values, rewards in ranks:
            assert rewards == pytest.approx(alone_step[5], abs=1e-5)
            torch.testing.assert_close(values, alone_step[4], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(logprobs, alone_step[0], atol=1e-5, rtol=1e-5)
            assert metrics == pytest.approx(alone_step[1], rel=1e-5, abs=1e-7)
            torch.testing.assert_close(weights, alone_step[2], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(score, alone_step[3], atol=1e-5, rtol=1e-5)
        assert all(metrics == ranks[0][1] for _, metrics, *_ in ranks)
    assert one[0][4].abs().max() == 0 and one[1][4].abs().max() > 0, "the critic learns from 0"


def test_tied_weights_come_once(results):
    weights = torch.load(results / "results_2_0.pt")[0][2]
    assert ("lm_head.weight" in weights) == ("tied" not in results.name)
    assert "model.embed_tokens.weight" in weights
    assert not any("lora" in name or "base_layer" in name for name in weights)


def test_checkpoints_move_between_one_and_two_ranks(results):
    after_first = torch.load(results / "results_1_0.pt")[0][2]
    for rank in range(2):
        loaded = torch.load(results / f"loaded_{rank}.pt")
        assert all(torch.equal(loaded[name], after_first[name]) for name in after_first)
    config = make_config(results / "model")
    config = replace(config, model=replace(config.model, **MODELS[results.name]))
    with alone(config) as world:
        trainer = PolicyTrainer(config, world)
        assert trainer.load(results / "from_2" / "step_000001") == {"step": 1}
        mine = {name: t for bucket in trainer.weights for name, t in bucket}
    torch.testing.assert_close(mine, torch.load(results / "results_2_0.pt")[0][2])


def test_one_process_reads_the_weights_of_two_ranks(results):
    settings = ModelConfig(path=str(results / "model"), **MODELS[results.name])
    model = read_weights(settings.path, settings)
    if settings.lora_rank:
        lora.add_adapter(model, settings, seed=0)
    checkpoint.load_weights(results / "from_2" / "step_000001", "actor", model)
    merged = {n: t for bucket in WeightBuckets(model, 10**9, torch.float32) for n, t in bucket}
    weights = torch.load(results / "results_2_0.pt")[0][2]
    assert merged.keys() == weights.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, weights[name]), name
