"""Messages to tokens, turn by turn."""

from minirl.chat.builder import ChatBuilder, ChatTemplateError
from minirl.chat.certify import certify, quirks, report

__all__ = ["ChatBuilder", "ChatTemplateError", "certify", "quirks", "report"]
