import json
import logging
from itertools import chain
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minirl.config import ConfigError
from minirl.data import PromptLoader, filter_overlong, load_rows


def make_row(index: int, **columns) -> dict:
    return {
        "prompt": [{"role": "user", "content": f"What is {index} + 1?"}],
        "data_source": "calculator",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index, "split": "train"},
        **columns,
    }


def write_jsonl(path, rows) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def write_parquet(path, rows) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def uids(loader: PromptLoader, num_batches: int) -> list[list[str]]:
    return [[row["uid"] for row in loader.next_batch()] for _ in range(num_batches)]


def test_parquet_and_jsonl_give_the_same_rows(tmp_path):
    rows = [
        make_row(
            0, extra_info={"index": 0, "tools_kwargs": {"search": {"create_kwargs": {"k": 3}}}}
        ),
        make_row(
            1, extra_info={"index": 1, "tools_kwargs": {"python": {"create_kwargs": {"t": 1}}}}
        ),
    ]

    from_parquet = load_rows([write_parquet(tmp_path / "a.parquet", rows)])

    assert from_parquet == rows, "keys of other rows must not come back as None"
    assert load_rows([write_jsonl(tmp_path / "a.jsonl", rows)]) == rows


def test_files_follow_each_other_and_unknown_columns_travel_along(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [make_row(0, level=3)])
    second = write_parquet(tmp_path / "b.parquet", [make_row(1)])

    rows = load_rows([first, second])

    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert rows[0]["level"] == 3


