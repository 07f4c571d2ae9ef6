"""examples/openai_agent over a real model: its framework, the engine, the trainer, to the gradient.

The model is tiny and has learned one conversation by heart, so that it calls the tool; it is
sampled all the same.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.calculator.prepare import read_tool_schemas
from minirl.chat import ChatBuilder
from minirl.config import Config, load_config
from minirl.run import open_run
from minirl.testing import tiny_model
from minirl.train import train

ROOT = Path(__file__).parents[2]
QUESTION = "What is 2 + 3?"
TEMPERATURE = 0.5
CALL = {"name": "calculator", "arguments": {"expression": "2 + 3"}}
BY_HEART: list[dict[str, Any]] = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "#### 5"},
]


def learn_by_heart(folder: Path) -> None:
    """Until the policy's turns of the conversation are what it mostly says."""
    chat = ChatBuilder(AutoTokenizer.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    schemas = read_tool_schemas()
    tokens = torch.tensor([chat.encode(chat.render(BY_HEART, schemas, generation=False).rstrip())])
    labels = torch.full_like(tokens, -100)
    for start in (1, 3):
        before, up_to = (
            len(chat.encode(chat.render(BY_HEART[:n], schemas, generation=n == start).rstrip("\n")))
            for n in (start, start + 1)
        )
        labels[0, before + 1 : up_to] = tokens[0, before + 1 : up_to]  # + 1: a line's end
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.03:
            break
    model.save_pretrained(folder)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = tmp_path
    learn_by_heart(tiny_model(folder / "model"))
    row = {
        "prompt": [{"role": "user", "content": QUESTION}],
        "data_source": "calculator",
        "reward_model": {"ground_truth": "5"},
        "agent_name": "tool_agent",
    }
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    return load_config(
        [
            str(ROOT / "configs/debug/calculator_grpo.yaml"),
            str(ROOT / "examples/openai_agent/config.yaml"),
            f"model.path={folder}/model",
            f"data={{train_files: [{folder}/rows.jsonl], val_files: [], train_batch_size: 2}}",
            f"rollout.agent.agent_loop_config_path={ROOT}/examples/openai_agent/agent_loop.yaml",
            *(
                "data.max_prompt_length=640",
                "rollout.response_length=512",
                "rollout.n=4",
                "rollout.trace.max_samples_per_step=-1",
            ),
            *("rollout.multi_turn.max_tokens_per_turn=128", "rollout.name=transformers"),
            f"rollout.temperature={TEMPERATURE}",
            "trainer={total_training_steps: 1, test_freq: -1, save_freq: -1, device: cpu}",
            f"trainer={{default_local_dir: {folder}/runs, logger: [jsonl]}}",
        ]
    )


def rescored(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens but the first, by one forward pass."""
    tokens = torch.tensor([token_ids])
    with torch.inference_mode():
        logprobs = model(input_ids=tokens).logits[0, :-1].div(TEMPERATURE).log_softmax(-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0]


async def test_a_step_on_exact_tokens_masks_and_logprobs(config: Config) -> None:
    async with open_run(config) as run:
        assert run.inputs
        tokenizer = run.inputs.tokenizer
        await train(run)
    run_dir = config.trainer.run_dir
    trajectories = [
        json.loads(line)
        for file in (run_dir / "trajectories").iterdir()
        for line in file.read_text().splitlines()
    ]
    assert len(trajectories) == 8 and all(t["error"] is None for t in trajectories)
    assert any(len(t["turn_ends"]) > 1 and t["tool_calls"] for t in trajectories)
    assert any(t["reward"] == 1 for t in trajectories)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    for t in trajectories:
        mask = torch.tensor(t["response_mask"], dtype=torch.bool)
        scores = rescored(model, t["prompt_ids"] + t["response_ids"])[-len(mask) :]
        difference = (scores - torch.tensor(t["response_logprobs"]))[mask].abs()
        assert difference.max() < 1e-4
        # what does not train is what the template wrote around the results of the tool
        observed = tokenizer.decode(torch.tensor(t["response_ids"])[~mask])
        for call in t["tool_calls"]:
            assert f"<tool_response>\n{call['result']}\n</tool_response>" in observed
        assert observed.count("<|im_start|>assistant\n") == len(t["turn_ends"]) - 1
    step = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert step["training/rollout_probs_diff_max"] < 1e-4
    assert step["agent_loop/failures"] == 0 and "actor/grad_norm" in step
