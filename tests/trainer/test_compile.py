"""Compiled layers compute the same, with one set of graphs for all numbers of tokens."""

from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from torch._dynamo.utils import counters
from trainer_helpers import alone, make_batch, make_config, save_model
from transformers import Qwen3Config

from minirl.trainer.policy import PolicyTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One layer: compiling takes seconds for each."""
    folder = save_model(tmp_path_factory.mktemp("model"))
    small = Qwen3Config.from_pretrained(folder)
    small.num_hidden_layers, small.layer_types = 1, ["full_attention"]
    small.save_pretrained(folder)
    return folder


def num_graphs():
    return counters["stats"]["unique_graphs"]


def test_the_same_updates_and_no_graph_for_other_lengths(folder, monkeypatch):
    """With the backend that runs the compiler's graphs as they are, since g++ takes half a minute
    for theirs."""
    compile_with = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_with)
    results, graphs = {}, []
    torch._dynamo.reset()
    counters.clear()
    for on in (False, True):
        config = make_config(folder)
        config = replace(config, model=replace(config.model, compile=on))
        results[on] = []
        with alone(config) as world:
            trainer = PolicyTrainer(config, world)
            for seed in range(2):
                batch = make_batch(seed=seed)
                old = trainer.compute_logprobs(batch)
                batch.old_logprobs = old - 0.1 * batch.response_mask
                results[on].append((old, trainer.update(batch)))
                graphs.append(num_graphs())
    assert graphs[:2] == [0, 0] and graphs[2] > 0
    assert graphs[3] == graphs[2], "other lengths were compiled anew"
    for (old, metrics), (their_old, their_metrics) in zip(*results.values(), strict=True):
        torch.testing.assert_close(their_old, old, atol=1e-4, rtol=1e-4)
        assert their_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)
