"""What a model says about packed tokens: log-probabilities and entropies, values, or scores."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minirl.trainer.attention import Packing
from minirl.types import MicroBatch

CHUNK_ELEMENTS = 2**26
"""Rows x vocabulary that are turned into float32 at once: 256 MiB."""


Also = Literal["nothing", "entropy", "entropy_grad", "stats"]


def token_logprobs(
    model: nn.Module, batch: MicroBatch, temperature: float, *, also: Also = "nothing"
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [T], float32, in nats, of the tokens with response_mask 1, and one more.

    Both stand at the token itself and are 0 elsewhere. The distribution pi is softmax(logits /
    temperature) at the position before; the first token of a sequence has none, and gets 0.
    `also` says what the second is: nothing (0), the entropy of pi without or with its gradient, or
    the stats 1 - 2 pi(token) + sum_v pi_v^2 of `optimal_token_baseline`.
    """
    wanted, logits = _predictions(model, batch)
    logprobs, second = _chunked(logits, batch.tokens[wanted], temperature, also)
    zeros = torch.zeros(batch.num_tokens, device=logits.device)
    return zeros.index_put((wanted,), logprobs), zeros.index_put((wanted,), second)


def token_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Values [T], float32, of a model with a value head, at the tokens with response_mask 1.

    The value at a token is that of the state in which it was sampled, so it is read at the position
    before, like its log-probability.
    """
    wanted, values = _predictions(model, batch)
    zeros = torch.zeros(batch.num_tokens, device=values.device)
    return zeros.index_put((wanted,), values[:, 0].float())


def token_scores(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Scores [T], float32, of a model with a score head, at the tokens with response_mask 1: of the
    sequence up to the token and with it."""
    output = model(
        input_ids=batch.tokens[None],
        position_ids=batch.positions[None],
        use_cache=False,
        packing=Packing.of(batch.lengths, batch.tokens.device),
    )
    return torch.where(batch.response_mask > 0, output.logits[0, :, 0].float(), 0.0)


def _predictions(model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The tokens [n] that train, and the head's output [n, V] at the positions before them."""
    wanted = ((batch.response_mask > 0) & (batch.positions > 0)).nonzero().squeeze(1)
    output = model(
        input_ids=batch.tokens[None],
        position_ids=batch.positions[None],
        use_cache=False,
        logits_to_keep=wanted - 1,
        packing=Packing.of(batch.lengths, batch.tokens.device),
    )
    return wanted, output.logits[0]


def _chunked(
    logits: Tensor, targets: Tensor, temperature: float, also: Also
) -> tuple[Tensor, Tensor]:
    """`_score`, a few rows at a time so that float32 copies stay small."""
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    if len(targets) <= rows:
        return _score(logits, targets, temperature, also)
    parts = [
        checkpoint(_score, *chunk, temperature, also, use_reentrant=False)
        for chunk in zip(logits.split(rows), targets.split(rows), strict=True)
    ]
    logprobs, second = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(second)


def _score(
    logits: Tensor, targets: Tensor, temperature: float, also: Also
) -> tuple[Tensor, Tensor]:
    """[n, V] and [n] to [n] and [n]: log p(target); H = logsumexp(z) - sum_v p_v z_v, or stats."""
    z = logits.float() / temperature
    total = torch.logsumexp(z, dim=-1)
    logprobs = z.gather(-1, targets[:, None]).squeeze(-1) - total
    if also == "nothing":
        return logprobs, torch.zeros_like(total)
    with torch.set_grad_enabled(also == "entropy_grad" and torch.is_grad_enabled()):
        if also == "stats":
            sum_of_squares = torch.exp(torch.logsumexp(2 * z, dim=-1) - 2 * total)
            return logprobs, 1 - 2 * logprobs.exp() + sum_of_squares
        return logprobs, total - (torch.softmax(z, dim=-1) * z).sum(-1)
