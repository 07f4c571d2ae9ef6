import math
from dataclasses import replace

import pytest
import torch
from trainer_helpers import alone, make_batch, make_config, save_model

from minirl.config import ConfigError, OptimConfig, PolicyLossConfig, RefConfig
from minirl.trainer import policy
from minirl.trainer.policy import PolicyTrainer, ReferencePolicy, loss_options
from minirl.trainer.update import learning_rate

NO_CLIP = 1e9  # of the gradient, to compare gradients as they are


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def world(folder):
    with alone(make_config(folder)) as world:
        yield world


def prepared(trainer):
    batch = make_batch()
    batch.old_logprobs = trainer.compute_logprobs(batch) - 0.1 * batch.response_mask
    batch.ref_logprobs = batch.old_logprobs + 0.2 * batch.response_mask
    return batch


def captured_gradients(trainer):
    """The gradient of every optimizer step, as the optimizer sees it."""
    steps = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: steps.append([p.grad.clone() for p in trainer.model.parameters()])
    )
    return steps


@pytest.mark.parametrize(
    "mode",
    [
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ],
)
def test_gradient_does_not_depend_on_the_cut(folder, world, mode):
    results = []
    for max_tokens in (1, 50, 10_000):
        config = make_config(
            folder,
            max_tokens_per_micro_batch=max_tokens,
            loss_agg_mode=mode,
            use_kl_loss=False,
            entropy_coeff=0.01,
            grad_clip=NO_CLIP,
        )
        trainer = PolicyTrainer(config, world)
        steps = captured_gradients(trainer)
        metrics = trainer.update(prepared(trainer))
        assert metrics["actor/num_updates"] == len(steps) == 2
        results.append((steps, metrics))
    for steps, metrics in results[1:]:
        assert metrics == pytest.approx(results[0][1], rel=1e-5, abs=1e-7)
        for mine, first in zip(steps, results[0][0], strict=True):
            for a, b in zip(mine, first, strict=True):
                torch.testing.assert_close(a, b, atol=1e-5 * float(b.abs().max()), rtol=1e-5)


def test_on_policy_gradient_is_the_plain_policy_gradient(folder, world):
    """At ratio 1 PPO's gradient is that of -A logp, here by the textbook in one dense pass."""
    config = make_config(folder, ppo_mini_batch_size=4, grad_clip=NO_CLIP)
    trainer = PolicyTrainer(config, world)
    steps = captured_gradients(trainer)
    batch = make_batch()
    batch.old_logprobs = trainer.compute_logprobs(batch)
    trainer.model.set_attn_implementation("eager")
    logp = [
        torch.log_softmax(trainer.model(t[None]).logits[0, :-1], -1).gather(1, t[1:, None])[:, 0]
        for t in batch.tokens.split(batch.lengths.tolist())
    ]
    logp = torch.cat([torch.cat([torch.zeros(1), x]) for x in logp])
    loss = -(logp * batch.advantages * batch.response_mask).sum() / batch.response_mask.sum()
    expected = torch.autograd.grad(loss, list(trainer.model.parameters()))
    trainer.model.set_attn_implementation("minirl_packed")
    metrics = trainer.update(batch)
    for a, b in zip(steps[0], expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    norm = torch.stack([g.norm() for g in expected]).norm()
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)


