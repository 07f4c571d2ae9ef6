"""`python -m minirl.algorithms`: every registered estimator, loss, KL term and aggregation."""

import inspect
from collections.abc import Callable
from typing import Any

from minirl.algorithms import (
    ADV_ESTIMATORS,
    AGGREGATIONS,
    KL_CONTROLLERS,
    KL_KINDS,
    POLICY_LOSSES,
    requirements,
)
from minirl.registry import Registry

SECTIONS: dict[str, Registry[Any]] = {
    "algorithm.adv_estimator": ADV_ESTIMATORS,
    "actor.policy_loss.loss_mode": POLICY_LOSSES,
    "actor.loss_agg_mode": AGGREGATIONS,
    "actor.kl_loss_type (each also with a +: its value, k2's gradient)": KL_KINDS,
    "algorithm.kl_ctrl.type": KL_CONTROLLERS,
}


def describe(names: list[str], entry: Callable[..., Any]) -> str:
    """Name, formula, options, requirements and paper of one entry, from its docstring."""
    lines = (inspect.getdoc(entry) or "(no docstring)").splitlines()
    block = ["  " + ", ".join(names), "      " + lines[0]]
    parameters = inspect.signature(entry).parameters.values()
    if options := [f"{p.name}={p.default}" for p in parameters if p.kind is p.KEYWORD_ONLY]:
        block.append("      options: " + ", ".join(options))
    if needs := requirements(entry).needs:
        block.append("      needs: " + ", ".join(needs))
    if modes := requirements(entry).agg_modes:
        block.append("      only with loss_agg_mode: " + ", ".join(modes))
    block += ["      " + line for line in lines if line.startswith("Paper:")]
    return "\n".join(block)


def listing() -> str:
    """The whole page."""
    sections = []
    for title, registry in SECTIONS.items():
        aliases: dict[Callable[..., Any], list[str]] = {}
        for name in registry:
            aliases.setdefault(registry.find(name), []).append(name)
        entries = [describe(names, entry) for entry, names in aliases.items()]
        sections.append("\n".join([title, *entries]))
    return "\n\n".join(sections)


if __name__ == "__main__":
    print(listing())
