import json

import pytest

from minirl.config import load_config
from minirl.records import open_records
from minirl.types import Trajectory


@pytest.mark.parametrize("resumed", [None, 0])
async def test_what_an_earlier_run_left_is_kept_and_does_not_mix(tmp_path, resumed) -> None:
    config = load_config(
        ["model.path=m", f"trainer.default_local_dir={tmp_path}", "trainer.logger=[jsonl]"]
    )
    trajectory = Trajectory(prompt_ids=[1])
    with open_records(config, 2, None, str) as records:
        await records.write(1, "val", [trajectory], 0.0)
    with open_records(config, 2, resumed, str) as records:
        await records.write(1, "train", [trajectory], 0.0)

    run_dir = config.trainer.run_dir
    now, earlier = (
        run_dir / name / "step_000001.jsonl" for name in ("trajectories", "trajectories.1")
    )
    splits = [json.loads(line)["split"] for line in now.read_text().splitlines()]
    assert splits == (["train"] if resumed is None else ["val", "train"])
    assert earlier.exists() == (run_dir / "config.1.yaml").exists() == (resumed is None)


@pytest.mark.parametrize(("total", "left"), [(3, ""), (2, "; no step is left to be trained")])
def test_a_run_that_is_over_says_so(tmp_path, capsys, total: int, left: str) -> None:
    config = load_config(["model.path=m", f"trainer.default_local_dir={tmp_path}"])
    config.trainer.run_dir.mkdir()
    before = config.trainer.run_dir / "config.yaml"
    before.write_text("as it was trained")
    with open_records(config, total, 2, str):
        pass
    assert (before.read_text() == "as it was trained") == bool(left)
    assert f"resumed from step 2 of {tmp_path}/minirl{left}\n" in capsys.readouterr().out
