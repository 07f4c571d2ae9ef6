import importlib

import pytest
import torch
from trainer_helpers import MODELS, VOCAB_SIZE
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, Qwen3Config

from minirl.config import ConfigError
from minirl.trainer import attention
from minirl.trainer.attention import Packing, check_attention

LENGTHS = [5, 17, 1, 16, 13, 40, 17]


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_packed_equals_one_by_one(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation=attention.NAME)
    tokens = torch.randint(0, VOCAB_SIZE, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    packing = Packing.of(torch.tensor(LENGTHS), tokens.device)
    packed = model(tokens, position_ids=positions, packing=packing).logits
    packed.square().sum().backward()
    packed_grads = {n: p.grad.clone() for n, p in model.named_parameters()}

    model.zero_grad()
    model.set_attn_implementation("eager")
    alone = torch.cat([model(part).logits for part in tokens.split(LENGTHS, dim=1)], dim=1)
    alone.square().sum().backward()
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed_grads[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_padding_is_bounded():
    packing = Packing.of(torch.tensor([100, 1, 50, 99, 49, 2, 1]), torch.device("cpu"))
    rows, order = packing.rows
    padded = sum(group.num_rows * group.length for group in rows)
    assert padded <= 302 / attention.SHORTEST_IN_ROW
    assert sorted(order.tolist()) == list(range(302))


def test_what_is_only_called_flash_attn_is_not_taken_for_it(tmp_path, monkeypatch):
    """flash-attn-4 has a folder of that name, and another interface in it."""
    attention.varlen_kernel.cache_clear()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert attention.varlen_kernel("cuda", torch.bfloat16) is attention._torch_varlen
    (tmp_path / "flash_attn" / "__init__.py").touch()
    importlib.invalidate_caches()
    attention.varlen_kernel.cache_clear()
    assert attention.varlen_kernel("cuda", torch.bfloat16) is attention._flash_attn
    attention.varlen_kernel.cache_clear()


def test_gradcheck_of_the_packed_function():
    """In float64 by finite differences, with two query heads per key head."""
    torch.manual_seed(0)
    packing = Packing.of(torch.tensor([2, 1, 3]), torch.device("cpu"))
    q = torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def attend(q, k, v):
        return attention.packed_attention(torch.nn.Module(), q, k, v, None, packing=packing)[0]

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_what_it_cannot_do_is_refused():
    for config in (
        MistralConfig(sliding_window=16),
        Gemma2Config(),
        Qwen3Config(use_sliding_window=True, sliding_window=16, max_window_layers=1),
    ):
        with pytest.raises(
            ConfigError, match=r"^model\.path: this .* sequences of up to 64 tokens"
        ):
            check_attention(config, 64)


def test_a_window_longer_than_every_sequence_is_fine():
    assert refusal(MistralConfig(sliding_window=4096), 4097) is not None
    assert refusal(MistralConfig(sliding_window=4096), 4096) is None
    assert refusal(MistralConfig(sliding_window=None), 9999) is None
    assert refusal(Qwen3Config(), 9999) is None


def refusal(config, max_length):
    try:
        check_attention(config, max_length)
    except ConfigError as error:
        return str(error)
