"""What a model says about packed tokens: log-probabilities and entropies, values, or scores."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from minirl.trainer.attention import Packing
from minirl.trainer.fsdp import with_weights
from minirl.types import MicroBatch

CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
"""Rows x vocabulary of the logits that exist at once: 16 MiB, near the size of a core's caches, or
512 MiB, enough rows to keep a GPU busy."""


Also = Literal["nothing", "entropy", "entropy_grad", "stats"]


def token_logprobs(
    model: nn.Module, batch: MicroBatch, temperature: float, *, also: Also = "nothing"
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [T], float32, in nats, of the tokens with response_mask 1, and one more.

    Both stand at the token itself and are 0 elsewhere. The distribution pi is softmax(logits /
    temperature) at the position before; the first token of a sequence has none, and gets 0.
    `also` says what the second is: nothing (0), the entropy of pi without or with its gradient, or
    the stats 1 - 2 pi(token) + sum_v pi_v^2 of `optimal_token_baseline`.

    Logits exist for a few rows at a time only, in the backward pass too, where they are computed
    again: the memory for them does not grow with the number of tokens.
    """
    wanted = _predicted(batch)

    def score(model: Any) -> tuple[Tensor, Tensor]:
        head = model.get_output_embeddings()
        hidden = _hidden(model, batch, wanted)
        divisor = temperature * logit_divisor(model.config)
        targets = batch.tokens[wanted]
        return _LinearScores.apply(hidden, head.weight, head.bias, targets, divisor, also)

    logprobs, second = with_weights(model, score)
    zeros = torch.zeros(batch.num_tokens, device=logprobs.device)
    return zeros.index_put((wanted,), logprobs), zeros.index_put((wanted,), second)


def token_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Values [T], float32, of a model with a value head, at the tokens with response_mask 1.

    The value at a token is that of the state in which it was sampled, so it is read at the position
    before, like its log-probability.
    """
    wanted = _predicted(batch)

    def value(model: Any) -> Tensor:
        return model.get_output_embeddings()(_hidden(model, batch, wanted))

    values = with_weights(model, value)[:, 0].float()
    return torch.zeros(batch.num_tokens, device=values.device).index_put((wanted,), values)


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


def logit_divisor(config: PretrainedConfig) -> float:
    """What the model divides its head's output by (Granite), or multiplies it with (Cohere)."""
    text = config.get_text_config()
    return getattr(text, "logits_scaling", 1.0) / getattr(text, "logit_scale", 1.0)


def _predicted(batch: MicroBatch) -> Tensor:
    """The tokens [n] that train and have one before them."""
    return ((batch.response_mask > 0) & (batch.positions > 0)).nonzero().squeeze(1)


def _hidden(model: Any, batch: MicroBatch, wanted: Tensor) -> Tensor:
    """The last layer's output [n, D] at the positions before the tokens `wanted`."""
    output = model.base_model(
        input_ids=batch.tokens[None],
        position_ids=batch.positions[None],
        use_cache=False,
        packing=Packing.of(batch.lengths, batch.tokens.device),
    )
    return output.last_hidden_state[0, wanted - 1]


class _LinearScores(torch.autograd.Function):
    """log p(target) [n], and H = logsumexp(z) - sum_v p_v z_v or the stats [n], where p =
    softmax(z) and z = (hidden [n, D] weight [V, D]^T + bias [V]) / divisor; all in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        divisor: float,
        also: Also,
    ) -> tuple[Tensor, Tensor]:
        zeros = hidden.new_zeros(len(targets), dtype=torch.float32)
        logprobs, second, totals = zeros, zeros.clone(), zeros.clone()
        for rows in _chunks(hidden, weight):
            z = _logits(hidden[rows], weight, bias, divisor)
            totals[rows] = total = torch.logsumexp(z, dim=-1)
            logprobs[rows] = z.gather(-1, targets[rows, None]).squeeze(-1) - total
            if also == "stats":
                p = z.sub_(total[:, None]).exp_()
                second[rows] = 1 - 2 * logprobs[rows].exp() + torch.linalg.vecdot(p, p)
            elif also != "nothing":
                p = (z - total[:, None]).exp_()
                second[rows] = total - torch.linalg.vecdot(p, z)
        ctx.save_for_backward(hidden, weight, bias, targets, totals, second)
        ctx.divisor, ctx.entropy_grad = divisor, also == "entropy_grad"
        if not ctx.entropy_grad:
            ctx.mark_non_differentiable(second)
        return logprobs, second

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d log p(target) / dz_v = [v = target] - p_v, dH / dz_v = -p_v (log p_v + H)."""
        hidden, weight, bias, targets, totals, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = (grad / ctx.divisor for grad in grads)
        grad_hidden = torch.empty_like(hidden)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]  # a frozen head needs neither
        # chunks add up in float32
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for rows in _chunks(hidden, weight):
            z = _logits(hidden[rows], weight, bias, ctx.divisor).sub_(totals[rows, None])
            slope = -of_logprobs[rows, None]
            if ctx.entropy_grad:
                shifted = z + entropies[rows, None]
                slope = shifted.mul_(-of_entropies[rows, None]).add_(slope)
            grad = z.exp_().mul_(slope)
            grad.scatter_add_(-1, targets[rows, None], of_logprobs[rows, None])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is None:
                continue
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[rows])
            else:
                grad_weight += grad.T @ hidden[rows]
        of_weights = (g if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias))
        return grad_hidden, *of_weights, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Rows whose logits fit into CHUNK_ELEMENTS."""
    size = max(1, CHUNK_ELEMENTS[hidden.device.type] // len(weight))
    return (slice(start, start + size) for start in range(0, len(hidden), size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, divisor: float) -> Tensor:
    return nn.functional.linear(hidden, weight, bias).float().div_(divisor)
