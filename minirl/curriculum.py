"""The `hints` part of a step: hard prompts once more, with a hint, before the same answers."""

import torch
from torch import Tensor

from minirl.algorithms import group_difficulty
from minirl.config import Config
from minirl.credit import advantage_inputs, pack_groups
from minirl.distributed import Dist
from minirl.hints import hinted_prompts, load_hint
from minirl.inputs import Inputs
from minirl.trainer import packing
from minirl.trainer.model import LanguageModel
from minirl.types import Group, MicroBatch


async def hinted_batch(
    batch: MicroBatch, groups: list[Group], config: Config, inputs: Inputs
) -> MicroBatch:
    """The hard groups of `batch`, in its order, with a hint in their prompts; on rank 0."""
    cpo = config.algorithm.cpo
    assert cpo is not None
    hard = hard_groups(batch, cpo.difficulty)
    chosen = [groups[index] for index in hard]
    prompts = await hinted_prompts(chosen, load_hint(cpo), inputs.chat, inputs.tools)
    hinted = pack_groups(chosen, config, prompts)
    hinted.group_ids = torch.tensor(hard, dtype=torch.int64)[hinted.group_ids]
    return hinted


def hard_groups(batch: MicroBatch, difficulty: float) -> list[int]:
    """Ids of the groups whose 1 - mean success is above `difficulty`, ascending."""
    if not batch.num_sequences:
        return []
    # A trajectory that does not train, say by a timeout, says nothing of its group.
    trains = packing.trained_per_sequence(batch) > 0
    hard = trains & (group_difficulty(advantage_inputs(batch)) > difficulty)
    return batch.group_ids[hard].unique().tolist()


def hinted_logprobs(
    batch: MicroBatch, hinted: MicroBatch | None, policy: LanguageModel, world: Dist
) -> Tensor:
    """old_logprobs [N], those of the hard groups replaced by the ones behind the hinted prompt.

    Every rank calls it, with the same batch; rank 0 has `hinted`.
    """
    assert batch.old_logprobs is not None
    hinted = world.broadcast_batch(hinted)
    logprobs = policy.compute_logprobs(hinted)
    hard = torch.isin(batch.group_ids, hinted.group_ids)[batch.sequence_ids]
    result = batch.old_logprobs.clone()
    # The same answers in the same order: only the prompts before them differ.
    result[hard & (packing.response_positions(batch) >= 0)] = logprobs[
        packing.response_positions(hinted) >= 0
    ]
    return result
