"""`python -m minirl.algorithms` and what entries declare."""

import inspect
import subprocess
import sys

import pytest

from minirl.algorithms import (
    ADV_ESTIMATORS,
    KL_CONTROLLERS,
    POLICY_LOSSES,
    requirements,
    requires,
)
from minirl.algorithms.__main__ import SECTIONS
from minirl.config.algorithm import AlgorithmConfig, CPOConfig, KLControlConfig
from minirl.config.model import ActorConfig


def test_every_entry_has_a_formula_and_a_paper():
    for registry in SECTIONS.values():
        for name in registry:
            lines = (inspect.getdoc(registry.find(name)) or "").splitlines()
            assert lines[0] and lines[1] == "", name
            assert any(line.startswith("Paper:") for line in lines), name


def test_the_command_lists_every_name():
    command = [sys.executable, "-m", "minirl.algorithms"]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    listed = {name for line in page.splitlines() for name in line.strip().split(", ")}
    for section, registry in SECTIONS.items():
        assert section in page
        assert set(registry) <= listed
    assert "-A logp: the plain policy gradient." in page


def test_options_that_are_keys_have_the_defaults_of_the_config():
    """What the listing says of them is what a run without that key computes with."""
    keys = (
        vars(AlgorithmConfig()) | vars(CPOConfig()) | vars(KLControlConfig()) | vars(ActorConfig())
    )
    for registry in (ADV_ESTIMATORS, KL_CONTROLLERS, POLICY_LOSSES):
        for name in registry:
            for option in inspect.signature(registry.find(name)).parameters.values():
                assert option.default == keys.get(option.name, option.default), (name, option)


def test_declarations():
    assert requirements(ADV_ESTIMATORS.find("gae")).needs == ("values",)
    assert requirements(ADV_ESTIMATORS.find("rloo")).min_group_size == 2
    assert requirements(POLICY_LOSSES.find("kl_cov")).select
    assert requirements(POLICY_LOSSES.find("vanilla")).agg_modes is None

    @requires(needs=("rollout_logprobs",), agg_modes=("token-sum",))
    def mine(inputs): ...

    assert requirements(mine).needs == ("rollout_logprobs",)
    assert requirements(lambda inputs: inputs).needs == ()
    with pytest.raises(ValueError, match=r"got 'token-mean'.*set actor.loss_agg_mode=token-sum"):
        requirements(mine).check_agg_mode("policy loss 'mine'", "token-mean")
    with pytest.raises(TypeError, match="need"):
        requires(need=("values",))(lambda inputs: inputs)
