"""A whole run that trains an adapter and keeps nothing on the device while it rests."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from scripted_run import make_config, make_project, scripted_run
from transformers import AutoModelForCausalLM

from minirl import export
from minirl.train import train
from minirl.trainer.policy import AdapterlessPolicy

SETTINGS = ("model.lora_rank=4", "actor.offload=all", "ref={}", "actor.use_kl_loss=true")


async def test_from_the_first_step_to_an_exported_adapter(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    for total in (2, 3):  # the second run goes on from the checkpoint of the first
        steps = f"trainer.total_training_steps={total}"
        config = make_config(project, "run", *SETTINGS, "trainer.save_freq=2", steps)
        async with scripted_run(config) as run:
            assert isinstance(run.reference, AdapterlessPolicy)
            await train(run)
            weights = {name: t.clone() for bucket in run.policy.weights for name, t in bucket}
    lines = (config.trainer.run_dir / "metrics.jsonl").read_text().splitlines()
    kl = {row["step"]: row["actor/kl_loss"] for row in map(json.loads, lines) if row["step"]}
    assert abs(kl[1]) < 1e-9 and list(kl) == [1, 2, 3], kl
    assert kl[3] > kl[1], "the reference moved with the policy"
    assert "perf/weight_sync_s/gather" in lines[-1]

    out = tmp_path / "out"
    export.export(config.trainer.run_dir, out)
    merged = AutoModelForCausalLM.from_pretrained(out)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, weights[name], atol=0, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(project / "model")
    tokens = torch.arange(3, 40)[None]
    before = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, out / "adapter")(tokens).logits
    torch.testing.assert_close(adapted, merged(tokens).logits, atol=1e-4, rtol=1e-4)
    assert (adapted - before).abs().max() > 1e-3
