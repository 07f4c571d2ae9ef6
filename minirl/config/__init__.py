"""The whole configuration: dataclasses are the schema; YAML files merge, then `key=value` pairs.

Leaf names are verl's where the knob is the same. A feature that is off is a section that is null.
Every key stands with its meaning in the file of its section; `minirl/config/schema.py` joins them.
"""

from minirl.config.algorithm import (
    AlgorithmConfig,
    CPOConfig,
    FilterGroupsConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
)
from minirl.config.checks import ConfigError, require
from minirl.config.loading import leaf_keys, load_config, run_config_file, to_yaml
from minirl.config.model import (
    ActorConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    RefConfig,
)
from minirl.config.reward import (
    BatchRewardConfig,
    CustomRewardConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardModelConfig,
    RewardPoolConfig,
)
from minirl.config.rollout import (
    AgentConfig,
    MLflowConfig,
    MultiTurnConfig,
    RolloutConfig,
    SamplingConfig,
    SyncCheckConfig,
    TraceConfig,
)
from minirl.config.schema import Config
from minirl.config.trainer import TrainerConfig

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "BatchRewardConfig",
    "CPOConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "CustomRewardConfig",
    "DataConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "MLflowConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RewardPoolConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SamplingConfig",
    "SyncCheckConfig",
    "TraceConfig",
    "TrainerConfig",
    "leaf_keys",
    "load_config",
    "require",
    "run_config_file",
    "to_yaml",
]
