import pytest
import torch
from trainer_helpers import MODELS, make_batch
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, PhiConfig

from minirl.trainer import attention, logprobs
from minirl.trainer.logprobs import token_logprobs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS["qwen3"], attn_implementation=attention.NAME)


def one_by_one(model, batch, temperature):
    """The same by the textbook: each sequence alone, full log-softmax, shifted by one."""
    expected, entropies = [], []
    model.set_attn_implementation("eager")
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        logp = torch.log_softmax(model(tokens[None]).logits[0] / temperature, dim=-1)
        chosen = logp[:-1].gather(1, tokens[1:, None]).squeeze(1)
        expected.append(torch.cat([torch.zeros(1), chosen]))
        entropy = -(logp.exp() * logp).sum(-1)[:-1]
        entropies.append(torch.cat([torch.zeros(1), entropy]))
    model.set_attn_implementation(attention.NAME)
    return torch.cat(expected) * batch.response_mask, torch.cat(entropies) * batch.response_mask


@pytest.mark.parametrize("chunk", [2**26, 7 * 101, 1])
def test_equals_one_by_one(model, chunk, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {"cpu": chunk})
    batch = make_batch()
    expected, expected_entropy = one_by_one(model, batch, 0.7)
    got, entropy = token_logprobs(model, batch, 0.7, also="entropy_grad")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)

    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    mine = torch.autograd.grad(((got + 0.3 * entropy) * weights).sum(), parameters)
    theirs = torch.autograd.grad(((expected + 0.3 * expected_entropy) * weights).sum(), parameters)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_logits_exist_for_a_chunk_of_the_predicting_positions(model, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {"cpu": 7 * 101})
    rows, compute = [], logprobs._logits

    def recorded(hidden, *args):
        rows.append(len(hidden))
        return compute(hidden, *args)

    monkeypatch.setattr(logprobs, "_logits", recorded)
    batch = make_batch()
    n = int(batch.response_mask.sum())
    got, _ = token_logprobs(model, batch, 1.0)
    assert max(rows) == 7 and sum(rows) == n
    torch.autograd.grad(got.sum(), list(model.parameters()))
    assert max(rows) == 7 and sum(rows) == 2 * n


SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WITH_MORE_AFTER_THE_HEAD = [
    GraniteConfig(**SIZES, logits_scaling=8.0),
    CohereConfig(**SIZES, logit_scale=0.25),
    PhiConfig(**SIZES),  # a bias
]


@pytest.mark.parametrize("config", WITH_MORE_AFTER_THE_HEAD, ids=lambda c: c.model_type)
def test_what_a_model_does_to_its_logits_is_done(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = make_batch()
    expected, _ = one_by_one(model, batch, 0.7)
    got, _ = token_logprobs(model, batch, 0.7)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    parameters = list(model.parameters())
    mine = torch.autograd.grad(got.sum(), parameters)
    theirs = torch.autograd.grad(expected.sum(), parameters)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * float(b.abs().max()) + 1e-5, rtol=1e-3)


def test_nothing_to_train_has_a_gradient_of_zeros(model):
    batch = make_batch(num_groups=1)
    batch.response_mask = torch.zeros_like(batch.response_mask)
    got, _ = token_logprobs(model, batch, 1.0)
    got.sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    model.zero_grad()


def test_stats_are_the_expected_square_of_the_score(model):
    batch = make_batch()
    _, stats = token_logprobs(model, batch, 0.7, also="stats")
    model.set_attn_implementation("eager")
    expected = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        p = torch.softmax(model(tokens[None]).logits[0] / 0.7, dim=-1)[:-1]
        chosen = p.gather(1, tokens[1:, None]).squeeze(1)
        expected += [torch.zeros(1), 1 - 2 * chosen + p.square().sum(-1)]
    model.set_attn_implementation(attention.NAME)
    torch.testing.assert_close(
        stats, torch.cat(expected) * batch.response_mask, atol=1e-5, rtol=1e-5
    )
