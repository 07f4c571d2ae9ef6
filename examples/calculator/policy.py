"""The start policy: a Qwen3 of 0.7 million parameters and its tokenizer, warmed up for seconds."""

import re
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.calculator.task import Messages, draw_conversation, draw_questions, recite

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
MAX_VOCAB_SIZE = 640
MAX_LENGTH = 1024
BATCH_SIZE = 32
BATCHES_PER_DRAW = 10
MATRIX_LR = 0.03
OTHER_LR = 6e-3


def build_tokenizer(tools: list[Any], random: Random) -> PreTrainedTokenizerFast:
    """Byte-level BPE over rendered conversations, so that what never changes is few tokens.

    Digits stay single and a line ends a token; nothing else is split, so a token may span words.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    questions = draw_questions(random, set())
    conversations = [draw_conversation(next(questions), random) for _ in range(2000)]
    texts = _wrap(bpe).apply_chat_template(conversations, tools=tools, tokenize=False)
    separators = "|".join(map(re.escape, SPECIAL_TOKENS + MARKERS))
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE - len(MARKERS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(
        (part for text in texts for part in re.split(separators, text)), trainer
    )
    bpe.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return _wrap(bpe)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 in float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tools: list[Any],
    random: Random,
    *,
    num_steps: int,
    held_out: set[str],
) -> None:
    """Supervised steps on conversations of mixed habits, after some that only recite.

    Always the same number of steps, so that the same seed gives the same weights on a machine.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [
        Muon(matrices, lr=MATRIX_LR),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: _schedule(step / num_steps))
        for o in optimizers
    ]
    batches: list[list[list[int]]] = []
    questions = draw_questions(random, set(held_out))
    for step in range(num_steps):
        if not batches:
            conversations = []
            for _ in range(BATCHES_PER_DRAW * BATCH_SIZE):
                teach = (
                    recite if random.random() < 0.9 - 1.8 * step / num_steps else draw_conversation
                )
                conversations.append(teach(next(questions), random))
            batches = _batch(conversations, tokenizer, tools, random)
        loss = _loss(model, tokenizer, batches.pop())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan 2024): copying is learned in a fifth of AdamW's steps.

    torch.optim.Muon does the same in bfloat16, which costs more than the step itself on a CPU.
    """

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        """One update; matrices of the same shape are orthogonalised together."""
        for group in self.param_groups:
            updates: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                nesterov = p.grad.lerp(buffer, group["momentum"])
                updates.setdefault(p.shape, []).append((p, nesterov))
            for (rows, columns), pairs in updates.items():
                directions = _orthogonalise(torch.stack([update for _, update in pairs]))
                scale = max(1.0, rows / columns) ** 0.5
                for (p, _), direction in zip(pairs, directions, strict=True):
                    p.add_(direction, alpha=-group["lr"] * scale)


def _orthogonalise(matrices: Tensor) -> Tensor:
    """Singular values to about 1 by five Newton-Schulz steps; [N, rows, columns]."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if tall := x.size(-2) > x.size(-1):
        x = x.mT
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def _wrap(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=Path(__file__).with_name("chat_template.jinja").read_text(),
        model_max_length=MAX_LENGTH,
    )


def _schedule(progress: float) -> float:
    """Factor of the learning rate: up over 15 %, flat to one half, then down to a tenth."""
    return min(1.0, progress / 0.15 + 0.05, max(0.1, 2 * (1 - progress)))


def _batch(
    conversations: list[Messages],
    tokenizer: PreTrainedTokenizerFast,
    tools: list[Any],
    random: Random,
) -> list[list[list[int]]]:
    """Batches of token rows, alike in length within a batch, in a random order."""
    texts = tokenizer.apply_chat_template(conversations, tools=tools, tokenize=False)
    rows = sorted(tokenizer(texts, add_special_tokens=False)["input_ids"], key=len)
    batches = [rows[start : start + BATCH_SIZE] for start in range(0, len(rows), BATCH_SIZE)]
    random.shuffle(batches)
    return batches


def _loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[list[int]]
) -> Tensor:
    """Mean over the tokens that the assistant writes, `<|im_end|>` included."""
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    targets = _assistant_mask(tokenizer, tokens)[:, 1:]
    # Padding is on the right, so the causal mask alone keeps it out.
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    return F.cross_entropy(model.lm_head(hidden[targets]), tokens[:, 1:][targets])


def _assistant_mask(tokenizer: PreTrainedTokenizerFast, tokens: Tensor) -> Tensor:
    """True from after the header `<|im_start|>assistant\\n` up to and with `<|im_end|>`; [B, T]."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    header = tokenizer.encode("assistant\n", add_special_tokens=False)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(tokens.tolist()):
        for position, token in enumerate(ids):
            first = position + 1 + len(header)
            if token == start and ids[position + 1 : first] == header:
                mask[row, first : ids.index(end, first) + 1] = True
    return mask
