import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import minirl.config
from minirl.config import Config, ConfigError, leaf_keys, load_config, to_yaml
from minirl.config.loading import section_of

ROOT = Path(__file__).parents[1]
MODEL = "model.path=m"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def problem(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([MODEL, *arguments])
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_files_merge_left_to_right_and_overrides_come_last(tmp_path: Path) -> None:
    base = write(
        tmp_path / "base.yaml",
        "model: {path: base}\nrollout: {n: 2, temperature: 0.5, agent: {num_workers: 0}}\n"
        "data: {train_files: [a, b]}\n",
    )
    recipe = write(tmp_path / "recipe.yml", "rollout: {n: 3}\ndata: {train_files: [c]}\n")
    config = load_config(["rollout.n=4", base, recipe, "trainer.seed=7", "trainer.seed=8"])
    assert (config.model.path, config.rollout.n, config.trainer.seed) == ("base", 4, 8)
    assert config.rollout.temperature == 0.5  # sections merge
    assert config.data.train_files == ["c"]  # lists replace
    assert load_config([base, recipe]).rollout.n == 3
    assert load_config([recipe, base]).rollout.n == 2


def test_a_file_may_lie_in_a_folder_with_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "lr=1e-5").mkdir()
    file = write(tmp_path / "lr=1e-5" / "config.yaml", "rollout: {n: 3}\n")
    config = load_config([MODEL, file, "rollout.multi_turn.tool_config_path=tools.yaml"])
    assert (config.rollout.n, config.rollout.multi_turn.tool_config_path) == (3, "tools.yaml")


