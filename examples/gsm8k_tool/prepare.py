"""Rows of GSM8K's JSON Lines for the tool agent:

python -m examples.gsm8k_tool.prepare --train train.jsonl --test test.jsonl --out DIR

A line is {"question": ..., "answer": "... #### 72"}; DIR/train.parquet and DIR/test.parquet have
the columns of verl's recipe.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from minirl.rewards.gsm8k import parse_number

SYSTEM_PROMPT = (
    "You solve math problems. Work out the solution step by step first. Then submit your result "
    "with the tool `calc_gsm8k_reward`, at least once; if it is wrong, find your mistake and "
    "submit a better one. In the end write your final answer as `#### <number>`."
)


def prepare(file: Path, split: str, out: Path) -> int:
    """Write `out`/`split`.parquet; returns the number of rows. ValueError names a bad line."""
    lines = [line for line in file.read_text("utf-8").split("\n") if line.strip()]
    rows = []
    for index, line in enumerate(lines):
        try:
            rows.append(make_row(json.loads(line), split, index))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{file}: problem {index + 1}: {error!r}; expected "
                '{"question": ..., "answer": "... #### <number>"}'
            ) from error
    if not rows:
        raise ValueError(f"{file}: has no problems")
    out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")
    return len(rows)


def make_row(problem: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """One row; the tool is told the ground truth by its create_kwargs."""
    question, answer = problem["question"], problem["answer"]
    _, mark, number = answer.rpartition("####")
    ground_truth = number.strip().replace(",", "")
    if not mark:
        raise ValueError(f"no #### in the answer {answer[-40:]!r}")
    parse_number(ground_truth)
    create_kwargs = {"ground_truth": ground_truth}
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": question},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "answer": answer,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": create_kwargs}},
        },
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.gsm8k_tool.prepare")
    parser.add_argument("--train", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--test", type=Path, required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--out", type=Path, default=Path("build/gsm8k_tool"))
    arguments = parser.parse_args()
    for split in ("train", "test"):
        try:
            count = prepare(getattr(arguments, split), split, arguments.out)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {error}")
        print(f"{arguments.out / split}.parquet: {count} rows")


if __name__ == "__main__":
    main()
