"""Rows for the number game: python -m examples.guess_number.prepare --out build/guess_number"""

from random import Random
from typing import Any

from examples.guess_number.user import LARGEST
from examples.rows import write_splits

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
    write_splits(make_rows, "guess_number")


if __name__ == "__main__":
    main()
