"""Does every algorithm learn? A task with a known optimum, through the whole of `minirl.train`.

    python -m minirl.selftest [NAME ...] [--steps 45]        (or: make selftest)

The policy, of a few thousand parameters, is asked for a hidden digit. It may guess, or call a tool
that shows the digit and then repeat what it saw: the optimum is to be right always. At the start it
looks in half of the conversations and repeats what it saw in little more than half of those. Every
advantage estimator is run with a fitting loss and every loss with a fitting estimator; each has to
reach 95 % of the optimum in the same number of steps. The engine is `rollout.name=transformers`.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from minirl.agent_loop.tool_parser import NO_SCHEMAS, ParsedTurn, Schemas
from minirl.algorithms import ADV_ESTIMATORS, POLICY_LOSSES, requirements
from minirl.chat import ChatBuilder
from minirl.config import Config, load_config
from minirl.launch import SOCKETS
from minirl.testing import CONTROL_TOKENS, tiny_model
from minirl.tools.base import BaseTool, ToolCall, ToolResponse
from minirl.tracking import read_metrics
from minirl.train import main as train

REACH = 0.95
NUM_STEPS = 45
DIGITS = "0123"
QUESTIONS = "abcdefgh"
ACCURACY = "val-core/selftest/acc/mean@4"

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role[0] + message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>a' }}{%- endif %}"""

SETTINGS = """
model: {path: "%(folder)s/model", dtype: float32}
data:
  train_files: ["%(folder)s/rows.jsonl"]
  val_files: ["%(folder)s/rows.jsonl"]
  train_batch_size: 16
  max_prompt_length: 16
actor:
  optim: {lr: 0.005}
  ppo_mini_batch_size: 8
  max_tokens_per_micro_batch: 16384
rollout:
  name: transformers
  n: 8
  response_length: 24
  sync_check: {max_logprob_diff: 1.0e-4, probe_length: 8}
  multi_turn:
    format: minirl.selftest:QuestionMarkParser
    tool_config_path: "%(folder)s/tools.yaml"
    max_assistant_turns: 3
    max_tokens_per_turn: 2
  val_kwargs: {n: 4, temperature: 1.0}
  agent: {default_agent_loop: tool_agent}
reward: {custom_reward_function: {path: minirl.selftest}}
trainer:
  device: cpu
  default_local_dir: "%(folder)s/runs"
  val_before_train: false
  resume_mode: disable
  logger: [jsonl]
"""


class PeekTool(BaseTool):
    """Shows the digit that is hidden in this conversation."""

    schema = {"type": "function", "function": {"name": "peek", "description": "Show the digit."}}  # noqa: RUF012

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        self._hidden: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> str:
        """Hide the row's digit."""
        instance_id = await super().create(instance_id)
        self._hidden[instance_id] = create_kwargs["digit"]
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """The digit."""
        return ToolResponse(self._hidden[instance_id]), 0.0, {}

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Forget it."""
        del self._hidden[instance_id]


class QuestionMarkParser:
    """A turn that is `?` calls the tool."""

    def parse(self, text: str, schemas: Schemas = NO_SCHEMAS) -> ParsedTurn:
        """See ToolParser."""
        calls = [ToolCall(name="peek", text="{}")] if text == "?" else []
        return ParsedTurn(content=text, calls=calls)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    spread: float = 0.0,
) -> dict[str, float]:
    """1 where the last character is the hidden digit, plus `spread` times the question's level.

    The level says nothing about the answer: whoever compares answers to one question does not see
    it, whoever mixes questions up sees nothing else.
    """
    right = float(solution_str[-1:] == ground_truth)
    score = right + spread * extra_info["level"]
    return {"score": score, "acc": right, "right": right, "looked": float("?" in solution_str)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One algorithm to try."""

    kind: str
    """`estimator` or `loss`."""
    name: str
    settings: tuple[str, ...]
    """Beside SETTINGS."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of it."""

    case: Case
    start: float
    """Success of the start policy, 0 to 1."""
    success: float
    """Success after the last step."""
    steps: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether it came near enough to the optimum."""
        return self.success >= REACH


COMPARES = ("reward.reward_kwargs={spread: 5}",)
"""For estimators that compare answers to one question."""

ESTIMATORS: dict[str, tuple[str, ...]] = {
    "gae": ("critic={}", "critic.optim.lr=0.01", "critic.ppo_epochs=2"),
    "grpo_passk": (*COMPARES, "rollout.n=2", "data.train_batch_size=32"),
    "gpg": ("actor.policy_loss.loss_mode=gpg",),
    "gdpo": ("algorithm.options={gdpo_reward_keys: [right, looked]}",),
    "reinforce_plus_plus": (),
    "cpo": ("algorithm.cpo={}",),
}
"""What an estimator needs, where it is not COMPARES."""


def all_cases() -> Iterator[Case]:
    """Every registered estimator with a fitting loss, every registered loss with GRPO."""
    for name in ADV_ESTIMATORS:
        settings = ESTIMATORS.get(name, COMPARES)
        yield Case(
            kind="estimator", name=name, settings=(f"algorithm.adv_estimator={name}", *settings)
        )
    for name in POLICY_LOSSES:
        mode = (requirements(POLICY_LOSSES.find(name)).agg_modes or ("token-mean",))[0]
        settings = (f"actor.policy_loss.loss_mode={name}", f"actor.loss_agg_mode={mode}")
        yield Case(kind="loss", name=name, settings=(*COMPARES, *settings))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character of the task, and ChatML's."""
    characters = [*CONTROL_TOKENS, *"tu", *QUESTIONS, *DIGITS, "?"]
    vocabulary = {token: index for index, token in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=CONTROL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL_TOKENS])
    _, pad, end = CONTROL_TOKENS[1], CONTROL_TOKENS[0], CONTROL_TOKENS[2]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=pad, chat_template=TEMPLATE
    )


