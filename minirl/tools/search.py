"""`search`: BM25 over a local corpus (Robertson and Zaragoza 2009), by the bm25s library."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from minirl.registry import nearest
from minirl.tools.base import BaseTool, ToolResponse

logger = logging.getLogger(__name__)

WORD = r"(?u)\b\w+\b"


class SearchTool(BaseTool):
    """Answers `query` with the passages that match it best, numbered, each cut to a length.

    Config: `corpus`: JSON Lines file or list of them, each line an object with `text` and
    optionally `title` and `id`; `top_k`: passages per answer, 3; `max_passage_chars`: of each
    passage's text, 1000; `stopwords`: a language of bm25s whose commonest words do not count, `en`,
    or null to count every word. Titles are searched, too.

    The index is built here, once, and held in memory with the texts; all trajectories share it.
    ValueError when the config is wrong, or names file and line of a row that does not fit.
    """

    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search a collection of passages by keywords; the best matches first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for."},
                },
                "required": ["query"],
            },
        },
    }

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        _check(config)
        import bm25s  # here: it takes seconds where numba is installed, which vLLM brings along

        corpus = config["corpus"]
        files = [corpus] if isinstance(corpus, str) else corpus
        self._rows = [row for file in files for row in _read(Path(file))]
        if not self._rows:
            raise ValueError(f"config.corpus: {', '.join(files)}: has no rows")
        self._top_k = min(config.get("top_k", 3), len(self._rows))
        self._max_passage_chars = config.get("max_passage_chars", 1000)
        self._stopwords = config.get("stopwords", "en") or []
        texts = [f"{row['title']} {row['text']}" for row in self._rows]
        try:
            tokens = self._tokenize(texts)
        except ValueError as error:
            raise ValueError(f"config.stopwords: {error}") from error
        if not tokens.vocab:
            raise ValueError(f"config.corpus: {', '.join(files)}: has no words to search for")
        # Without numba: it would compile for seconds, to save less than a millisecond per query.
        self._index = bm25s.BM25(auto_compile=False)
        self._index.index(tokens, show_progress=False)
        logger.info("tool %r: indexed %d passages", self.name, len(self._rows))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """The passages for `parameters["query"]`; no passage without a word of it."""
        rows = await asyncio.to_thread(self.search, parameters["query"])
        text = "\n\n".join(self._show(number, row) for number, row in enumerate(rows, start=1))
        return ToolResponse(text or "No passage matches."), 0.0, {"passages": float(len(rows))}

    def search(self, query: str) -> list[dict[str, str]]:
        """The best rows for a query (`id`, `title`, `text`; empty where they have none)."""
        words = self._index.get_tokens_ids(list(self._tokenize([query]).vocab))
        if not words:
            return []
        found, scores = self._index.retrieve(
            [words], k=self._top_k, show_progress=False, backend_selection="numpy"
        )
        hits = zip(found[0], scores[0], strict=True)
        return [self._rows[index] for index, score in hits if score > 0]

    def _tokenize(self, texts: list[str]) -> Any:
        from bm25s import tokenize

        return tokenize(texts, token_pattern=WORD, stopwords=self._stopwords, show_progress=False)

    def _show(self, number: int, row: dict[str, str]) -> str:
        text, limit = row["text"], self._max_passage_chars
        title = " ".join(filter(None, (row["title"], row["id"] and f"({row['id']})")))
        cut = text if len(text) <= limit else f"{text[:limit]}..."
        return f"[{number}] {title}\n{cut}" if title else f"[{number}] {cut}"


_KEYS = ("corpus", "top_k", "max_passage_chars", "stopwords")


def _check(config: dict[str, Any]) -> None:
    for key in config.keys() - {*_KEYS, "type"}:
        raise ValueError(f"config.{key}: no such key{nearest(key, _KEYS)}")
    corpus = config.get("corpus")
    files = corpus if isinstance(corpus, list) else [corpus]
    if not files or not all(isinstance(file, str) for file in files):
        raise ValueError(f"config.corpus: got {corpus!r}; expected the path of a JSON Lines file")
    for key in ("top_k", "max_passage_chars"):
        value = config.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.{key}: got {value!r}; expected a positive whole number")


def _read(file: Path) -> Iterator[dict[str, str]]:
    """The rows of a file, checked."""
    if not file.is_file():
        raise ValueError(f"config.corpus: {file}: no such file")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(line, f"{file}: line {number}")


def _row(line: bytes, place: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected an object with `text`, not {type(row).__name__}")
    if "text" not in row:
        raise ValueError(f"{place}: text: missing{nearest('text', row)}")
    for key, kinds in (("text", str), ("title", str | None), ("id", str | int | None)):
        if not isinstance(row.get(key), kinds) or isinstance(row.get(key), bool):
            raise ValueError(f"{place}: {key}: got {row[key]!r}; expected a string")
    if not row["text"].strip():
        raise ValueError(f"{place}: text: is empty")
    number = row.get("id")
    return {
        "id": "" if number is None else str(number),
        "title": row.get("title") or "",
        "text": row["text"],
    }
