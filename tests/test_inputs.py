import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from minirl.agent_loop import AgentLoopContext, SingleTurnAgentLoop, make_agent_loop
from minirl.chat import ChatBuilder
from minirl.config import ConfigError, load_config
from minirl.data import PromptLoader
from minirl.distributed import place
from minirl.inputs import Inputs, read_inputs
from minirl.rollout.vllm_server import check_vllm
from minirl.testing import CHATML_TEMPLATE, byte_tokenizer, tiny_model

CALCULATOR = "minirl.tools.calculator:CalculatorTool"


class PatientAgentLoop(SingleTurnAgentLoop):
    """Named in the tests' agent-loop file."""

    def __init__(self, context: AgentLoopContext, *, patience: int = 1) -> None:
        super().__init__(context)
        self.patience = patience


def make_row(number: int, **columns: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"What is {number} + {number}?"}],
        "data_source": "calculator",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        **columns,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and everything else that a config can name, all of it good."""
    folder = tmp_path_factory.mktemp("project")
    tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", [make_row(i) for i in range(8)])
    (folder / "tools.yaml").write_text(yaml.dump({"tools": [{"class_name": CALCULATOR}]}))
    target = f"{__name__}:PatientAgentLoop"
    (folder / "agents.yaml").write_text(
        yaml.dump([{"name": "patient", "_target_": target, "patience": 3}])
    )
    (folder / "users.yaml").write_text(
        "interaction: [{name: number_user, class_name: 'examples.guess_number.user:NumberUser'}]"
    )
    (folder / "reward.py").write_text("def compute_score(*_): return 1.0\n")
    return folder


def read(project: Path, *overrides: str, training: bool = True) -> Inputs:
    config = load_config(
        [
            f"model.path={project}/model",
            f"data.train_files=[{project}/rows.jsonl]",
            "data.train_batch_size=4",
            *overrides,
        ]
    )
    return read_inputs(config, training=training)


def problem(project: Path, *overrides: str, training: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        read(project, *overrides, training=training)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_good_input(project: Path) -> None:
    inputs = read(
        project,
        f"data.val_files=[{project}/rows.jsonl, {project}/rows.jsonl]",
        f"rollout.multi_turn.tool_config_path={project}/tools.yaml",
        "rollout.agent.default_agent_loop=tool_agent",
        f"reward.custom_reward_function.path={project}/reward.py",
    )
    assert list(inputs.tools) == ["calculator"]
    assert (len(inputs.train_rows), len(inputs.val_rows)) == (8, 16)
    assert inputs.agent_loops == {}
    assert inputs.tokenizer.chat_template == CHATML_TEMPLATE


def test_agent_loops_of_a_file_serve_rows_and_the_default(project: Path, tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", [make_row(i, agent_name="patient") for i in range(4)]
    )
    inputs = read(
        project,
        f"data.train_files=[{rows}]",
        f"rollout.agent.agent_loop_config_path={project}/agents.yaml",
        "rollout.agent.default_agent_loop=patient",
    )
    context = AgentLoopContext(
        server=None,  # type: ignore[arg-type]  # nothing is sampled
        tokenizer=inputs.tokenizer,
        chat=inputs.chat,
        tools=inputs.tools,
        config=load_config(["model.path=m"]),
        agent_loops=inputs.agent_loops,
    )
    loop = make_agent_loop("patient", context)
    assert isinstance(loop, PatientAgentLoop) and loop.patience == 3


def test_evaluation_needs_validation_rows_only(project: Path) -> None:
    rows = f"data.val_files=[{project}/rows.jsonl]"
    inputs = read(project, rows, "data.train_files=[]", "data.train_batch_size=64", training=False)
    assert (inputs.train_rows, len(inputs.val_rows)) == ([], 8)
    assert problem(project, training=False).startswith("data.val_files: got []; name at least one")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/no/such/model", "model.path: got '/no/such/model', which is not a folder"),
        ("ref.path=/no/such/ref", "ref.path: got '/no/such/ref', which is not a folder"),
        ("algorithm.adv_estimator=grop", "unknown advantage estimator 'grop'; did you mean 'grpo'"),
        ("algorithm.options={x: 1}", "algorithm.adv_estimator: advantage estimator 'grpo' has no"),
        ("algorithm.adv_estimator=gae", "it needs the values of a critic; write `critic: {}`"),
        ("rollout.n=1", "rollout.n: got 1; algorithm.adv_estimator=grpo compares the answers"),
        ("actor.policy_loss.loss_mode=vanila", "unknown policy loss 'vanila'; did you mean 'vanil"),
        ("actor.policy_loss.options={x: 1}", "policy loss 'vanilla' has no option 'x'"),
        ("actor.kl_loss_type=kk", "actor.kl_loss_type: unknown KL estimate 'kk'"),
        ("rollout.multi_turn.format=hermis", "rollout.multi_turn.format: unknown tool parser"),
        ("rollout.name=vlm", "rollout.name: unknown inference engine 'vlm'; did you mean 'vllm'?"),
        ("trainer.logger=[jsnl]", "trainer.logger: unknown tracker 'jsnl'; did you mean 'jsonl'?"),
        (
            "trainer.logger=[swanlab]",
            "got 'swanlab', but it is not installed; pip install 'minirl[swanlab]'",
        ),
        ("reward.reward_manager=naif", "reward.reward_manager: unknown reward manager 'naif'"),
        ("reward.reward_manager=json:dumps", "reward.reward_manager: 'json:dumps': TypeError: "),
        ("reward.reward_kwargs={x: 1}", "reward.reward_kwargs.x: no such option"),
        (
            "reward.custom_reward_function.path=/no/reward.py",
            "reward.custom_reward_function.path: got '/no/reward.py'; no such file",
        ),
        (
            "rollout.agent.default_agent_loop=minirl.agent_loop:AgentLoopBase",
            "default_agent_loop: AgentLoopBase has no method `run`; write it",
        ),
        (
            "rollout.agent.default_agent_loop=json:dumps",
            "default_agent_loop: 'json:dumps' is not a subclass of AgentLoopBase",
        ),
        ("rollout.agent.default_agent_loop=tool_agnt", "rollout.agent.default_agent_loop: unknown"),
        ("rollout.agent.agent_loop_config_path=/no/a.yaml", "/no/a.yaml: cannot be read: No such"),
        ("rollout.multi_turn.tool_config_path=/no/t.yaml", "/no/t.yaml: cannot be read: No such"),
        ("model.chat_template=/no/t.jinja", "model.chat_template: the chat template cannot be us"),
        ("data.train_files=[]", "data.train_files: got []; name at least one .parquet or .jsonl"),
        ("data.train_files=[/no/rows.jsonl]", "/no/rows.jsonl: no such file"),
        ("data.train_batch_size=9", "data.train_batch_size: got 9; data.train_files have only 8"),
        (
            "rollout.max_model_len=1024",
            "rollout.max_model_len: got 1024; a prompt of data.max_prompt_length=1024 would",
        ),
        ("data.max_prompt_length=20", "but the prompt of row 0 of data.train_files has"),
    ],
)
def test_bad_settings(
    project: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", None)  # as where it is not installed
    assert message in problem(project, "rollout.sync_check=null", override)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "row 1: column prompt is missing; there are question"),
        (make_row(1, prompt="?"), "row 1, column prompt: got '?'; must be a list"),
        (
            make_row(1, agent_name="tool_agnt"),
            "row 1, column agent_name: unknown agent loop 'tool_",
        ),
        (make_row(1, images=[{"bytes": "/9j/"}]), "row 1, column images: a policy reads text only"),
        (make_row(1, agent_name="patient"), "row 1, column agent_name: unknown agent loop 'patien"),
        (
            make_row(1, data_source="gsm8k"),
            "row 1, column data_source: unknown reward function for data_source 'gsm8k' (known: "
            "calculator, openai/gsm8k); name your own in reward.custom_reward_function",
        ),
        (
            make_row(1, prompt=[{"role": "human", "content": "?"}]),
            "row 1, column prompt: the chat template leaves out messages of role 'human'; write",
        ),
        ({"prompt": make_row(1)["prompt"]}, "row 1, column data_source: unknown reward function"),
    ],
)
def test_bad_rows(project: Path, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    file = write_rows(tmp_path / "bad.jsonl", [make_row(0), row, make_row(2)])
    assert f"{file}: {message}" in problem(
        project, f"data.train_files=[{project}/rows.jsonl, {file}]"
    )


def test_a_custom_reward_function_serves_every_data_source(project: Path, tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": make_row(i)["prompt"]} for i in range(4)]
    )
    reward = f"reward.custom_reward_function.path={project}/reward.py"
    assert len(read(project, f"data.train_files=[{rows}]", reward).train_rows) == 4


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("minirl.tools.calculator:Calculater", "has no 'Calculater'; did you mean 'Calculator"),
        ("no_such_tools:Tool", "no module 'no_such_tools' can be imported"),
        ("json:dumps", "'json:dumps' is neither a BaseTool class nor a @function_tool"),
    ],
)
def test_a_tool_that_is_not_there(project: Path, tmp_path: Path, target: str, message: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.dump({"tools": [{"class_name": target}]}))
    found = problem(project, f"rollout.multi_turn.tool_config_path={file}")
    assert found.startswith(f"{file}: tools, entry 1: ") and message in found


@pytest.mark.parametrize(
    ("key", "file", "what"),
    [
        ("tool_config_path", "tools.yaml", "calls no tool"),
        ("interaction_config_path", "users.yaml", "asks no user"),
    ],
)
def test_tools_and_users_that_no_agent_loop_would_ask(
    project: Path, tmp_path: Path, key: str, file: str, what: str
) -> None:
    setting = f"rollout.multi_turn.{key}={project}/{file}"
    assert problem(project, setting) == (
        f"rollout.multi_turn.{key}: got '{project}/{file}'; single_turn_agent, which answers all "
        f"rows, {what}; set rollout.agent.default_agent_loop=tool_agent, or the rows' agent_name"
    )
    some = [make_row(i, agent_name="tool_agent" if i else None) for i in range(4)]
    rows = write_rows(tmp_path / "rows.jsonl", some)
    assert read(project, setting, f"data.train_files=[{rows}]").train_rows


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "has no config.json; name a folder written by save_pretrained"),
        ("model.safetensors", "has a config.json but no weights"),
        ("tokenizer*", "which has no tokenizer"),
    ],
)
def test_an_incomplete_model_folder(
    project: Path, tmp_path: Path, removed: str, message: str
) -> None:
    folder = shutil.copytree(project / "model", tmp_path / "model")
    for file in list(folder.glob(removed)):
        file.unlink()
    found = problem(project, f"model.path={folder}")
    assert message in found and str(folder) in found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("elif message.role == 'tool'", "elif message.role == 'observation'", "tool"),
        # thinking of earlier turns is dropped: what was sampled is not what the template renders
        ("(message.content or '')", "(message.content or '')[:9 if loop.last else 3]", ""),
    ],
)
def test_a_template_that_cannot_be_extended_with_tools(
    project: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in CHATML_TEMPLATE
    file = tmp_path / "template.jinja"
    file.write_text(CHATML_TEMPLATE.replace(old, new))
    template = f"model.chat_template={file}"
    found = problem(project, template, f"rollout.multi_turn.tool_config_path={project}/tools.yaml")
    assert found.startswith("model.chat_template: the chat template cannot be used: ")
    assert message in found
    read(project, template)  # without tools nothing is appended
    users = f"rollout.multi_turn.interaction_config_path={project}/users.yaml"
    if message:  # a user's words can be
        read(project, template, users, "rollout.agent.default_agent_loop=tool_agent")
    else:
        assert "cannot be used: cannot extend by user messages" in problem(project, template, users)


def test_a_prompt_that_the_template_refuses(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{%- if '3 + 3' in messages[0].content %}{{ raise_exception('no threes') }}"
                    "{%- endif %}" + CHATML_TEMPLATE)  # fmt: skip
    found = problem(project, f"model.chat_template={file}")
    assert found.startswith("data.train_files: prompt [{'role': 'user', 'content': 'What is 3 + 3")
    assert "no threes" in found


def test_only_prompts_that_may_be_too_long_are_encoded(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = [], ChatBuilder.encode
    monkeypatch.setattr(ChatBuilder, "encode", lambda c, t: (encoded.append(t), encode(c, t))[1])
    questions = ["Why?", "Why é?", "Why so long?" * 10]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    path = write_rows(tmp_path / "rows.jsonl", [make_row(0, prompt=prompt) for prompt in prompts])
    limits = ["data={max_prompt_length: 100, filter_overlong_prompts: true, train_batch_size: 1}"]
    kept = read(project, *limits, f"data.train_files=[{path}]").train_rows
    assert [row["prompt"] for row in kept] == prompts[:2]
    assert [text for text in encoded if "Why" in text] == [
        ChatBuilder(byte_tokenizer()).render(prompts[i])
        for i in (1, 2, 0)  # one for its tokens
    ]


def test_a_run_goes_on_with_the_batches_of_its_checkpoint(project: Path, tmp_path: Path) -> None:
    """Told before models are loaded."""
    step = tmp_path / "run" / "checkpoints" / "step_000001"
    step.mkdir(parents=True)
    data = PromptLoader([{}] * 8, 3).state_dict()
    (step / "meta.json").write_text(json.dumps({"bytes": {}, "extra": {"data": data}}))
    folder = [f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=run"]
    found = problem(project, *folder, "data.train_batch_size=4")
    assert found.startswith("data.train_batch_size: got 4; the checkpoint was made with 3; restore")


def test_tokens_that_the_model_does_not_know(project: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(project / "model", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 257}))
    assert problem(project, f"model.path={folder}") == (
        f"model.path: got '{folder}'; the model knows 257 tokens, and its tokenizer writes a "
        "prompt with token 258; give the model more (resize_token_embeddings)"
    )


def test_tensor_parallel_size_divides_the_world() -> None:
    config = load_config(["model.path=m", "rollout.tensor_parallel_size=2", "trainer.device=cpu"])
    with pytest.raises(ConfigError, match=r"got 2, which does not divide the 3 ranks; start a mu"):
        place(config, {"WORLD_SIZE": "3"})
    assert place(config, {"WORLD_SIZE": "4", "RANK": "3"}).leader == 2


@pytest.mark.parametrize(
    ("found", "message"),
    [({}, "vllm is not installed"), ({"vllm": "0.24.1"}, "vllm 0.24.1 is installed; minirl is ma")],
)
def test_a_missing_or_old_vllm(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], message: str
) -> None:
    from importlib.metadata import PackageNotFoundError

    def version(package: str) -> str:
        if package not in found:
            raise PackageNotFoundError(package)
        return found[package]

    check_vllm()  # the one that is here will do
    monkeypatch.setattr("minirl.rollout.vllm_server.version", version)
    with pytest.raises(ConfigError, match=f"rollout.name: {message}"):
        check_vllm()


def test_the_user_of_a_row_has_to_be_there(project: Path, tmp_path: Path) -> None:
    extra_info = {"interaction_kwargs": {"name": "number_user", "number": 3}}
    rows = write_rows(
        tmp_path / "rows.jsonl", [make_row(i, extra_info=extra_info) for i in range(4)]
    )
    files = f"data.train_files=[{rows}]"
    assert problem(project, files) == (
        f"{rows}: row 0, column extra_info.interaction_kwargs.name: no interaction 'number_user' "
        "in rollout.multi_turn.interaction_config_path (known: none)"
    )
    users = f"rollout.multi_turn.interaction_config_path={project}/users.yaml"
    asked = "rollout.agent.default_agent_loop=tool_agent"
    assert list(read(project, files, users, asked).interactions) == ["number_user"]


def test_the_tools_that_a_row_selects_have_to_be_there(project: Path, tmp_path: Path) -> None:
    extra_info = {"tool_selection": ["calculater"]}
    rows = write_rows(
        tmp_path / "rows.jsonl", [make_row(i, extra_info=extra_info) for i in range(4)]
    )
    files = f"data.train_files=[{rows}]"
    tools = f"rollout.multi_turn.tool_config_path={project}/tools.yaml"
    asked = "rollout.agent.default_agent_loop=tool_agent"
    assert problem(project, files, tools, asked) == (
        f"{rows}: row 0: extra_info.tool_selection: no tool 'calculater'; did you mean "
        "'calculator'? (known: calculator)"
    )
    read(project, files)  # single_turn_agent calls none


@pytest.mark.parametrize(
    "key",
    [
        *("rollout.agent.default_agent_loop", "rollout.multi_turn.format", "reward.reward_manager"),
        *("algorithm.adv_estimator", "algorithm.kl_ctrl.type", "actor.policy_loss.loss_mode"),
    ],
)
def test_a_module_that_raises(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    (tmp_path / "raising_parts.py").write_text("undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = problem(project, f"{key}=raising_parts:mine")
    assert found.startswith(key.removesuffix(".type").removesuffix(".loss_mode"))
    assert found.endswith(
        "'raising_parts:mine': it cannot be imported: NameError: name 'undefined_name' is not "
        "defined"
    )


def test_the_engine_of_transformers_has_one_device_and_no_arguments(project: Path) -> None:
    settings = ("rollout.name=transformers", "rollout.tensor_parallel_size=2")
    assert problem(project, *settings) == (
        "rollout.tensor_parallel_size: got 2; rollout.name=transformers computes on one device; "
        "write 1"
    )
    settings = ("rollout.name=transformers", "rollout.engine_kwargs.seed=1")
    assert problem(project, *settings) == (
        "rollout.engine_kwargs: got {'seed': 1}; rollout.name=transformers takes none; leave it out"
    )
    assert "rollout.mode: unknown rollout mode 'asink'" in problem(project, "rollout.mode=asink")