def prepare(folder: Path) -> None:
    """Write the start policy, the rows and the tool config."""
    disable_progress_bar()
    tokenizer = make_tokenizer()
    tiny_model(
        folder / "model",
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        tokenizer=tokenizer,
    )
    warm_up(folder / "model", tokenizer)
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "data_source": "selftest",
            "reward_model": {"style": "rule", "ground_truth": digit},
            "extra_info": {
                "level": 2 * index / (len(QUESTIONS) - 1) - 1,
                "tools_kwargs": {"peek": {"create_kwargs": {"digit": digit}}},
            },
        }
        for index, question in enumerate(QUESTIONS)
        for digit in DIGITS
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = {"tools": [{"class_name": "minirl.selftest:PeekTool", "config": {}}]}
    (folder / "tools.yaml").write_text(yaml.safe_dump(tools))
    (folder / "config.yaml").write_text(SETTINGS % {"folder": folder})


def warm_up(path: Path, tokenizer: Any, num_steps: int = 300) -> None:
    """Teach the start policy: look in half of the conversations; repeat what was seen in half of
    those, and answer anything in all others."""
    chat = ChatBuilder(tokenizer)
    rows = [row for question in QUESTIONS for row in _conversations(chat, tokenizer, question)]
    longest = max(len(tokens) for tokens, _, _ in rows)
    ids = torch.tensor([t + [0] * (longest - len(t)) for t, _, _ in rows])
    mask = torch.tensor([m + [0] * (longest - len(m)) for _, m, _ in rows])
    weights = torch.tensor([share for _, _, share in rows])[:, None] * mask
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        logits = model(input_ids=ids).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        optimizer.zero_grad()
        ((losses * weights[:, 1:]).sum() / weights.sum()).backward()
        optimizer.step()
    model.save_pretrained(path)


def _conversations(
    chat: ChatBuilder, tokenizer: Any, question: str
) -> Iterator[tuple[list[int], list[int], float]]:
    """Every conversation about `question`: tokens, 1 where the policy would sample them, share."""

    def turn(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    prompt = chat.prompt([{"role": "user", "content": question}])
    for answer in DIGITS:
        guess = turn(answer)
        yield prompt + guess, [0] * len(prompt) + [1] * len(guess), 0.5 / len(DIGITS)
    for hidden, answer in product(DIGITS, DIGITS):
        look, repeat = turn("?"), turn(answer)
        seen = chat.observation([{"role": "tool", "content": hidden, "name": "peek"}])
        parts = [(prompt, 0), (look, 1), (seen, 0), (repeat, 1)]
        tokens = [token for part, _ in parts for token in part]
        mask = [sampled for part, sampled in parts for _ in part]
        share = 0.5 * (answer == hidden) + 0.5 / len(DIGITS)
        yield tokens, mask, 0.5 * share / len(DIGITS)


def run_case(case: Case, folder: Path, num_steps: int = NUM_STEPS) -> Result:
    """Train by it, in this process; its output goes to a file in `folder`, which is prepared."""
    config = load_config(
        [
            str(folder / "config.yaml"),
            f"trainer.experiment_name={case.kind}-{case.name}",
            f"trainer.total_training_steps={num_steps}",
            f"trainer.test_freq={num_steps}",
            "trainer.val_before_train=true",
            *case.settings,
        ]
    )
    started = time.perf_counter()
    log = folder / f"{case.kind}-{case.name}.log"
    with log.open("w") as file, contextlib.redirect_stdout(file):
        asyncio.run(_train(config))
    first, *_, last = read_metrics(config.trainer.run_dir)
    return Result(
        case=case,
        start=first[ACCURACY],
        success=last[ACCURACY],
        steps=last["step"],
        seconds=time.perf_counter() - started,
    )


async def _train(config: Config) -> None:
    try:
        await train(config)
    finally:
        SOCKETS.remove()


def main() -> None:
    """Run the cases on all cores, print the table; exit status 1 if one did not learn."""
    parser = argparse.ArgumentParser(description="does every algorithm learn?")
    parser.add_argument("names", nargs="*", help="estimators and losses; all of them if none")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    arguments = parser.parse_args()
    cases = [c for c in all_cases() if not arguments.names or c.name in arguments.names]
    if unknown := set(arguments.names) - {case.name for case in cases}:
        parser.error(f"no such estimator or loss: {', '.join(sorted(unknown))}")
    started = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="minirl-selftest-") as name:
        folder = Path(name)
        prepare(folder)
        run = partial(run_case, folder=folder, num_steps=arguments.steps)
        print(f"{'':9} {'algorithm':30} steps   start  success  seconds", flush=True)
        results = []
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=spawn) as pool:
            for result in pool.map(run, cases):
                results.append(result)
                case, mark = result.case, "" if result.passed else "  below 95 % of the optimum"
                print(
                    f"{case.kind:9} {case.name:30} {result.steps:5}  {result.start:6.1%}  "
                    f"{result.success:7.1%}  {result.seconds:7.1f}{mark}",
                    flush=True,
                )
    failed = [result.case.name for result in results if not result.passed]
    seconds = time.perf_counter() - started
    print(f"{len(results) - len(failed)} of {len(results)} reached it in {seconds:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
