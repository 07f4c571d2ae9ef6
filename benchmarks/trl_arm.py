"""Steps of TRL's GRPOTrainer on the demo's policy and questions; benchmarks.vs_trl runs it."""

import json
import time
from statistics import mean
from typing import Any

from benchmarks.vs_trl_task import Step, Task, read_questions, wait
from examples.calculator.prepare import read_tool_schemas
from minirl.chat import ChatBuilder
from minirl.rewards.gsm8k import compute_score
from minirl.tools.base import ToolError
from minirl.tools.calculator import evaluate, format_number


async def calculator(expression: str):  # type: ignore[no-untyped-def]  # its schema has no result
    """Evaluate an arithmetic expression.

    Args:
        expression: For example: 2 * (3 + 4)
    """
    await wait(expression)
    try:
        return format_number(evaluate(expression))
    except ToolError as error:
        return str(error)


class Reward:
    """Scores as minirl does, and keeps the mean length of the completions of each step."""

    __name__ = "reward"  # GRPOTrainer logs it

    def __init__(self) -> None:
        self.lengths: list[float] = []

    def __call__(
        self,
        completions: list[Any],
        ground_truth: list[str],
        completion_ids: list[list[int]],
        **columns: Any,
    ) -> list[float]:
        """By trajectory, of the text of all turns of the policy."""
        self.lengths.append(mean(map(len, completion_ids)))
        return [
            compute_score("calculator", _solution(messages), truth)
            for messages, truth in zip(completions, ground_truth, strict=True)
        ]


def _solution(messages: list[dict[str, Any]]) -> str:
    return "".join(m["content"] for m in messages if m["role"] == "assistant")


def run_trl(task: Task) -> list[Step]:
    """The steps but the first, which warms up."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    class Clock(TrainerCallback):
        """When each step ended."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(task.model)
    tokenizer.response_template = qwen3_template  # the demo writes calls as Qwen does
    clock, reward = Clock(), Reward()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype="float32"),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir="build/vs_trl/trl",
            per_device_train_batch_size=task.num_prompts * task.n,
            num_generations=task.n,
            max_completion_length=task.response_length,
            max_tool_calling_iterations=task.max_turns - 1,
            max_steps=task.num_steps + 1,
            learning_rate=task.lr,
            seed=task.seed,
            temperature=1.0,
            beta=0.0,
            shuffle_dataset=False,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(read_questions(task)),
        processing_class=tokenizer,
        tools=[calculator] if task.with_tool else None,
        callbacks=[clock],
    )
    _check_prompt(trainer, task)
    trainer.train()
    seconds = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    logs = [log for log in trainer.state.log_history if "step_time" in log]
    calls = [log.get("tools/call_frequency", 0.0) for log in logs]
    return [
        Step(seconds=s, tokens=t, tool_calls=c)
        for s, t, c in zip(seconds, reward.lengths[1:], calls[1:], strict=True)
    ]


def _check_prompt(trainer: Any, task: Task) -> None:
    """Both arms give the policy the same tokens."""
    prompt = read_questions(task)[0]["prompt"]
    [theirs], *_ = trainer._tokenize_prompts([prompt])
    schemas = read_tool_schemas() if task.with_tool else None
    ours = ChatBuilder(trainer.processing_class).prompt(prompt, schemas)
    assert theirs == ours, json.dumps([theirs, ours])
