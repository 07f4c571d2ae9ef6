"""Rows for the number game: python -m examples.guess_number.prepare --out build/guess_number"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

from examples.guess_number.user import LARGEST

QUESTION = (
    f"I think of a number from 1 to {LARGEST}. Guess it: say one number, I will tell you whether "
    "mine is larger or smaller."
)


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows whose user thinks of random numbers."""
    random = Random(seed)
    rows = []
    for index in range(count):
        number = random.randint(1, LARGEST)
        rows.append(
            {
                "prompt": [{"role": "user", "content": QUESTION}],
                "data_source": "guess_number",
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {
                    "index": index,
                    "interaction_kwargs": {"name": "number_user", "number": number},
                },
                "agent_name": "tool_agent",
            }
        )
    return rows


def main() -> None:
    """Write train.jsonl and val.jsonl."""
    parser = argparse.ArgumentParser(description="rows for the number game")
    parser.add_argument("--out", type=Path, default=Path("build/guess_number"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate([("train", 2000), ("val", 100)]):
        rows = make_rows(count, 2 * arguments.seed + number)
        lines = [json.dumps(row) + "\n" for row in rows]
        (arguments.out / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