def test_line_separators_inside_a_string_do_not_end_a_jsonl_row(tmp_path):
    row = make_row(0, note="one\u2028two\x85three")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", "utf-8")

    assert load_rows([path]) == [row]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "row 1: column prompt is missing; there are question"),
        (make_row(1, prompt=[]), r"row 1, column prompt: got \[\]; must be a list"),
        (make_row(1, prompt="What?"), "row 1, column prompt: got 'What\\?'; must be a list"),
        (
            make_row(1, prompt=[{"role": "user"}]),
            "column prompt, message 0: .*`role` and `content`",
        ),
        (
            make_row(1, prompt=[{"role": "system", "content": "x"}, "What?"]),
            "column prompt, message 1",
        ),
        (
            make_row(1, prompt=[{"role": 1, "content": "x"}]),
            "message 0: got role 1; must be a string",
        ),
        (make_row(1, prompt=[{"role": "user", "content": 5}]), "message 0: got content 5; must be"),
        (
            make_row(1, reward_model={"style": "rule"}),
            "column reward_model: .*`ground_truth` is miss",
        ),
        (make_row(1, reward_model="42"), "column reward_model: got '42'; must be a struct"),
        (make_row(1, extra_info=[1]), r"column extra_info: got \[1\]; must be a struct"),
        (
            make_row(1, extra_info={"interaction_kwargs": "{}"}),
            "column extra_info.interaction_kwargs: got '{}'; must be a struct",
        ),
        (
            make_row(1, extra_info={"tools_kwargs": [{}]}),
            r"column extra_info.tools_kwargs: got \[{}\]; must be a struct",
        ),
        (make_row(1, agent_name=7), "column agent_name: got 7; must be the name of an agent loop"),
        (make_row(1, data_source=7), "column data_source: got 7; must be a string"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path, row, message):
    path = write_jsonl(tmp_path / "bad.jsonl", [make_row(0), row])

    with pytest.raises(
        ConfigError, match=f"bad.jsonl: .*{message}" if "row" not in message else message
    ):
        load_rows([path])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": ', "a.jsonl: row 0: not valid JSON"),
        ("a.jsonl", "[1, 2]\n", "a.jsonl: row 0: expected an object"),
        ("a.jsonl", r'{"prompt": "\ud83d"}', "a.jsonl: row 0: .*surrogates not allowed"),
        ("a.jsonl", "\n", "a.jsonl: has no rows"),
        ("a.parquet", "PAR0", "a.parquet: not readable as Parquet"),
        ("a.csv", "prompt\nx\n", "a.csv: unknown format '.csv'; use .parquet or .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)

    with pytest.raises(ConfigError, match=message):
        load_rows([tmp_path / name])


def test_text_that_is_not_utf_8_is_named(tmp_path):
    good, path = write_jsonl(tmp_path / "good.jsonl", [make_row(0)]), tmp_path / "bad.jsonl"
    path.write_bytes((tmp_path / "good.jsonl").read_bytes() + b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl: row 1: not valid JSON: 'utf-8' codec"):
        load_rows([good, path])

    offsets, text = pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")
    column = pa.StringArray.from_buffers(1, offsets, text)
    pq.write_table(pa.table({"prompt": column}), tmp_path / "bad.parquet")
    with pytest.raises(ConfigError, match=r"bad.parquet: not readable as Parquet: 'utf-8' codec"):
        load_rows([tmp_path / "bad.parquet"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.parquet: no such file"):
        load_rows([tmp_path / "nowhere.parquet"])


ROWS = [make_row(index) for index in range(10)]


def test_each_epoch_has_its_own_order_and_no_row_twice():
    loader = PromptLoader(ROWS, 5, seed=1)
    first, second = list(chain(*uids(loader, 2))), list(chain(*uids(loader, 2)))

    assert sorted(first) == [f"0-{i}" for i in range(10)]
    assert sorted(second) == [f"1-{i}" for i in range(10)]
    assert [uid[2:] for uid in first] != [uid[2:] for uid in second]


def test_an_epoch_is_shuffled_once(monkeypatch):
    shuffled = []

    class Counting(Random):
        def shuffle(self, x):
            shuffled.append(len(x))
            super().shuffle(x)

    monkeypatch.setattr("minirl.data.Random", Counting)
    uids(PromptLoader(ROWS, 2, seed=11), 13)
    assert shuffled == [10, 10, 10]


def test_the_seed_decides_the_order():
    assert uids(PromptLoader(ROWS, 4, seed=1), 5) == uids(PromptLoader(ROWS, 4, seed=1), 5)
    assert uids(PromptLoader(ROWS, 4, seed=1), 5) != uids(PromptLoader(ROWS, 4, seed=2), 5)


def test_without_shuffle_the_order_is_that_of_the_rows():
    loader = PromptLoader(ROWS, 5, shuffle=False)

    assert [row["extra_info"]["index"] for row in loader.next_batch()] == [0, 1, 2, 3, 4]


def test_an_epoch_drops_its_short_last_batch():
    loader = PromptLoader(ROWS, 4, shuffle=False)

    assert [len(batch) for batch in uids(loader, 2)] == [4, 4]
    assert uids(loader, 1)[0] == ["1-0", "1-1", "1-2", "1-3"]


def test_rows_are_handed_out_as_copies():
    PromptLoader(ROWS, 4).next_batch()

    assert "uid" not in ROWS[0]


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_resuming_in_the_middle_equals_never_having_stopped(position):
    uninterrupted = PromptLoader(ROWS, 3, seed=5)
    expected = uids(uninterrupted, 8)
    stopped = PromptLoader(ROWS, 3, seed=5)
    uids(stopped, position)

    resumed = PromptLoader(ROWS, 3, seed=5)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))

    assert uids(resumed, 8 - position) == expected[position:]
    assert resumed.state_dict() == uninterrupted.state_dict()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptLoader(ROWS, 2, seed=5), r"data\.train_batch_size: got 2; .* made with 3"),
        (PromptLoader(ROWS, 3, seed=6), r"trainer\.seed: got 6; the checkpoint was made with 5"),
        (PromptLoader(ROWS[:9], 3, seed=5), r"data\.train_files, number of rows: got 9; .* 10"),
        (PromptLoader(ROWS, 3, seed=5, shuffle=False), r"data\.shuffle: got False; .* with True"),
    ],
)
def test_a_position_in_other_data_is_refused(other, message):
    with pytest.raises(ConfigError, match=message):
        other.load_state_dict(PromptLoader(ROWS, 3, seed=5).state_dict())


def count_tokens(row: dict) -> int:
    return 8 if row["extra_info"]["index"] == 3 else 4


def select(rows, max_prompt_length: int, filter_overlong_prompts: bool, truncation: str):
    return filter_overlong(
        rows,
        count_tokens,
        max_prompt_length=max_prompt_length,
        filter_overlong_prompts=filter_overlong_prompts,
        truncation=truncation,
    )


def test_overlong_prompts_are_dropped_and_counted(caplog):
    with caplog.at_level(logging.WARNING, "minirl.data"):
        kept = select(ROWS, 7, True, "error")

    assert [row["extra_info"]["index"] for row in kept] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert "dropped 1 of 10 prompts" in caplog.text


def test_an_overlong_prompt_is_an_error_unless_it_may_be_cut():
    with pytest.raises(
        ConfigError, match="got 7, but the prompt of row 3 of the data has 8 tokens"
    ):
        select(ROWS, 7, False, "error")
    assert select(ROWS, 7, False, "left") == ROWS


def test_prompts_that_just_fit_are_kept():
    assert select(ROWS, 8, False, "error") == ROWS


def test_dropping_every_prompt_is_an_error():
    with pytest.raises(ConfigError, match="all 10 prompts of the data are longer"):
        select(ROWS, 3, True, "error")
