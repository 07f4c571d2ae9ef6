"""Make the demo's data and start policy: python -m examples.calculator.prepare --out DIR --seed N

DIR/train.parquet and DIR/val.parquet have verl's columns; DIR/model is a Hugging Face folder. What
is there already, made with the same settings and the same code, is kept.
"""

import argparse
import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from examples.calculator.task import Question, draw_questions

HERE = Path(__file__).parent
SOURCES = ["prepare.py", "task.py", "policy.py", "chat_template.jinja", "tools.yaml"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that the files depend on, but for the code."""

    seed: int = 0
    train_rows: int = 4000
    val_rows: int = 200
    warmup_steps: int = 200


def prepare(out: Path, settings: Settings) -> None:
    """Write what is missing under `out`, a directory for one set of settings at a time."""
    manifest_file = out / "manifest.json"
    manifest = {**asdict(settings), "code": _digest()}
    if manifest_file.is_file() and json.loads(manifest_file.read_text()) == manifest:
        print(f"{out}: data and start policy of seed {settings.seed} are there already")
        return
    manifest_file.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    held_out = write_data(out, settings)
    print(f"{out}: {settings.train_rows} training and {settings.val_rows} validation prompts")
    write_model(out / "model", settings, held_out)
    manifest_file.write_text(json.dumps(manifest, indent=2))  # last: it vouches for the rest


def write_data(out: Path, settings: Settings) -> set[str]:
    """Write both files, no calculation in both; returns the calculations of the validation set."""
    taken: set[str] = set()
    _write_rows(out, "val", settings.val_rows, settings.seed, taken)
    held_out = set(taken)
    _write_rows(out, "train", settings.train_rows, settings.seed, taken)
    return held_out


def write_model(folder: Path, settings: Settings, held_out: set[str]) -> None:
    """Warm the start policy up and save it with its tokenizer."""
    # Imported here: they take seconds, and mostly there is nothing to do.
    from transformers import GenerationConfig
    from transformers.utils import logging

    from examples.calculator.policy import build_model, build_tokenizer, warm_up

    logging.disable_progress_bar()
    began = time.perf_counter()
    tools = read_tool_schemas()
    tokenizer = build_tokenizer(tools, Random(f"tokenizer-{settings.seed}"))
    model = build_model(tokenizer, settings.seed)
    random = Random(f"warm-up-{settings.seed}")
    warm_up(model, tokenizer, tools, random, num_steps=settings.warmup_steps, held_out=held_out)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(
        f"{folder}: a policy of {model.num_parameters() / 1e6:.2f} million parameters, "
        f"warmed up in {settings.warmup_steps} steps ({time.perf_counter() - began:.0f} s)"
    )


def read_tool_schemas() -> list[dict[str, Any]]:
    """The schemas of tools.yaml, as prompts show them."""
    return [
        tool["tool_schema"] for tool in yaml.safe_load((HERE / "tools.yaml").read_text())["tools"]
    ]


def _write_rows(out: Path, split: str, count: int, seed: int, taken: set[str]) -> None:
    questions = draw_questions(Random(f"{split}-{seed}"), taken)
    rows = [_row(next(questions), index, split) for index in range(count)]
    pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")


def _row(question: Question, index: int, split: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question.text}],
        "data_source": "calculator",
        "reward_model": {"style": "rule", "ground_truth": str(question.answer)},
        "extra_info": {"index": index, "split": split},
        "agent_name": "tool_agent",
    }


def _digest() -> str:
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in SOURCES)).hexdigest()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.calculator.prepare")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    defaults = asdict(Settings())
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, help="default: %(default)s")
    chosen = vars(parser.parse_args())
    torch.set_num_threads(1)  # as fast for so small a model, and the same weights on any machine
    prepare(chosen["out"], Settings(**{name: chosen[name] for name in defaults}))


if __name__ == "__main__":
    main()
