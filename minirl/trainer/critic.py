"""The critic: a model with a value head, trained beside the policy."""

from torch import Tensor

from minirl.algorithms import aggregate, value_loss
from minirl.config import Config
from minirl.distributed import Dist
from minirl.trainer.fsdp import load_model
from minirl.trainer.logprobs import token_values
from minirl.trainer.update import Totals, TrainedModel, UpdateSettings, learning_rate
from minirl.types import MicroBatch


class CriticTrainer(TrainedModel):
    """V(state) of `critic.path`, or of the start policy, with a new head that begins at 0.

    Raises ConfigError for a model or a schedule that cannot run.
    """

    section = "critic"

    def __init__(self, config: Config, world: Dist, total_steps: int | None = None) -> None:
        assert config.critic is not None
        settings = critic_settings(config)
        learning_rate(settings.optim, 0, total_steps, self.section)
        path = config.critic.path or config.model.path
        model = load_model(path, config.model, world, key="critic.path", head="value")
        super().__init__(config, world, model, settings, total_steps)
        self.critic = config.critic

    def compute_values(self, batch: MicroBatch) -> Tensor:
        """Values [N] float32 (CPU) at the tokens with response_mask 1, 0 elsewhere.

        The value at a token is that of the state in which it was sampled. Every rank passes the
        same batch and gets the whole result.
        """
        return self.evaluate(batch, lambda micro: token_values(self.model, micro))

    def _loss(
        self, micro: MicroBatch, counts: dict[str, float], totals: Totals
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert micro.values is not None and micro.returns is not None
        values = token_values(self.model, micro)
        per_token, metrics = value_loss(
            values, micro.values, micro.returns, micro.response_mask, self.critic.cliprange_value
        )
        mode, ids = self.critic.loss_agg_mode, micro.sequence_ids
        loss = aggregate(per_token, micro.response_mask, mode, sequence_ids=ids, **counts)
        totals.add_part("critic/vf_loss", loss)
        totals.add_tokens(metrics)
        return loss, per_token, values


def critic_settings(config: Config) -> UpdateSettings:
    """What `critic` gives, and the actor's where it gives nothing."""
    critic, actor = config.critic, config.actor
    assert critic is not None
    return UpdateSettings(
        optim=critic.optim,
        ppo_epochs=critic.ppo_epochs or actor.ppo_epochs,
        mini_batch_size=critic.ppo_mini_batch_size or config.mini_batch_size,
        max_tokens=critic.max_tokens_per_micro_batch or actor.max_tokens_per_micro_batch,
        grad_clip=critic.grad_clip,
    )
