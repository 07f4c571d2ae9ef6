import os
import subprocess
import sys

import pytest
import torch.distributed

from minirl.config import Config, ConfigError, ModelConfig, RolloutConfig, TrainerConfig
from minirl.distributed import (
    choose_device,
    distributed,
    interface_towards,
    num_threads,
    place,
)


def config_for(tensor_parallel_size: int = 1) -> Config:
    return Config(
        model=ModelConfig(path="somewhere"),
        rollout=RolloutConfig(tensor_parallel_size=tensor_parallel_size),
        trainer=TrainerConfig(device="cpu"),
    )


def test_groups_of_neighbouring_ranks():
    worlds = [
        place(config_for(2), {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"})
        for rank in range(4)
    ]
    assert [w.group for w in worlds] == [0, 0, 1, 1]
    assert [w.leader for w in worlds] == [0, 0, 2, 2]
    assert [w.is_leader for w in worlds] == [True, False, True, False]
    assert [w.is_main for w in worlds] == [True, False, False, False]
    assert {w.num_groups for w in worlds} == {2}


def test_a_size_that_does_not_divide_the_world_is_refused():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 3.* the 4 ranks.*per-node 3"):
        place(config_for(3), {"WORLD_SIZE": "4"})
    with pytest.raises(ConfigError), distributed(config_for(2)):
        pass
    assert not torch.distributed.is_initialized()
    node = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert place(config_for(2), {**node, "RANK": "3", "LOCAL_RANK": "1"}).leader == 2
    with pytest.raises(ConfigError, match=r"got 4, .* the 2 ranks; .* on each node"):
        place(config_for(4), node)


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert num_threads({}) == 8
    assert num_threads({"WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}) == 1
    assert num_threads({"OMP_NUM_THREADS": "3,2"}) == 3
    two = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert num_threads(two) == num_threads({**two, "OMP_NUM_THREADS": "1"}) == 4
    assert num_threads({**two, "OMP_NUM_THREADS": "3"}) == 3
    nodes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert num_threads(nodes) == 4 and num_threads({**nodes, "OMP_NUM_THREADS": "1"}) == 1
    assert num_threads({"WORLD_SIZE": "16"}) == 1


def test_threads_wait_for_one_another_shortly():
    def settings(**environment: str) -> str:
        command = [sys.executable, "-c", "import minirl, torch"]
        own = ("OMP_", "GOMP_", "LD_PRELOAD")  # a libgomp that is preloaded reads before minirl
        kept = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        environment |= kept | {"OMP_DISPLAY_ENV": "verbose"}
        return subprocess.run(command, env=environment, capture_output=True, text=True).stderr

    assert "GOMP_SPINCOUNT = '1000'" in settings()
    assert "GOMP_SPINCOUNT = '7'" in settings(GOMP_SPINCOUNT="7")
    assert "GOMP_SPINCOUNT = '1000'" not in settings(OMP_WAIT_POLICY="active")


def test_the_interface_towards_an_address():
    assert interface_towards("127.0.0.1") == interface_towards("localhost") == "lo"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_device_choice():
    assert choose_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"trainer\.device: got 'cuda'.*only 0 CUDA devices"):
        choose_device("cuda", 0)


def test_world_of_one_comes_and_goes():
    for _ in range(2):
        with distributed(config_for()) as world:
            assert (world.rank, world.world_size, world.is_leader) == (0, 1, True)
            assert world.sum_floats([1.5]) == [1.5]
            assert world.gather("a") == ["a"]
            world.barrier()
        assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="inside"), distributed(config_for()):
        raise RuntimeError("inside")
    assert not torch.distributed.is_initialized()
