import sys
from pathlib import Path

import pytest
import torch
from scripted_run import make_config, make_project, scripted_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirl import export
from minirl.config import ConfigError
from minirl.train import train

GENERATION = '{"eos_token_id": [256, 258], "do_sample": true, "temperature": 0.6}'


@pytest.fixture(scope="module")
async def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with checkpoints after steps 2 and 3; weights.pt holds those after the last."""
    project = make_project(tmp_path_factory.mktemp("project"))
    (project / "model" / "generation_config.json").write_text(GENERATION)
    template = project / "template.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    config = make_config(project, "run", "trainer.save_freq=2", f"model.chat_template={template}")
    async with scripted_run(config) as run:
        await train(run)
        weights = {name: p.detach().clone() for name, p in run.policy.model.named_parameters()}
    torch.save(weights, config.trainer.run_dir / "weights.pt")
    return config.trainer.run_dir


def test_the_latest_weights_and_the_tokenizer(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["export", str(run_dir), str(out)])
    export.main()
    assert "step_000003" in capsys.readouterr().out
    exported = AutoModelForCausalLM.from_pretrained(out)
    weights = torch.load(run_dir / "weights.pt")
    assert dict(exported.named_parameters()).keys() == weights.keys()
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<hi>"
    )
    assert (out / "generation_config.json").read_text() == GENERATION
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_earlier_step_in_another_type(run_dir: Path, tmp_path: Path) -> None:
    source = export.export(run_dir, tmp_path / "out", step=2, dtype="bfloat16")
    assert source.name == "step_000002"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    last = torch.load(run_dir / "weights.pt")
    assert all(p.dtype == torch.bfloat16 for p in exported.parameters())
    assert any(not torch.equal(p, last[n].bfloat16()) for n, p in exported.named_parameters()), (
        "step 3 changed nothing"
    )


def test_what_is_not_there_is_said(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint of step 1, but of \[2, 3\]"):
        export.export(run_dir, tmp_path / "out", step=1)
    with pytest.raises(ConfigError, match="is there already"):
        export.export(run_dir, tmp_path)
    with pytest.raises(ConfigError, match=r"has no config\.yaml; name a run directory"):
        export.export(tmp_path, tmp_path / "out")
    (tmp_path / "config.yaml").write_text("model: {path: ./nowhere}")
    with pytest.raises(ConfigError, match="relative path counts from the folder"):
        export.export(tmp_path, tmp_path / "out")
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    with pytest.raises(ConfigError, match=r"has no checkpoint; trainer\.save_freq"):
        export.export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