def test_values_are_yaml_with_the_types_of_the_fields() -> None:
    config = load_config(
        [
            MODEL,
            "trainer.experiment_name=3",
            "actor.optim.lr=1e-3",
            "actor.optim.betas=[0.8, 1e-1]",
            "rollout.temperature=1",
            "rollout.sync_check=null",
            "reward.custom_reward_function.path=r.py",
            "algorithm.options={beta: [1, 2]}",
            "trainer.default_local_dir=runs/${trainer.seed}",
        ]
    )
    assert config.trainer.experiment_name == "3"
    assert config.actor.optim.lr == 0.001
    assert config.actor.optim.betas == (0.8, 0.1)
    assert isinstance(config.rollout.temperature, float)
    assert config.rollout.sync_check is None
    assert config.reward.custom_reward_function is not None  # a section that was null
    assert config.algorithm.options == {"beta": [1, 2]}
    assert config.trainer.run_dir == Path("runs/0/3")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rolout.n=1", "rolout: no such key; did you mean 'rollout'?"),
        ("rollout.temprature=1", "rollout.temprature: no such key; did you mean 'temperature'?"),
        ("rollout.agent.workers=1", "rollout.agent.workers: no such key; did you mean 'num_wo"),
        ("rollout.sync_check.x=1", "no such key (known: max_logprob_diff, probe_length)"),
        ("ref.pth=x", "ref.pth: no such key; did you mean 'path'?"),
        ("rollout.max_tool_calls=1", "did you mean rollout.multi_turn.max_tool_calls?"),
        ("actor.lr=1", "actor.lr: no such key; did you mean actor.optim.lr or critic.optim.lr?"),
        # verl's, of which some are like none here, or like the wrong one
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref: no such key; verl's actor_rollout_r"),
        ("data.max_response_length=512", "max_response_length: write rollout.response_length ["),
        ("actor.ppo_micro_batch_size_per_gpu=4", "write max_tokens_per_micro_batch, in tokens"),
        ("data.val_batch_size=64", "verl's val_batch_size: leave it out, all prompts are asked at"),
        ("actor.tis_imp_ratio_cap=2", "write algorithm.rollout_correction.rollout_is_threshold ["),
        ("custom_reward_function.path=r.py", "write reward.custom_reward_function"),
        ("algorithm.filter_groups.enable=true", "verl's enable: leave it out, a section is off"),
        ("trainer.n_gpus_per_node=8", "verl's n_gpus_per_node: give torchrun --nproc-per-node"),
    ],
)
def test_an_unknown_key_is_told_what_to_write(override: str, message: str) -> None:
    assert message in problem(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=abc", "rollout.n: got 'abc'; must be a whole number"),
        ("rollout.n=1.5", "rollout.n: got 1.5; must be a whole number"),
        ("rollout.n=true", "rollout.n: got True; must be a whole number"),
        ("rollout.n=null", "rollout.n: got None; must be a whole number"),
        ("rollout.max_model_len=x", "got 'x'; must be a whole number or null"),
        ("rollout.temperature=hot", "rollout.temperature: got 'hot'; must be a number"),
        ("data.shuffle=maybe", "data.shuffle: got 'maybe'; must be true or false"),
        ("data.truncation=up", "got 'up'; must be one of error, left, right, middle"),
        ("data.train_files=a", "data.train_files: got 'a'; must be a list [...], each a text"),
        ("data.train_files=[[a]]", "data.train_files: got [['a']]; must be a list"),
        ("data.train_files={a: 1}", "data.train_files: got {'a': 1}; must be a list"),
        ("data.train_files.0=a", "data.train_files: got {'0': 'a'}; must be a list"),
        ("rollout.multi_turn=3", "rollout.multi_turn: got 3; must be a section (tool_config_path"),
        ("rollout=null", "rollout: got None; must be a section (name, mode, n"),
        ("ref=3", "ref: got 3; must be a section (path) or null"),
        ("actor.optim.weight_decay=-1", "actor.optim.weight_decay: got -1.0; 0 or more"),
        ("actor.optim.betas=[1]", "actor.optim.betas: got [1]; must be a list of 2, each a num"),
        ("actor.optim.betas=[a,b]", "actor.optim.betas: got ['a', 'b']; must be a list of 2"),
        ("rollout.mask_terminations=[eror]", "got ['eror']; must be a list [...], each one of"),
        ("algorithm.options=3", "algorithm.options: got 3; must be a mapping"),
        ("model.path={x: 1}", "model.path: got {'x': 1}; must be a text"),
        ("rollout.n=[1", "rollout.n: got '[1'; not valid YAML"),
        (
            "rollout.multi_turn.stop_when=####",
            "stop_when: got '####'; a comment in YAML from the # on: quote it, rollout.multi_turn.",
        ),
        ("trainer.experiment_name=run #3", "got 'run #3'; a comment in YAML from the # on: quote"),
        ("trainer.experiment_name=${nope}", "trainer.experiment_name: Interpolation key 'nope'"),
        ("rollout.n=${model.path}", "Value 'm' of type 'str' could not be converted to Integer"),
    ],
)
def test_a_wrong_type_names_key_value_and_what_is_allowed(override: str, message: str) -> None:
    assert message in problem(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.n=0"], "rollout.n: got 0; must be greater than 0"),
        (["actor.optim.lr=0"], "actor.optim.lr: got 0.0; must be greater than 0"),
        (["actor.optim.betas=[0.9, 1]"], "actor.optim.betas: got (0.9, 1.0)"),
        (["trainer.test_freq=0"], "trainer.test_freq: got 0; a number of steps, or -1"),
        (["rollout.gpu_memory_utilization=1"], "a share between 0 and 1"),
        (["rollout.max_failure_fraction=2"], "got 2.0; must be between 0 and 1"),
        (["rollout.max_retries=-1"], "rollout.max_retries: got -1"),
        (["rollout.trace.max_samples_per_step=-2"], "max_samples_per_step: got -2; a number of"),
        (["rollout.agent.num_workers=-1"], "num_workers: got -1; a number of processes, or 0"),
        (["rollout.mode=sync", "rollout.agent.num_workers=2"], "got 2; rollout.mode=sync runs in"),
        (["rollout.agent.sticky_imbalance=0.5"], "sticky_imbalance: got 0.5; >= 1"),
        (["rollout.val_kwargs.top_p=0"], "rollout.val_kwargs.top_p: got 0.0; 0 < top_p <= 1"),
        (["rollout.val_kwargs.n=2"], "set rollout.val_kwargs.temperature > 0 or n=1"),
        (["rollout.multi_turn.stop_when='('"], "got '('; not a regular expression: missing )"),
        (["actor.use_kl_loss=true"], "ref: got null, but actor.use_kl_loss=true needs"),
        (["actor.ppo_mini_batch_size=5"], "got 5; must divide data.train_batch_size=64"),
        (["model.path=''"], "model.path: got ''; name a model folder"),
        (["algorithm.filter_groups.metric=seq_reward"], "what verl calls so is `reward` here"),
        (
            ["reward.reward_kwargs.overlong_buffer_cfg.len=512"],
            "overlong_buffer_cfg: got {'len': 512}; what verl has there is a section here; write ",
        ),
        (
            ["data.max_prompt_length=8", "rollout.response_length=8"],
            "probe_length: got 32; fewer than",
        ),
    ],
)
def test_a_contradiction_names_its_remedy(overrides: list[str], message: str) -> None:
    assert message in problem(*overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {n: abc}", "rollout.n: got 'abc'; must be a whole number [{file}]"),
        ("rollout: [", "{file}: not valid YAML"),
        ("- rollout", "{file}: expected sections (data, model"),
        ("rollout: {n: 1}\nrollout: {n: 2}", "{file}: not valid YAML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "bad.yaml", text)
    assert message.format(file=file) in problem(file)


def test_arguments_that_are_neither_file_nor_override() -> None:
    assert problem("missing.yaml") == "missing.yaml: no such file"
    assert problem("rollout.n") == "'rollout.n': expected a .yaml file or key=value"


def test_the_resolved_config_loads_again(tmp_path: Path) -> None:
    config = load_config(
        [
            *(MODEL, "ref={}", "rollout.sync_check=null", "trainer.experiment_name='12'"),
            *(
                "actor.policy_loss.options={x: [1, 2]}",
                "trainer.default_local_dir=a/${trainer.seed}",
                r"reward.reward_kwargs={prompt: 'Is it \${2x}?'}",  # no interpolation, but a text
            ),
        ]
    )
    again = load_config([write(tmp_path / "config.yaml", to_yaml(config))])
    assert again == config
    assert again.trainer.default_local_dir == "a/0"
    assert again.reward.reward_kwargs == {"prompt": "Is it ${2x}?"}
    assert again != load_config([MODEL])


def unread(keys: list[str], sources: list[str]) -> list[str]:
    """Keys whose last part is never read as an attribute."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return [key for key in keys if key.rsplit(".", 1)[-1] not in read]


def users_of_the_config() -> list[str]:
    """Sources that may read it. Checks of a value in minirl/config do not count as reading it, only
    the properties that others use do."""
    schema = [*Path(minirl.config.__file__).parent.glob("*.py")]
    files = [p for p in (ROOT / "minirl").rglob("*.py") if p not in schema]
    properties = [
        ast.unparse(node)
        for source in schema
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list)
    ]
    return [p.read_text() for p in files] + properties


BY_SIGNATURE = {
    "algorithm.norm_adv_by_std_in_grpo": "ADV_ESTIMATORS",
    "algorithm.gamma": "ADV_ESTIMATORS",
    "algorithm.lam": "ADV_ESTIMATORS",
    "algorithm.cpo.weight_clip": "ADV_ESTIMATORS",
    "algorithm.kl_ctrl.kl_coef": "KL_CONTROLLERS",
    "actor.clip_ratio": "POLICY_LOSSES",
    "actor.clip_ratio_low": "POLICY_LOSSES",
    "actor.clip_ratio_high": "POLICY_LOSSES",
    "actor.clip_ratio_c": "POLICY_LOSSES",
}
"""Keys handed over to the function of a registry that has an option of that name."""


def test_no_key_exists_that_nothing_reads() -> None:
    import minirl.algorithms
    from minirl.registry import option_names

    keys = set(leaf_keys()) - BY_SIGNATURE.keys()
    assert unread(sorted(keys), users_of_the_config()) == []
    for key, registry_name in BY_SIGNATURE.items():
        registry = getattr(minirl.algorithms, registry_name)
        name = key.rsplit(".", 1)[-1]
        assert any(name in option_names(registry.find(entry)) for entry in registry), key


def test_a_key_that_nothing_reads_is_found() -> None:
    assert unread(["a.invented_key", "rollout.n"], users_of_the_config()) == ["a.invented_key"]
    assert unread(["rollout.n"], ["n = 3; print(n)"]) == ["rollout.n"]  # a variable is no reading


def sections(section: type = Config) -> Iterator[type]:
    yield section
    for name in (f.name for f in fields(section)):
        if inner := section_of(inspect.get_annotations(section)[name]):
            yield from sections(inner)


SECTIONS = sorted(set(sections()) - {Config}, key=lambda section: section.__name__)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)
def test_every_field_has_a_docstring(section: type) -> None:
    [definition] = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef) and section.__doc__
    documented = {
        field.target.id
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and is_text(text) and isinstance(field.target, ast.Name)
    }
    bare = {f.name for f in fields(section) if not has_section(section, f.name)} - documented
    assert not bare


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def has_section(section: type, name: str) -> bool:
    """A section speaks for itself: its class has the docstring."""
    return section_of(inspect.get_annotations(section)[name]) is not None


def test_every_section_is_found() -> None:
    classes = [v for v in vars(minirl.config).values() if isinstance(v, type) and is_dataclass(v)]
    assert set(sections()) == set(classes)
