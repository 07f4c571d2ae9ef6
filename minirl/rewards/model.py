"""The reward model's side of a trajectory: what it reads, and where its score goes.

minirl/trainer/reward_model.py computes the scores, of all trajectories of a rollout at once.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from transformers import AutoTokenizer

from minirl.chat import ChatBuilder, ChatTemplateError
from minirl.config import ConfigError, RewardModelConfig, require
from minirl.tools.truncate import split_kept
from minirl.types import Trajectory

KEY = "reward.reward_model"
Messages = list[dict[str, Any]]


class RewardModelInput:
    """Trajectories as the tokens that the reward model reads: the policy's own without `chat`, else
    their messages by the template of `chat`, which is that of the model's tokenizer."""

    def __init__(self, config: RewardModelConfig, chat: ChatBuilder | None) -> None:
        self.config = config
        self.chat = chat
        self._knows_tools = chat is None or chat.knows_tool_role()

    def tokens(self, trajectory: Trajectory) -> list[int]:
        """All tokens of a trajectory that has a turn; `is_too_long` for some.

        Control tokens of the model's template that stand in what the policy or a tool wrote become
        text: neither can forge a turn. Raises ConfigError for a conversation that cannot be
        rendered.
        """
        if self.chat is None:
            return trajectory.token_ids
        messages, turns = trajectory.messages, trajectory.num_turns
        sampled = [i for i, m in enumerate(messages) if m["role"] == "assistant"][-turns:]
        if len(sampled) < turns:
            raise ConfigError(
                f"{KEY}.input: got {self.config.input!r}, which needs the messages of trajectory "
                f"{trajectory.uid!r}, but its agent loop did not write them; sample by "
                "self.start, self.generate and self.append_observation, or choose a reward model "
                "with the policy's tokenizer and input=tokens"
            )
        return self._render(messages, sampled[0])

    def is_too_long(self, token_ids: list[int]) -> bool:
        """Whether `cut` shortens it."""
        limit = self.config.max_length
        return limit is not None and len(token_ids) > limit

    def cut(self, token_ids: list[int]) -> list[int]:
        """At most max_length of them."""
        if not self.is_too_long(token_ids):
            return token_ids
        assert self.config.max_length is not None
        head, tail = split_kept(token_ids, self.config.max_length, self.config.truncation)
        return head + tail

    def check(self, prompts: Iterable[Messages], with_tools: bool) -> None:
        """ConfigError for the first prompt whose conversation cannot be rendered.

        Prompts of the same roles are alike to a template.
        """
        if self.chat is None:
            return
        for messages in {tuple(m["role"] for m in prompt): prompt for prompt in prompts}.values():
            conversation = [*messages, {"role": "assistant", "content": "a"}]
            if with_tools:
                results = [{"role": "tool", "content": text} for text in ("b", "c")]
                conversation += [*results, {"role": "assistant", "content": "d"}]
            self._render(conversation, len(messages))

    def _render(self, messages: Messages, num_trusted: int) -> list[int]:
        assert self.chat is not None
        try:
            if not self._knows_tools:
                head = messages[:num_trusted]
                messages = [*head, *_tools_as_users(messages[num_trusted:])]
            return self.chat.conversation(messages, num_trusted)
        except ChatTemplateError as error:
            raise ConfigError(
                f"{KEY}.path: the chat template of {self.config.path!r} cannot be used: {error}"
            ) from error


def load_input(
    config: RewardModelConfig, policy: ChatBuilder, vocab_size: int, *, trust_remote_code: bool
) -> RewardModelInput:
    """Choose by `input` how the model, with so many tokens in its vocabulary, reads trajectories.

    Raises ConfigError for a tokenizer, a template or a vocabulary that cannot do it.
    """
    if config.input == "tokens":
        num_tokens = len(policy.tokenizer)
        require(
            num_tokens <= vocab_size,
            f"{KEY}.input",
            config.input,
            f"the model knows {vocab_size} tokens, the policy's tokenizer has {num_tokens}; write "
            "messages",
        )
        return RewardModelInput(config, None)
    chat = _load_chat(config.path, trust_remote_code)
    is_same = config.input == "auto" and _is_same(chat, policy)
    return RewardModelInput(config, None if is_same else chat)


def conversations(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Those that have an outcome: the trajectories of one sample, of which the last carries it.

    Failed ones, and those whose policy never had a turn, have none.
    """
    samples: dict[tuple[str, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        samples.setdefault((trajectory.uid, trajectory.sample_index), []).append(trajectory)
    return [
        members
        for members in samples.values()
        if members[-1].num_turns and all(t.error is None for t in members)
    ]


def add_score(conversation: list[Trajectory], score: float, config: RewardModelConfig) -> None:
    """Make the model's score, joined with the reward so far by `combine`, the reward.

    The last trajectory's breakdown keeps both as `rm_score` and `rule_score`.
    """
    last = conversation[-1]
    if last.reward is not None:
        last.reward_breakdown["rule_score"] = last.reward
    last.reward_breakdown["rm_score"] = score
    rule = last.reward if config.combine == "add" else None
    for trajectory in conversation:
        trajectory.reward = config.weight * score + (rule or 0.0)


def _load_chat(path: str, trust_remote_code: bool) -> ChatBuilder:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        # transformers makes an empty one where the folder has no files of a tokenizer
        if not tokenizer.encode("a"):
            raise ValueError("it has none; save it there with save_pretrained")
        if not tokenizer.chat_template:
            raise ValueError("it has no chat template; save it there as chat_template.jinja")
        return ChatBuilder(tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{KEY}.path: the tokenizer of {path!r} cannot be used: {reason}; or write "
            f"{KEY}.input=tokens, if the model reads the policy's"
        ) from error


def _is_same(one: ChatBuilder, other: ChatBuilder) -> bool:
    """Whether both make the same tokens of the same messages."""
    same_words = one.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    return same_words and one.template == other.template


def _tools_as_users(messages: Messages) -> Messages:
    """For a template without a tool role: the results of a turn as one message of the user."""
    folded: Messages = []
    for role, group in groupby(messages, key=lambda m: m["role"]):
        if role == "tool":
            folded.append({"role": "user", "content": "\n".join(m["content"] for m in group)})
        else:
            folded += group
    return folded
