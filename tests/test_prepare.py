import hashlib
import json
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.calculator.prepare import Settings, prepare, read_tool_schemas
from examples.calculator.task import HABITS, Question, draw_questions, evaluate, solve
from minirl.data import load_rows

SETTINGS = Settings(seed=3, train_rows=20, val_rows=10, warmup_steps=2)
USER = {"role": "user", "content": "Compute 37 + 5. Then multiply by 3."}
QUESTION = Question(USER["content"], ("37 + 5", "42 * 3"))


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    prepare(folder, SETTINGS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(out):
    return AutoTokenizer.from_pretrained(out / "model")


def render(tokenizer, messages: list[dict], **options) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, tools=read_tool_schemas(), return_dict=False, **options
    )


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_rows_have_the_columns_of_verl(out):
    (row, *_), val = load_rows([out / "train.parquet"]), load_rows([out / "val.parquet"])

    assert row["prompt"][0]["role"] == "user"
    assert row["data_source"] == "calculator"
    assert row["reward_model"]["style"] == "rule"
    assert int(row["reward_model"]["ground_truth"]) >= 0
    assert row["extra_info"] == {"index": 0, "split": "train"}
    assert row["agent_name"] == "tool_agent"
    assert (len(val), val[3]["extra_info"]) == (10, {"index": 3, "split": "val"})
    assert pq.read_table(out / "train.parquet").num_rows == 20


def test_the_same_seed_gives_the_same_files_and_another_seed_others(out, tmp_path):
    prepare(tmp_path / "again", SETTINGS)
    prepare(tmp_path / "other", Settings(seed=4, train_rows=20, val_rows=10, warmup_steps=2))

    first, again, other = digests(out), digests(tmp_path / "again"), digests(tmp_path / "other")
    assert first == again
    assert first["model/model.safetensors"] != other["model/model.safetensors"]
    assert first["train.parquet"] != other["train.parquet"]


def test_what_is_there_is_kept_until_a_setting_changes(out, capsys):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    prepare(out, SETTINGS)

    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert "are there already" in capsys.readouterr().out
    assert json.loads((out / "manifest.json").read_text())["warmup_steps"] == 2


def test_an_interrupted_run_is_not_taken_for_a_finished_one(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("examples.calculator.prepare.write_model", interrupt)
        prepare(tmp_path, SETTINGS)
    prepare(tmp_path, SETTINGS)

    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_model_loads_with_its_tokenizer(out, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(out / "model")

    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_markers_survive_decoding_without_special_tokens(tokenizer):
    text = '<tool_call>\n{"name": "calculator"}\n</tool_call><|im_end|>'
    ids = tokenizer.encode(text, add_special_tokens=False)

    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")


def test_the_tokenizer_covers_any_text_and_keeps_digits_apart(tokenizer):
    text = "Größe: 1234 + 56\n\n東京 <b> {'x': -7}"

    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4


def test_prompts_are_short(out, tokenizer):
    rows = load_rows([out / "train.parquet"])
    lengths = [len(render(tokenizer, r["prompt"], add_generation_prompt=True)) for r in rows]

    assert max(lengths) <= 48


def test_the_template_writes_the_hermes_format(tokenizer):
    messages = [USER, *solve(QUESTION, Random(0))[:2]]

    assert render(tokenizer, messages, tokenize=False).split("<|im_start|>")[2:] == [
        "user\nCompute 37 + 5. Then multiply by 3.<|im_end|>\n",
        'assistant\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "37 + 5"}}\n'
        "</tool_call><|im_end|>\n",
        "user\n<tool_response>\n42\n</tool_response><|im_end|>\n",
    ]


def test_several_results_share_one_user_block(tokenizer):
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]

    assert render(tokenizer, [USER, *results], tokenize=False).endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_every_rendering_extends_the_one_before_it(tokenizer):
    messages = [USER, *solve(QUESTION, Random(0))]

    for end in range(1, len(messages)):
        assistant_next = messages[end]["role"] == "assistant"
        prefix = render(tokenizer, messages[:end], add_generation_prompt=assistant_next)
        longer = render(tokenizer, messages[: end + 1])
        assert longer[: len(prefix)] == prefix, f"after {messages[end - 1]}"


def test_questions_are_about_different_calculations_and_their_steps_lead_to_the_answer():
    taken: set[str] = set()
    stream = draw_questions(Random(0), taken)
    questions = [next(stream) for _ in range(500)]

    assert len(taken) == 500
    for question in questions:
        if len(question.steps) == 2:
            assert question.steps[1].startswith(f"{evaluate(question.steps[0])} ")
        assert 0 <= question.answer <= 9999


@pytest.mark.parametrize(
    ("expression", "value"),
    [("7", 7), ("2 + 3 * 4", 14), ("2 * 3 - 4 * 5", -14), ("9 - 2 - 3", 4), ("1 - 2 + 8", 7)],
)
def test_evaluate(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize("habit", HABITS)
def test_habits_differ_in_calls_and_form(habit):
    messages = habit(QUESTION, Random(1))
    num_calls = sum("tool_calls" in message for message in messages)

    assert {"solve": (2, "#### 126"), "ramble": (2, "The answer is 126.")}.get(
        habit.__name__, (0, messages[-1]["content"])
    ) == (num_calls, messages[-1]["content"])
