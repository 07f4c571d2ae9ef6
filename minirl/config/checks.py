"""What the sections of the config check their values with."""

from typing import Any


class ConfigError(ValueError):
    """Input that cannot run; the message starts with the dotted key or the place in a file."""


def require(condition: bool, key: str, value: Any, remedy: str) -> None:
    """Raise ConfigError `key: got value; remedy` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{key}: got {value!r}; {remedy}")


def positive(section: str, config: Any, *names: str) -> None:
    """Raise ConfigError for the first of these fields that is neither null nor above 0."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value > 0, f"{section}.{name}", value, "must be greater than 0")


def share(section: str, config: Any, *names: str) -> None:
    """Raise ConfigError for the first of these fields that is not between 0 and 1."""
    for name in names:
        value = getattr(config, name)
        require(0 <= value <= 1, f"{section}.{name}", value, "must be between 0 and 1")
