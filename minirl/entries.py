"""Lists of named components in YAML files: tools, agent loops, simulated users."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from minirl.config import ConfigError
from minirl.registry import locate, nearest

T = TypeVar("T")


def load_entries(
    path: str | Path, section: str, build: Callable[[dict[str, Any]], Iterable[tuple[str, T]]]
) -> dict[str, T]:
    """What `build` makes of each entry of `section: [{...}, ...]`, by name, in order.

    An empty `section` stands for a file that is a list. ConfigError names the file, the entry, and
    what is wrong with it: what `build` said, or code of the user's that it ran.
    """
    entries, place = read_yaml(path), f"{path}: entry"
    if section:
        entries = entries.get(section) if isinstance(entries, dict) else None
        place = f"{path}: {section}, entry"
    if not isinstance(entries, list):
        expected = f"`{section}:` and a list" if section else "a list"
        raise ConfigError(f"{path}: expected {expected} of entries")
    built: dict[str, T] = {}
    for number, entry in enumerate(entries, start=1):
        try:
            if not isinstance(entry, dict):
                raise ValueError(f"got {entry!r}; expected a mapping")
            for name, component in build(entry):
                if name in built:
                    raise ValueError(f"there is already one named {name!r}")
                built[name] = component
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"{place} {number}: {error}") from error
        except Exception as error:  # of the user's module or class, whatever it is
            raise ConfigError(f"{place} {number}: {type(error).__name__}: {error}") from error
    return built


def locate_class(entry: dict[str, Any], kind: str, keys: Iterable[str]) -> Any:
    """What `class_name` of an entry names; ValueError if it has none, or other keys than these."""
    if not isinstance(entry.get("class_name"), str):
        raise ValueError("class_name: missing; write package.module:Class")
    for key in entry.keys() - set(keys):
        raise ValueError(f"{key}: no such key{nearest(str(key), keys)}")
    config = entry.get("config") or {}
    if not isinstance(config, dict):
        raise ValueError(f"config: got {config!r}; expected a mapping")
    return locate(entry["class_name"], kind)


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file; ConfigError when it is not there or not YAML."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
