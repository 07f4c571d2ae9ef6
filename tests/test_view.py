"""`python -m minirl.view`: what the page is given, and the page in a browser where there is one."""

import html
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_run import make_config, make_project, scripted_run

from minirl.config import ConfigError
from minirl.testing import byte_tokenizer
from minirl.tracking import read_metrics
from minirl.train import train
from minirl.view.files import RunFiles, pieces
from minirl.view.server import FOLDER, PageServer

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
async def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of two steps."""
    project = make_project(tmp_path_factory.mktemp("project"))
    options = ("trainer.total_training_steps=2", "rollout.trace.max_samples_per_step=-1")
    config = make_config(project, "seen", *options)
    async with scripted_run(config) as run:
        await train(run)
    return config.trainer.run_dir


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[PageServer]:
    with PageServer("127.0.0.1", 0, RunFiles(run_dir)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def lines_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    path = run_dir / "trajectories" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def ask(server: PageServer, path: str, host: str | None = None) -> tuple[int, str, bytes]:
    """Status, type and body."""
    url = f"http://127.0.0.1:{server.server_port}{path}"
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def test_what_there_is_to_see(run_dir: Path) -> None:
    files = RunFiles(run_dir)
    overview = files.overview()
    assert (overview["name"], overview["steps"]) == ("seen", [1, 2])
    rows = read_metrics(run_dir)
    for name in overview["metrics"]:
        assert files.metric(name) == [(row["step"], row[name]) for row in rows if name in row]
    assert [step for step, _ in files.metric("critic/score/mean")] == [1, 2]


def test_a_step_without_its_texts_and_tokens(run_dir: Path) -> None:
    lines, briefs = lines_of(run_dir, 2), RunFiles(run_dir).step(2)
    assert len(briefs) == len(lines) == 12
    for line, brief in zip(lines, briefs, strict=True):
        for name in ("uid", "sample_index", "reward", "termination", "start_s", "end_s"):
            assert brief[name] == line[name]
        assert brief["num_tokens"] == sum(line["response_mask"])
        assert brief["advantage"] == pytest.approx(line["advantages"][0])  # grpo: all the same
        assert [turn["end_s"] for turn in brief["turns"]] == [t["end_s"] for t in line["turns"]]
        assert not brief["failed"]
        assert line["response"] not in json.dumps(brief)
    assert len({brief["advantage"] for brief in briefs}) > 1


def test_a_trajectory_with_the_text_of_each_token(run_dir: Path) -> None:
    shown, line = RunFiles(run_dir).trajectory(1, 3), lines_of(run_dir, 1)[3]
    assert {name: shown[name] for name in line} == line
    assert len(shown["pieces"]) == len(line["response_ids"])
    assert "".join(shown["pieces"]) == line["response"]
    assert shown["pieces_error"] is None


def test_without_the_model_folder_the_reason_is_shown(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(re.sub(r"path: .*/model", f"path: {tmp_path}/gone", config.read_text()))
    shown = RunFiles(tmp_path / "run").trajectory(1, 0)
    assert shown["pieces"] is None
    assert shown["pieces_error"].startswith(f"model.path={tmp_path}/gone: ")


def test_what_a_run_adds_is_seen(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    files = RunFiles(tmp_path / "run")
    assert (len(files.step(1)), len(files.metric("critic/score/mean"))) == (12, 2)
    step_1 = tmp_path / "run" / "trajectories" / "step_000001.jsonl"
    step_1.write_text(step_1.read_text() + step_1.read_text().splitlines()[0] + "\n")
    shutil.copy(step_1, step_1.with_name("step_000003.jsonl"))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "critic/score/mean": "NaN"}\n')
    assert (len(files.step(1)), files.overview()["steps"]) == (13, [1, 2, 3])
    assert len(files.metric("critic/score/mean")) == 3


@given(st.text())
def test_pieces_make_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    texts = pieces(ids, TOKENIZER.decode)
    assert len(texts) == len(ids)
    assert "".join(texts) == TOKENIZER.decode(ids)


def test_a_space_that_a_tokenizer_drops_at_the_beginning() -> None:
    words = ["▁to", "▁be", "▁or"]  # as sentencepiece has them

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert pieces([0, 1, 2], decode) == ["to", " be", " or"]


def test_characters_that_are_cut_off() -> None:
    *begun, last = TOKENIZER.encode("é🙂", add_special_tokens=False)
    assert pieces(begun, TOKENIZER.decode) == ["", "é", "", "", "\ufffd"]
    assert len(pieces([last] * 5, TOKENIZER.decode)) == 5


def test_the_page_and_its_data_over_http(server: PageServer, run_dir: Path) -> None:
    for path, kind in (("/", "html"), ("/page.js", "javascript"), ("/page.css", "css")):
        status, content_type, body = ask(server, path)
        assert (status, content_type) == (200, f"text/{kind}; charset=utf-8")
        assert body
    status, content_type, body = ask(server, "/api/metric?name=critic%2Fscore%2Fmean")
    assert (status, content_type) == (200, "application/json; charset=utf-8")
    assert [step for step, _ in json.loads(body)] == [1, 2]
    assert json.loads(ask(server, "/api/trajectory?step=2&index=11")[2])["step"] == 2
    assert len(json.loads(ask(server, "/api/step?step=1")[2])) == 12


@pytest.mark.parametrize(
    "path",
    [
        "/api/step?step=7",
        "/api/step?step=x",
        "/api/step",
        "/api/trajectory?step=1&index=12",
        "/config.yaml",
        "/../files.py",
    ],
)
def test_what_is_not_there(server: PageServer, path: str) -> None:
    status, content_type, body = ask(server, path)
    assert status == 404
    assert not content_type.startswith("application/json") or json.loads(body)["error"]


def test_pages_from_elsewhere_learn_nothing(server: PageServer) -> None:
    assert ask(server, "/api/run", host="rebound.example")[0] == 403
    assert ask(server, "/api/run", host=f"localhost:{server.server_port}")[0] == 200


def test_texts_are_never_html() -> None:
    script = (FOLDER / "page.js").read_text()
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert name not in script


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.yaml; name a run directory"):
        RunFiles(tmp_path)


def test_the_command_names_a_port_that_is_taken(run_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "minirl.view", str(run_dir), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --host 127.0.0.1 --port {port}: ")
    assert "Address already in use" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium")
def test_in_a_browser(server: PageServer, run_dir: Path, tmp_path: Path) -> None:
    """Whether the script runs to its end, and what then stands in the page."""
    line = lines_of(run_dir, 2)[4]
    address = f"http://127.0.0.1:{server.server_port}/#step=2&split=train&index=4"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    options += ["--disable-background-networking", "--virtual-time-budget=120000", "--dump-dom"]
    command = ["chromium", *options, address]
    page = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    assert '<p id="message" role="status"></p>' in page, "the page shows an error"
    assert f"<h2>{line['uid']} / {line['sample_index']}</h2>" in page
    response = page[page.index('<div class="tokens">', page.index("<h2>Response")) :]
    tokens = re.findall(r'<span class="policy">([^<]*)</span>', response.partition("</div>")[0])
    assert html.unescape("".join(tokens)) == line["response"]
    assert page.count("<g ") == 12  # a line of the timeline for each conversation
    assert "engine 0" in page
