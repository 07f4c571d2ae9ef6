"""The update of TRL's GRPOTrainer, on trajectories of minirl."""

import torch
from torch import Tensor
from torch.nn import functional as F

from minirl.config import Config
from minirl.trainer import packing
from minirl.trainer.update import make_optimizer
from minirl.types import MicroBatch


class TRLUpdate:
    """GRPOTrainer's loss over the same trajectories, padded to the longest as it pads them, with as
    many tokens at once, and the same optimizer."""

    def __init__(
        self, config: Config, batch: MicroBatch, device: torch.device, max_tokens: int
    ) -> None:
        # Here, not above: trl may be missing.
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        dtype = getattr(torch, config.model.dtype)
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype).to(device)
        words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
        responses = (batch.lengths - batch.prompt_lengths).tolist()
        self.size = max(1, max_tokens // int(batch.lengths.max()))
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **row: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir="build/trl",
                num_generations=2,
                per_device_train_batch_size=2,
                beta=0.0,
                report_to=[],
                bf16=dtype == torch.bfloat16,
                use_cpu=device.type == "cpu",
                gradient_checkpointing=config.model.enable_gradient_checkpointing,
            ),
            train_dataset=Dataset.from_list([{"prompt": "0"}] * 2),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>"),
        )
        self.optimizer = make_optimizer(model, config.actor.optim)
        self.grad_clip = config.actor.grad_clip
        self.rows = self._rows(batch, responses, device)
        chunks = -(-batch.num_sequences // self.size)
        self.trainer.current_gradient_accumulation_steps = chunks

    @staticmethod
    def _rows(batch: MicroBatch, responses: list[int], device: torch.device) -> dict[str, Tensor]:
        """[B, prompt] and [B, longest response], padding on the right."""
        prompts, completions = [], []
        for tokens, n in zip(batch.tokens.split(batch.lengths.tolist()), responses, strict=True):
            prompts.append(tokens[:-n])
            completions.append(F.pad(tokens[-n:], (0, max(responses) - n)))
        mask = packing.to_rows(batch, "response_mask").long()
        assert batch.advantages is not None and batch.old_logprobs is not None
        rows = {
            "prompt_ids": torch.stack(prompts),
            "prompt_mask": torch.ones_like(torch.stack(prompts)),
            "completion_ids": torch.stack(completions),
            "completion_mask": mask,
            "advantages": packing.to_rows(batch, "advantages").sum(1) / mask.sum(1),
            "old_per_token_logps": packing.to_rows(batch, "old_logprobs"),
        }
        return {name: row.to(device) for name, row in rows.items()}

    def update(self) -> None:
        """One optimizer step over all rows."""
        trainer = self.trainer
        num_items = self.rows["completion_mask"].sum()
        for start in range(0, len(self.rows["prompt_ids"]), self.size):
            chunk = {name: row[start : start + self.size] for name, row in self.rows.items()}
            chunk["num_items_in_batch"] = num_items
            trainer._compute_loss(trainer.model, chunk).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), self.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
