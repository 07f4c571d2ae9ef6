"""The engine gets an adapter's merged weights, and computes what the trainer does."""

from pathlib import Path

from engine_pair import open_pair

from minirl.testing import tiny_model


async def test_engine_and_trainer_agree_after_every_update(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", tied=True)
    settings = [
        *("rollout.name=transformers", "model.dtype=float32", "trainer.device=cpu"),
        *("data.max_prompt_length=128", "rollout.response_length=64", "actor.optim.lr=0.01"),
        *("model.lora_rank=4", "actor.offload=all", "rollout.sync_check.max_logprob_diff=1e-5"),
    ]
    async with open_pair(tmp_path, model, *settings) as pair:
        await pair.sync_now()
        first, difference = await pair.differences()
        assert difference.max() <= 1e-5
        for _ in range(2):
            await pair.update(first)
            await pair.sync_now()  # raises when the probe differs
            _, difference = await pair.differences()
            assert difference.max() <= 1e-5
        moved = await pair.on_trainer(pair.policy.compute_logprobs, first)
        assert first.old_logprobs is not None
        assert (moved - first.old_logprobs).abs().max() > 0.05, "the adapter learned nothing"
        assert list(pair.sync.seconds) == ["wake", "gather", "copy", "load", "resume"]
