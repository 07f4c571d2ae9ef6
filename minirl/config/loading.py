"""YAML files merge, then `key=value` pairs; what does not fit the schema is said in our words."""

import re
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minirl.config.checks import ConfigError
from minirl.config.schema import Config
from minirl.registry import nearest


def load_config(arguments: list[str]) -> Config:
    """Merge YAML files (left to right), then `key=value` pairs, into a checked Config.

    Raises ConfigError with one line that names the key, the value and what is allowed.
    """
    files = [a for a in arguments if a.endswith((".yaml", ".yml")) and _is_path(a)]
    overrides = [a for a in arguments if "=" in a and a not in files]
    if stray := [a for a in arguments if a not in files and a not in overrides]:
        raise ConfigError(f"{stray[0]!r}: expected a .yaml file or key=value")
    updates = [_read_file(file) for file in files] + [_read_override(o) for o in overrides]
    merged: Any = OmegaConf.structured(Config)
    for place, update in zip(files + overrides, updates, strict=True):
        _check_section(OmegaConf.to_container(update), Config, "", place)
        merged = OmegaConf.merge(merged, update)
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # of an interpolation: everything else was checked
        problem = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'config'}: {problem}") from error
    assert isinstance(config, Config)
    return config


def run_config_file(run_dir: Path) -> Path:
    """The config that a run has left in its directory; ConfigError where there is no run."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        words = "has no config.yaml; name a run directory (runs/<experiment>)"
        raise ConfigError(f"{run_dir}: {words}")
    return file


def to_yaml(config: Config) -> str:
    """The resolved config, as it can be loaded again."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(asdict(config))))


def _escaped(value: Any) -> Any:
    """`value`, with a backslash before every `${` in a text, which no interpolation is any more."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def leaf_keys(section: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key that holds a value, in the order of the fields."""
    keys = []
    for name, hint in get_type_hints(section).items():
        inner = section_of(hint)
        keys += leaf_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _is_path(argument: str) -> bool:
    """A run may be named lr=1e-5, and its config is then runs/lr=1e-5/config.yaml."""
    return "=" not in argument or Path(argument).is_file()


def _read_file(file: str) -> DictConfig:
    if not Path(file).is_file():
        raise ConfigError(f"{file}: no such file")
    try:
        loaded = OmegaConf.load(file)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, DictConfig):
        sections = ", ".join(f.name for f in fields(Config))
        raise ConfigError(f"{file}: expected sections ({sections}), got a list")
    return loaded


def _read_override(override: str) -> DictConfig:
    key, _, value = override.partition("=")
    quoted = f"quote it, {key}='\"...\"'"
    try:
        node = yaml.compose(value)
        if value[node.end_mark.index if node else 0 :].strip():
            problem = "a comment in YAML from the # on"
            raise ConfigError(f"{key}: got {value!r}; {problem}: {quoted}")
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}: got {value!r}; not valid YAML: {quoted}") from error


def _check_section(content: Any, section: type, prefix: str, place: str) -> None:
    """Raise ConfigError, in our words, for what OmegaConf could not put into `section`."""
    hints = get_type_hints(section)
    for name, value in content.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise ConfigError(f"{key}: no such key{_nearest_key(str(name), hints)} [{place}]")
        inner = section_of(hints[name])
        if inner and isinstance(value, dict):
            _check_section(value, inner, f"{key}.", place)
        elif not _fits(value, hints[name]):
            raise ConfigError(f"{key}: got {value!r}; must be {_words(hints[name])} [{place}]")


VERL = {
    "actor_rollout_ref": "leave it out, actor, rollout, ref and model are sections of their own",
    "calculate_log_probs": "leave it out, they are always there",
    "custom_reward_function": "write reward.custom_reward_function",
    "do_sample": "write temperature, 0 for the likeliest token",
    "enable": "leave it out, a section is off where it is null",
    "fsdp_config": "write actor.offload",
    "gen_batch_size": "leave it out, every draw is of train_batch_size prompts",
    "log_prob_micro_batch_size_per_gpu": "leave it out, actor.max_tokens_per_micro_batch holds",
    "max_response_length": "write rollout.response_length",
    "n_gpus_per_node": "give torchrun --nproc-per-node",
    "nnodes": "give torchrun --nnodes",
    "ppo_max_token_len_per_gpu": "write max_tokens_per_micro_batch",
    "ppo_micro_batch_size": "write max_tokens_per_micro_batch, in tokens",
    "ppo_micro_batch_size_per_gpu": "write max_tokens_per_micro_batch, in tokens",
    "project_name": "leave it out, trackers have settings of their own (WANDB_PROJECT)",
    "reward_model": "write reward, for a model's score reward.reward_model",
    "tis_imp_ratio_cap": "write algorithm.rollout_correction.rollout_is_threshold",
    "use_dynamic_bsz": "leave it out, batches are always packed",
    "use_remove_padding": "leave it out, batches are always packed",
    "val_batch_size": "leave it out, all prompts are asked at once",
    "val_only": "leave it out, run python -m minirl.evaluate",
    "warmup_style": "write lr_scheduler_type",
}
"""Keys of verl's that are like none here, or like the wrong one, and what to do about them."""


def _nearest_key(name: str, known: Any) -> str:
    """What to write: for a key of verl's, else the nearest of the section, or those of the same
    name in other ones."""
    if name in VERL:
        return f"; verl's {name}: {VERL[name]}"
    elsewhere = [key for key in leaf_keys() if key.endswith(f".{name}")]
    return f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else nearest(name, known)


def section_of(hint: Any) -> type | None:
    """The dataclass of a field that is a section, null or not; None for a field with a value."""
    found = [h for h in (hint, *get_args(hint)) if isinstance(h, type) and is_dataclass(h)]
    return found[0] if found else None


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or (isinstance(value, str) and "${" in value):  # resolved in the end
        return True
    if origin in (Union, UnionType):  # the former where a Literal is in it
        return any(_fits(value, h) for h in args)
    if origin is Literal:
        return value in args
    if origin is dict:
        return isinstance(value, dict)
    if origin is list:
        return isinstance(value, list) and all(_fits(v, args[0]) for v in value)
    if origin is tuple:
        return isinstance(value, list) and [*map(_fits, value, args)] == [True] * len(args)
    if hint in (float, str):  # numbers become text where text is wanted
        kinds = (int, float) if hint is float else (int, float, str)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return type(value) is hint


WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
}


def _words(hint: Any) -> str:
    """What a type allows, for an error message."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return f"a section ({', '.join(f.name for f in fields(hint))})"
    if origin in (Union, UnionType):  # the former where a Literal is in it
        return " or ".join(map(_words, args))
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is dict:
        return "a mapping {key: value}"
    if origin is list:
        return f"a list [...], each {_words(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each {_words(args[0])}"
    return WORDS[hint]