def test_one_update_of_the_whole_batch_needs_no_old_logprobs(folder, world):
    """It sets them, the same as a pass of their own would, whatever the micro-batches."""
    results = []
    for given in (True, False):
        trainer = PolicyTrainer(make_config(folder, ppo_mini_batch_size=4), world)
        steps, batch = captured_gradients(trainer), make_batch()
        batch.response_mask[batch.sequence_ids == 1] = 0
        if given:
            batch.old_logprobs = trainer.compute_logprobs(batch)
        metrics = trainer.update(batch)
        results.append((steps, batch.old_logprobs, metrics))
    (first, old, metrics), (steps, own, their_metrics) = results
    assert len(steps) == 1 and int((own != 0).sum()) == int((batch.response_mask > 0).sum())
    torch.testing.assert_close(own, old, atol=1e-6, rtol=1e-6)
    for a, b in zip(steps[0], first[0], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert metrics == pytest.approx(their_metrics, rel=1e-5, abs=1e-6)
    with pytest.raises(ValueError, match="old_logprobs"):
        PolicyTrainer(make_config(folder, ppo_mini_batch_size=2), world).update(make_batch())


def test_masked_sequences_change_nothing(folder, world):
    config = make_config(folder, ppo_mini_batch_size=4, grad_clip=NO_CLIP)
    batch = make_batch()
    batch.response_mask[batch.sequence_ids % 2 == 0] = 0
    results = []
    for b in (batch, batch.select(list(range(1, batch.num_sequences, 2)))):
        trainer = PolicyTrainer(config, world)
        steps = captured_gradients(trainer)
        b.old_logprobs = trainer.compute_logprobs(b)
        trainer.update(b)
        results.append(steps[0])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_batch_without_a_trained_token_changes_no_weight(folder, world):
    trainer = PolicyTrainer(make_config(folder), world)
    batch = prepared(trainer)
    batch.response_mask.zero_()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    metrics = trainer.update(batch)
    assert metrics["actor/num_updates"] == 0
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_gradient_that_is_not_finite_is_not_applied(folder, world):
    trainer = PolicyTrainer(make_config(folder), world)
    batch = prepared(trainer)
    place = int(((batch.response_mask > 0) & (batch.sequence_ids == 0)).nonzero()[0])
    batch.advantages[place] = math.inf
    before = [p.detach().clone() for p in trainer.model.parameters()]
    metrics = trainer.update(batch)
    assert (metrics["actor/num_skipped_updates"], metrics["actor/num_updates"]) == (1, 1)
    assert trainer.bad_sequences == [0]
    assert math.isfinite(metrics["actor/grad_norm"])
    after = list(trainer.model.parameters())
    assert all(p.isfinite().all() for p in after)
    assert not all(map(torch.equal, before, after)), "the second mini-batch was to be applied"


def test_gradient_checkpointing_changes_nothing(folder, world):
    results = []
    for on in (False, True):
        config = make_config(folder)
        config = replace(config, model=replace(config.model, enable_gradient_checkpointing=on))
        trainer = PolicyTrainer(config, world)
        assert trainer.model.is_gradient_checkpointing is on
        trainer.update(prepared(trainer))
        results.append(list(trainer.model.parameters()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_kl_to_the_reference_pulls_back(folder, world):
    """With no advantage and a moved policy, steps on the KL term alone bring it down."""
    optim = OptimConfig(lr=1e-3)
    config = make_config(folder, use_kl_loss=False, ppo_epochs=3, optim=optim)
    trainer = PolicyTrainer(config, world)
    batch = prepared(trainer)
    reference = ReferencePolicy(replace(config, ref=RefConfig()), world)
    batch.ref_logprobs = reference.compute_logprobs(batch)
    assert not any(p.requires_grad for p in reference.model.parameters())
    trainer.update(batch)
    moved = (trainer.compute_logprobs(batch) - batch.ref_logprobs).abs().mean()
    actor = replace(config.actor, use_kl_loss=True, kl_loss_coef=1.0)
    trainer.config = replace(config, actor=actor, ref=RefConfig())
    batch.advantages = torch.zeros_like(batch.advantages)
    kl = [trainer.update(batch)["actor/kl_loss"] for _ in range(4)]
    assert kl[-1] < 0.5 * kl[0]
    assert (trainer.compute_logprobs(batch) - batch.ref_logprobs).abs().mean() < moved


def test_a_reference_that_breaks_where_nothing_trains_breaks_nothing(folder, world):
    """As at a token that rollout_rs has rejected."""
    trainer = PolicyTrainer(make_config(folder), world)
    batch = prepared(trainer)
    actor = replace(trainer.config.actor, use_kl_loss=True)
    trainer.config = replace(trainer.config, actor=actor, ref=RefConfig())
    batch.ref_logprobs[batch.response_mask == 0] = math.nan
    metrics = trainer.update(batch)
    assert metrics["actor/num_skipped_updates"] == 0 and math.isfinite(metrics["actor/kl_loss"])


def test_training_raises_the_probability_of_what_was_good(folder, world):
    trainer = PolicyTrainer(make_config(folder, optim=OptimConfig(lr=3e-3)), world)
    batch = prepared(trainer)
    batch.advantages = torch.where(batch.sequence_ids % 2 == 0, 1.0, -1.0) * batch.response_mask
    before = trainer.compute_logprobs(batch)
    batch.old_logprobs = before
    trainer.update(batch)
    change = trainer.compute_logprobs(batch) - before
    assert (change * batch.advantages).sum() > 0


def test_score_is_the_log_probability_of_each_token(folder, world):
    trainer = PolicyTrainer(make_config(folder), world)
    batch = make_batch().select([0])
    batch.response_mask = (batch.positions > 0).float()
    expected = trainer.compute_logprobs(batch)
    torch.testing.assert_close(torch.tensor(trainer.score(batch.tokens.tolist())), expected)


def test_the_decay_ends_at_the_last_step_of_a_run_that_warms_a_critic_up(folder, world):
    optim = OptimConfig(lr=1.0, lr_scheduler_type="linear", min_lr_ratio=0.1)
    config = make_config(folder, optim=optim)
    config = replace(config, trainer=replace(config.trainer, critic_warmup=4))
    trainer = PolicyTrainer(config, world, total_steps=7)
    batch = make_batch()
    batch.old_logprobs = trainer.compute_logprobs(batch)
    rates = [trainer.update(batch)["actor/lr"] for _ in range(5, 8)]
    assert rates == pytest.approx([1, 0.55, 0.1])


def test_learning_rate():
    optim = OptimConfig(lr=1.0, lr_warmup_steps=3, lr_scheduler_type="linear", min_lr_ratio=0.2)
    rates = [learning_rate(optim, step, 8) for step in range(8)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = OptimConfig(lr=1.0, lr_scheduler_type="cosine")
    assert [learning_rate(cosine, s, 3) for s in range(3)] == pytest.approx([1, 0.5, 0])
    with pytest.raises(ConfigError, match=r"lr_scheduler_type.*trainer\.total_training_steps"):
        learning_rate(cosine, 0, None)


def test_decay_is_on_matrices_only(folder, world):
    decayed, others = PolicyTrainer(make_config(folder), world).optimizer.param_groups
    assert decayed["weight_decay"] == 0.01 and others["weight_decay"] == 0.0
    assert {p.ndim for p in decayed["params"]} == {2} and {p.ndim for p in others["params"]} == {1}


def test_loss_options_come_from_actor_keys_and_options(folder):
    loss = PolicyLossConfig(loss_mode="vanilla", options={"clip_ratio_c": 5.0})
    actor = make_config(folder, clip_ratio_high=0.28, policy_loss=loss).actor
    assert loss_options(actor) == {
        "clip_ratio": 0.2,
        "clip_ratio_low": None,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 5.0,
    }


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (PolicyLossConfig(loss_mode="vanila"), "did you mean 'vanilla'"),
        (PolicyLossConfig(options={"clip_rato": 1}), "did you mean 'clip_ratio'"),
        (PolicyLossConfig(loss_mode="gspo"), "seq-mean-token-mean"),
    ],
)
def test_a_wrong_loss_is_refused_before_the_model_is_loaded(folder, loss, message):
    with pytest.raises(ConfigError, match=message):
        policy.check_config(make_config(folder, policy_loss=loss))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_over_the_mini_batch_whatever_the_cut(folder, world, name):
    options = {"clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.01, "clip_cov_ub": 99.0}}
    options["kl_cov"] = {"kl_cov_ratio": 0.1}
    loss = PolicyLossConfig(loss_mode=name, options=options[name])
    results = []
    for max_tokens in (1, 10_000):
        config = make_config(
            folder, max_tokens_per_micro_batch=max_tokens, policy_loss=loss, ppo_epochs=2
        )
        trainer = PolicyTrainer(config, world)
        steps = captured_gradients(trainer)
        batch = prepared(trainer)
        batch.old_logprobs = trainer.compute_logprobs(batch)
        results.append((steps, trainer.update(batch)))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4, abs=1e-6)
    share = {"clip_cov": "actor/pg_clipfrac", "kl_cov": "actor/kl_cov_frac"}[name]
    assert results[0][1][share] == pytest.approx(0.1, abs=0.02)
    for mine, theirs in zip(results[0][0], results[1][0], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_the_choice_is_the_trainers(folder):
    loss = PolicyLossConfig(loss_mode="clip_cov", options={"seed": 3})
    with pytest.raises(ConfigError, match=r"options\.seed comes from trainer\.seed"):
        policy.check_config(make_config(folder, policy_loss=loss))


def test_epochs_keep_the_old_log_probabilities(folder, world):
    """Two epochs of two mini-batches: four steps, and from the second on the ratio is not 1."""
    config = make_config(folder, ppo_epochs=2, optim=OptimConfig(lr=1e-3))
    trainer = PolicyTrainer(config, world)
    batch = make_batch()
    batch.old_logprobs = trainer.compute_logprobs(batch)
    old = batch.old_logprobs.clone()
    metrics = trainer.update(batch)
    assert metrics["actor/num_updates"] == 4 and metrics["actor/ppo_kl"] != 0
    assert torch.equal(batch.old_logprobs, old)
    once = PolicyTrainer(make_config(folder, optim=OptimConfig(lr=1e-3)), world)
    for _ in range(2):
        once.update(batch)
    assert all(map(torch.equal, once.model.parameters(), trainer.model.parameters()))


def test_an_entropy_bonus_raises_the_entropy(folder, world):
    config = make_config(folder, entropy_coeff=1.0, optim=OptimConfig(lr=1e-3))
    trainer = PolicyTrainer(config, world)
    batch = prepared(trainer)
    batch.advantages = torch.zeros_like(batch.advantages)
    entropies = [trainer.update(batch)["actor/entropy"] for _ in range(4)]
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0] + 0.01


def test_importance_weights_scale_the_gradient(folder, world):
    gradients = []
    for weight in (None, 0.5):
        config = make_config(folder, ppo_mini_batch_size=4, grad_clip=NO_CLIP)
        trainer = PolicyTrainer(config, world)
        steps = captured_gradients(trainer)
        batch = prepared(trainer)
        batch.rollout_is_weights = None if weight is None else weight * batch.response_mask
        trainer.update(batch)
        gradients.append(steps[0])
    for whole, half in zip(*gradients, strict=True):
        torch.testing.assert_close(0.5 * whole, half, atol=1e-7, rtol=1e-4)
