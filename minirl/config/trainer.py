"""The section `trainer`: the run as a whole."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from minirl.config.checks import positive, require


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run."""

    experiment_name: str = "minirl"
    """Names the run directory."""
    default_local_dir: str = "runs"
    """Runs are written to `<default_local_dir>/<experiment_name>/`."""
    total_epochs: int = 1
    """Passes over the training data, where total_training_steps is null."""
    total_training_steps: int | None = None
    """Steps; null = as many as total_epochs need."""
    seed: int = 0
    """Every random draw derives from it."""
    critic_warmup: int = 0
    """Steps at the start that train the critic only."""
    max_bad_steps: int = 3
    """Steps in a row that were not applied, because loss, advantage or gradient was not finite,
    after which the run writes a checkpoint and stops."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = cuda where there is one."""
    val_before_train: bool = True
    """Validate the start policy."""
    test_freq: int = -1
    """Validate every so many steps and after the last; -1 = never."""
    save_freq: int = -1
    """Write a checkpoint every so many steps and after the last; -1 = never."""
    max_ckpt_to_keep: int | None = None
    """Older checkpoints are deleted once a newer one is complete; null keeps all."""
    async_save: bool = True
    """Write checkpoints while the training goes on, from a copy in host memory; false = the step
    waits, and needs no copy."""
    resume_mode: Literal["auto", "disable"] = "auto"
    """auto = go on where the run in the run directory was: from its latest checkpoint, if there is
    one, with the conversations that its journal holds of the steps after it; disable = start anew,
    and keep the checkpoints that are there under another name (checkpoints.1)."""
    deterministic: bool = False
    """The same trajectories give the same parameters, bit by bit. Every step keeps its journal, and
    a hash of the parameters in it, for `python -m minirl.replay`."""
    logger: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"])
    """Trackers, by registered name: jsonl, tensorboard, wandb, mlflow, swanlab, console."""
    collective_timeout_s: float = 1800.0
    """Seconds after which a rank that does not come to where the others wait ends the run, and is
    named with the phase that it was in."""

    def __post_init__(self) -> None:
        positive("trainer", self, "total_epochs", "total_training_steps", "max_ckpt_to_keep")
        positive("trainer", self, "collective_timeout_s", "max_bad_steps")
        require(self.critic_warmup >= 0, "trainer.critic_warmup", self.critic_warmup, ">= 0")
        for name in ("test_freq", "save_freq"):
            value = getattr(self, name)
            require(
                value == -1 or value > 0,
                f"trainer.{name}",
                value,
                "a number of steps, or -1 for never",
            )

    @property
    def run_dir(self) -> Path:
        """<default_local_dir>/<experiment_name>."""
        return Path(self.default_local_dir) / self.experiment_name
