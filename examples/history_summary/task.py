"""Rows and tool of a task that needs a long history: adding up a ledger page by page.

python -m examples.history_summary.task --out build/history_summary
"""

from random import Random
from typing import Any

from examples.rows import write_splits
from minirl.tools import function_tool

QUESTION = (
    "A ledger has {pages} pages. Read them one after another with the tool `read_page` (the first "
    "is page 1) and add up the amounts of all pages. Write the total as `#### <number>`."
)


@function_tool
def read_page(page: int, *, pages: list[str]) -> str:
    """Read a page of the ledger.

    Args:
        page: Its number, from 1.
    """
    if not 1 <= page <= len(pages):
        raise ValueError(f"there is no page {page}; the last one is {len(pages)}")
    return pages[page - 1]


def make_rows(count: int, seed: int, num_pages: int = 12) -> list[dict[str, Any]]:
    """Rows with a ledger each, which only the tool sees."""
    draw = Random(seed)
    rows = []
    for index in range(count):
        amounts = [[draw.randint(1, 99) for _ in range(5)] for _ in range(num_pages)]
        pages = [f"Amounts: {', '.join(map(str, page))}." for page in amounts]
        rows.append(
            {
                "prompt": [{"role": "user", "content": QUESTION.format(pages=num_pages)}],
                "data_source": "openai/gsm8k",  # for its reward: the number behind ####
                "reward_model": {"style": "rule", "ground_truth": str(sum(map(sum, amounts)))},
                "extra_info": {
                    "index": index,
                    "tools_kwargs": {"read_page": {"execute_kwargs": {"pages": pages}}},
                },
                "agent_name": "history_summary",
            }
        )
    return rows


def main() -> None:
    """Write train.jsonl and val.jsonl."""
    write_splits(make_rows, "history_summary")


if __name__ == "__main__":
    main()
