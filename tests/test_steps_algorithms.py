"""Every algorithm through `train`: the real path, with the policy itself as the engine."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_engine import PolicyServer
from transformers import AutoModelForCausalLM

from minirl import check_logprobs, credit
from minirl.algorithms import ADV_ESTIMATORS, POLICY_LOSSES, requirements
from minirl.chat import ChatBuilder
from minirl.config import ConfigError, load_config
from minirl.hints import with_hint
from minirl.launch import SOCKETS
from minirl.ranks import first_cause
from minirl.rollout import manager
from minirl.steps import BadStepsError
from minirl.testing import byte_tokenizer, tiny_model
from minirl.tracking import read_metrics
from minirl.train import main
from minirl.trainer.model import LanguageModel

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    low = sum(ord(c) < 100 for c in solution_str) / 8
    return {"score": low, "vowels": solution_str.count("e") / 8, "length": len(solution_str) / 8}


def right_or_wrong(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(ord, solution_str)) % 3 == 0)


def always_right(data_source, solution_str, ground_truth, extra_info):
    return 1.0


def number(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("e") / 8
"""
NUM_STEPS = 3


@pytest.fixture(scope="module")
def project(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("project")
    tiny_model(folder / "model", num_layers=1, hidden_size=32, head_dim=8)
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(24):
            row = {
                "prompt": [{"role": "user", "content": f"{i} + {i}?"}],
                "data_source": "letters",
                "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            }
            file.write(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.yaml").write_text(f"""
model: {{path: {folder}/model, dtype: float32}}
data:
  train_files: [{folder}/rows.jsonl]
  train_batch_size: 2
  max_prompt_length: 64
actor: {{optim: {{lr: 0.001}}, max_tokens_per_micro_batch: 256}}
rollout:
  name: policy_engine:PolicyServer
  n: 3
  response_length: 8
  sync_check: {{max_logprob_diff: 1.0e-4, probe_length: 4}}
reward: {{custom_reward_function: {{path: {folder}/reward.py}}}}
trainer:
  default_local_dir: {folder}/runs
  device: cpu
  val_before_train: false
  total_training_steps: {NUM_STEPS}
  logger: [jsonl]
""")
    return folder


async def train(project: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Run it; the metrics of its steps, from the first."""
    PolicyServer.requests.clear()
    arguments = [f"{project}/config.yaml", f"trainer.experiment_name={name}", *overrides]
    try:
        await main(load_config(arguments))
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    finally:
        SOCKETS.remove()
    return read_metrics(project / "runs" / name)[1:]


def trajectories(project: Path, name: str, step: int, split: str = "train") -> list[dict[str, Any]]:
    path = project / "runs" / name / "trajectories" / f"step_{step:06d}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


GAE = ("algorithm.adv_estimator=gae", "critic={}", "critic.optim.lr=0.01")


async def test_gae_trains_policy_and_critic(project: Path) -> None:
    rows = await train(
        project,
        "gae",
        *GAE,
        "rollout.n=1",
        "data.train_batch_size=8",
        "trainer.critic_warmup=1",
        "trainer.total_training_steps=12",
    )
    assert "actor/pg_loss" not in rows[0] and "actor/pg_loss" in rows[1]
    names = {"critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/grad_norm"}
    assert names <= set(rows[0]) and {"timing_s/values", "timing_s/update_critic"} <= set(rows[0])
    assert rows[0]["critic/values/mean"] == 0
    values, returns = (
        sum(row[f"critic/{name}/mean"] for row in rows[-4:]) / 4 for name in ("values", "returns")
    )
    assert returns > 0.2 and values == pytest.approx(returns, abs=0.15)


async def test_check_logprobs_compares_engine_and_trainer(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config([f"{project}/config.yaml", f"data.val_files=[{project}/rows.jsonl]"])
    try:
        await check_logprobs.main(config)
        table = capsys.readouterr().out
        assert re.search(r"all +│ 4\d\d +│ \d\.\d+e-0[6-9]", table) and "first_token" in table
        compute = LanguageModel.compute_logprobs
        monkeypatch.setattr(LanguageModel, "compute_logprobs", lambda *a: compute(*a) + 3e-4)
        with pytest.raises(ExceptionGroup) as caught:
            await check_logprobs.main(config)
        words = r"0\.0003 is above rollout\.sync_check\.max_logprob_diff=0\.0001"
        assert caught.group_contains(check_logprobs.DisagreementError, match=words)
    finally:
        SOCKETS.remove()


SECTIONS = {"gae": ["critic={}"], "cpo": ["algorithm.cpo={}"]}


@pytest.mark.parametrize("name", list(ADV_ESTIMATORS))
async def test_every_estimator_trains(project: Path, name: str) -> None:
    [row] = await train(
        project, f"adv_{name}", f"algorithm.adv_estimator={name}", *SECTIONS.get(name, []),
        "trainer.total_training_steps=1",
    )  # fmt: skip
    assert row["actor/num_updates"] == 1 and row["actor/grad_norm"] > 0
    assert row["training/bad_step"] == 0


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
async def test_every_loss_trains(project: Path, name: str) -> None:
    modes = requirements(POLICY_LOSSES.find(name)).agg_modes or ("token-mean",)
    [row] = await train(
        project, f"loss_{name}", f"actor.policy_loss.loss_mode={name}", "actor.ppo_epochs=2",
        "actor.ppo_mini_batch_size=1", f"actor.loss_agg_mode={modes[0]}",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    assert row["actor/num_updates"] == 4 and row["actor/grad_norm"] > 0
    assert row["actor/ppo_kl"] != 0, "the ratio moves between the mini-batches"


async def test_remax_compares_with_one_greedy_rollout_per_prompt(project: Path) -> None:
    [row] = await train(
        project, "remax", "algorithm.adv_estimator=remax", "trainer.total_training_steps=1"
    )
    _probe, *asked = PolicyServer.requests[:-1]  # the last one is the probe of the sync behind it
    assert sum(params["temperature"] == 0 for params in asked) == 2
    assert len(asked) == 2 * (3 + 1)
    written = trajectories(project, "remax", 1)
    greedy = {t["uid"]: t["reward"] for t in written if t["sample_index"] == -1}
    sampled = [t for t in written if t["sample_index"] >= 0]
    per_token = [t["reward"] - greedy[t["uid"]] for t in sampled for _ in t["response_ids"]]
    expected = sum(per_token) / len(per_token)
    assert row["critic/advantages/mean"] == pytest.approx(expected, abs=1e-5)
    assert row["critic/score/mean"] == pytest.approx(sum(t["reward"] for t in sampled) / 6)


async def test_gdpo_takes_the_components_by_name_and_says_what_is_missing(project: Path) -> None:
    gdpo = ("algorithm.adv_estimator=gdpo", "trainer.total_training_steps=1")
    names = "algorithm.options={gdpo_reward_keys: [score_, vowels]}"
    with pytest.raises(
        ValueError, match=r"trajectory 0 of prompt '0-.*no reward component 'score_'"
    ):
        await train(project, "gdpo_missing", *gdpo, names)
    with pytest.raises(ValueError, match="the reward function returns a single number"):
        await train(project, "gdpo_single", *gdpo, "reward.custom_reward_function.name=number")
    options = "algorithm.options={gdpo_reward_keys: [%s, vowels], gdpo_reward_weights: [%d, 1]}"
    norms = [
        (await train(project, name, *gdpo, options % keys))[0]["critic/advantages/max"]
        for name, keys in (("a", ("length", 0)), ("b", ("reward", 5)))
    ]
    assert norms[0] != pytest.approx(norms[1])


def spy_on_estimate(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The (batch, groups) of every step, as the estimator gets them."""
    seen: list[Any] = []
    estimate = credit.estimate

    def spy(batch: Any, groups: Any, algorithm: Any) -> Any:
        result = estimate(batch, groups, algorithm)
        seen.append((batch, groups, result[0]))
        return result

    monkeypatch.setattr(credit, "estimate", spy)
    return seen


async def test_cpo_scores_the_same_answer_behind_a_hinted_prompt(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spy_on_estimate(monkeypatch)
    await train(
        project, "cpo", "algorithm.adv_estimator=cpo", "algorithm.cpo={difficulty: 0.7}",
        "data.train_batch_size=6", "trainer.total_training_steps=1",
    )  # fmt: skip
    [(batch, groups, advantages)] = seen
    model = AutoModelForCausalLM.from_pretrained(project / "model")
    chat = ChatBuilder(byte_tokenizer())
    starts = (torch.cumsum(batch.lengths, 0) - batch.lengths + batch.prompt_lengths).tolist()
    is_hard, members = [], [(g, t) for g in groups for t in g.trajectories]
    for start, (group, t) in zip(starts, members, strict=True):
        hard = 1 - sum(x.reward for x in group.trajectories) / 3 > 0.7
        remarks = {
            "An earlier attempt was cut off before it had answered: be brief."
            if x.termination != "stop"
            else "An earlier attempt gave a wrong answer, or none in the form that is asked for."
            for x in group.trajectories
        }
        truth = group.row["reward_model"]["ground_truth"]
        hint = " ".join([f"Hint: the correct answer is {truth}.", *remarks])
        messages = group.row["prompt"]
        prompt = chat.prompt(with_hint(messages, hint) if hard else messages)
        logits = model(torch.tensor([prompt + t.response_ids])).logits[0]
        logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        expected = logp.gather(1, torch.tensor(t.response_ids)[:, None])[:, 0]
        place = slice(start, start + len(t.response_ids))
        torch.testing.assert_close(batch.hinted_logprobs[place], expected, atol=1e-5, rtol=1e-5)
        is_hard.append(hard)
        flat = advantages[place].max() - advantages[place].min() < 1e-6
        assert bool(flat) == (not hard or bool(advantages[place].abs().max() == 0))
    assert 0 < sum(is_hard) < len(is_hard)


async def test_kl_in_the_reward_and_the_loss(project: Path) -> None:
    rows = await train(
        project, "kl", "ref={}", "actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=low_var_kl", "actor.optim.lr=0.01",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.5, target_kl: 1.0e-4, horizon: 12}",
    )  # fmt: skip
    coefficients = [row["actor/reward_kl_penalty_coeff"] for row in rows]
    assert rows[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["critic/rewards/mean"] == pytest.approx(rows[0]["critic/score/mean"], abs=1e-5)
    assert coefficients[1] == pytest.approx(0.5 * (1 - 0.2 * 6 / 12))  # below the target
    assert coefficients[2] == pytest.approx(coefficients[1] * (1 + 0.2 * 6 / 12))  # above it
    for row in rows[1:]:
        assert row["actor/reward_kl_penalty"] > 1e-4 and row["actor/kl_loss"] > 0
        assert row["critic/rewards/mean"] < row["critic/score/mean"]


async def test_a_resumed_run_goes_on_as_if_nothing_had_happened(project: Path) -> None:
    """Critic, controller and data position, which dynamic sampling moves by whole batches."""
    options = (
        *GAE, "ref={}", "algorithm.use_kl_in_reward=true", "trainer.save_freq=2",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.5, target_kl: 1.0e-4, horizon: 12}",
        "algorithm.filter_groups={}", "reward.custom_reward_function.name=right_or_wrong",
        "actor.optim.lr=0.01",
    )  # fmt: skip
    whole = await train(project, "whole", *options, "trainer.total_training_steps=4")
    await train(project, "parts", *options, "trainer.total_training_steps=2")
    parts = await train(project, "parts", *options, "trainer.total_training_steps=4")
    for mine, theirs in zip(parts, whole, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if name.split("/")[0] in ("actor", "critic", "training", "response_length"):
                assert mine[name] == pytest.approx(theirs[name], abs=1e-5), name
    assert sum(row["training/num_gen_batches"] for row in whole) > len(whole)


async def test_filtered_groups_are_replaced_by_new_prompts(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, lags = spy_on_estimate(monkeypatch), iter(range(100))
    measure = manager._rollout_metrics
    monkeypatch.setattr(manager, "_rollout_metrics", lambda *a: measure(*a[:2], next(lags)))
    options = ("reward.custom_reward_function.name=right_or_wrong", "trainer.save_freq=3")
    rows = await train(project, "filtered", "algorithm.filter_groups={}", *options)
    for _, groups, _ in seen:
        assert len(groups) == 2
        assert all(len({t.reward for t in group.trajectories}) == 2 for group in groups)
    drawn = [int(row["training/num_gen_batches"]) for row in rows]
    assert max(drawn) > 1
    requests = [row["rollout/requests/server_0"] for row in rows]
    assert requests == [2 * 3 * number for number in drawn]
    last = [row["rollout/loop_lag_max_s"] for row in rows]  # of each step, which is its longest
    assert last == [sum(drawn[: step + 1]) - 1 for step in range(3)]
    meta = project / "runs" / "filtered" / "checkpoints" / "step_000003" / "meta.json"
    position = json.loads(meta.read_text())["extra"]["data"]
    assert position["epoch"] * 12 + position["batch"] == sum(drawn)
    uids = [t["uid"] for step in (1, 2, 3) for t in trajectories(project, "filtered", step)]
    assert len(set(uids)) * 3 == len(uids) == 2 * 3 * sum(drawn)


async def test_without_a_group_to_learn_from_a_step_changes_nothing(project: Path) -> None:
    rows = await train(
        project, "empty", "algorithm.filter_groups={max_num_gen_batches: 2}",
        "reward.custom_reward_function.name=always_right", *GAE,
    )  # fmt: skip
    for row in rows:
        assert (row["training/num_gen_batches"], row["actor/num_updates"]) == (2, 0)
        assert row["critic/score/mean"] == 1


async def test_correction_weights_and_bypass(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spy_on_estimate(monkeypatch)
    weighted = await train(
        project, "weighted",
        "algorithm.rollout_correction={rollout_is: token, rollout_rs: token_k1, "
        "rollout_rs_threshold: 2.0}",
    )  # fmt: skip
    assert weighted[0]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
    assert weighted[0]["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert seen[0][0].rollout_is_weights is not None
    bypass = await train(
        project, "bypass", "algorithm.rollout_correction={bypass_mode: true}", "actor.ppo_epochs=2"
    )
    assert torch.equal(seen[-1][0].old_logprobs, seen[-1][0].rollout_logprobs)
    assert bypass[0]["critic/score/mean"] == weighted[0]["critic/score/mean"]
    speeds = [
        {name for name in row if name.startswith("perf/tokens_per_s/")}
        for row in (weighted[0], bypass[0])
    ]
    assert speeds[0] - speeds[1] == {"perf/tokens_per_s/old_log_prob"}  # no pass, no speed


PLANTED = """
import torch
from minirl.algorithms import compute_advantages, policy_loss

def nan_advantages(inputs):
    advantages, returns = compute_advantages("grpo", inputs)
    advantages[1, 0] = float("nan")
    return advantages, returns

steps = 0

def inf_advantage_at_first(inputs):
    global steps
    steps += 1
    advantages, returns = compute_advantages("grpo", inputs)
    if steps == 1:
        advantages[2] = float("inf")
    return advantages, returns

calls = 0

def inf_loss_at_first(inputs):
    global calls
    calls += 1
    loss, metrics = policy_loss("vanilla", inputs)
    if calls == 1:
        loss = torch.where(inputs.sequence_ids == 2, float("inf"), loss)
    return loss, metrics

def nan_gradient(inputs):
    return torch.sqrt(inputs.logprobs - inputs.logprobs), {}
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_nan.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "plant", "num_bad"),
    [
        ("bad_advantage", "algorithm.adv_estimator=planted_nan:nan_advantages", 1),
        ("bad_gradient", "actor.policy_loss.loss_mode=planted_nan:nan_gradient", 6),
    ],
)
async def test_bad_steps_are_not_applied_and_in_the_end_stop_the_run(
    project: Path, planted: None, name: str, plant: str, num_bad: int
) -> None:
    with pytest.raises(BadStepsError, match=r"step 2: 2 steps in a row \(trainer\.max_bad_steps\)"):
        await train(project, name, plant, "trainer.max_bad_steps=2", "actor.ppo_mini_batch_size=1")
    run_dir = project / "runs" / name
    rows = read_metrics(run_dir)[1:]
    assert [row["training/bad_step"] for row in rows] == [1, 1]
    for step in (1, 2):
        bad = trajectories(project, name, step, "bad")
        everything = trajectories(project, name, step)
        assert len(bad) == num_bad and all(
            any(t["response_ids"] == b["response_ids"] for t in everything) for b in bad
        )
    assert (run_dir / "checkpoints" / "step_000002" / "meta.json").exists()
    # not even by the mini-batches whose own advantages are fine
    assert [row.get("actor/num_updates", 0) for row in rows] == [0, 0]
    assert {"perf/tflops/update_actor" in row for row in rows} == {name == "bad_gradient"}
    assert all(math.isfinite(row["critic/score/mean"]) for row in rows)


@pytest.mark.parametrize(
    ("name", "plant", "num_skipped"),
    [
        ("bad_loss", "actor.policy_loss.loss_mode=planted_nan:inf_loss_at_first", [1, 0, 0]),
        ("bad_first", "algorithm.adv_estimator=planted_nan:inf_advantage_at_first", [None, 0, 0]),
    ],
)
async def test_one_bad_step_is_counted_and_forgotten(
    project: Path, planted: None, name: str, plant: str, num_skipped: list[int | None]
) -> None:
    rows = await train(
        project, name, plant, "trainer.max_bad_steps=2", "actor.max_tokens_per_micro_batch=1024",
        "actor.optim.lr_scheduler_type=linear",
    )  # fmt: skip
    assert [row["training/bad_step"] for row in rows] == [1, 0, 0]
    assert [row.get("actor/num_skipped_updates") for row in rows] == num_skipped
    third = trajectories(project, name, 1)[2]["response_ids"]
    assert [t["response_ids"] for t in trajectories(project, name, 1, "bad")] == [third]
    assert [row["actor/lr"] for row in rows[1:]] == pytest.approx([0.0005, 0])  # as of any step


async def test_truncated_sampling_reaches_the_engine(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.top_p: got 0\.9; .*allow_truncated_sampling"):
        await train(project, "truncated", "rollout.top_p=0.9")
    await train(
        project, "truncated", "rollout.top_p=0.9", "rollout.allow_truncated_sampling=true",
        "trainer.total_training_steps=1", "rollout.min_p=0.05",
    )  # fmt: skip
    sampled = [params for params in PolicyServer.requests if "top_p" in params]
    assert len(sampled) == 6 and {params["min_p"] for params in sampled} == {0.05}


async def test_two_ranks_take_the_steps_of_one(project: Path) -> None:
    """Hints, reward components and greedy rewards are rank 0's; every rank needs their result."""
    options = [
        "algorithm.adv_estimator=cpo", "algorithm.cpo={difficulty: 0.7}", "ref={}",
        "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.filter_groups={}", "actor.policy_loss.loss_mode=clip_cov",
        "actor.policy_loss.options={clip_cov_ratio: 0.1, clip_cov_lb: 0.001}",
        "actor.ppo_mini_batch_size=1", "actor.optim.eps=1.0e-4",
    ]  # fmt: skip
    one = await train(project, "one_rank", *options)
    run_dir = project / "runs" / "two_ranks"
    on_two_ranks(
        "minirl.train", f"{project}/config.yaml", "trainer.experiment_name=two_ranks",
        "trainer.deterministic=true", *options,
    )  # fmt: skip
    two = read_metrics(run_dir)[1:]
    assert sum(row["cpo/hinted_fraction"] for row in one) > 0
    for mine, theirs in zip(two, one, strict=True):
        for name in theirs:
            if name.split("/")[0] in ("actor", "critic", "cpo", "response_length"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    for rows, ranks in ((one, 1), (two, 2)):
        for row in rows:  # per rank, as verl has it per GPU
            done = row["perf/throughput"] * row["timing_s/step"] * ranks
            assert done == pytest.approx(row["perf/total_num_tokens"])
    printed = on_two_ranks("minirl.replay", str(run_dir), str(len(two)))
    assert f"{len(two)} steps, all of them the same to the last bit" in printed


def on_two_ranks(module: str, *arguments: str) -> str:
    """Run it; what it printed."""
    here = Path(__file__).parent
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": f"{here.parent}:{here}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
