import asyncio
import json
import math

import pytest
import yaml

from minirl.config import ConfigError
from minirl.tools import SearchTool, load_tools

ROWS = [
    {"id": "fox", "title": "Fox", "text": "A fox is a small wild animal of the dog family."},
    {"id": 7, "text": "The dog barks at the fox, and the dog sleeps."},
    {"title": "Whale", "text": "Whales are mammals that live in the sea."},
    {"text": "Ω-3 acids come from fish: 2 grams a day."},
    {"title": "Zürich", "text": "Die größte Stadt der Schweiz."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    return str(path)


async def ask(tool, query):
    response, reward, metrics = await tool.execute("id", {"query": query})
    assert reward == 0.0
    return response.text, metrics


async def test_passages_numbered_best_first(corpus):
    text, metrics = await ask(SearchTool({"corpus": corpus}), "Which dog barks?")
    assert text == (
        "[1] (7)\nThe dog barks at the fox, and the dog sleeps.\n\n"
        "[2] Fox (fox)\nA fox is a small wild animal of the dog family."
    )
    assert metrics == {"passages": 2.0}


async def test_top_k_and_length(corpus):
    tool = SearchTool({"corpus": corpus, "top_k": 1, "max_passage_chars": 10})
    assert (await ask(tool, "dog"))[0] == "[1] (7)\nThe dog ba..."


@pytest.mark.parametrize("query", ["", "?!", "the of and", "xylophone", "\ud800"])
async def test_nothing_found(corpus, query):
    assert await ask(SearchTool({"corpus": corpus}), query) == (
        "No passage matches.",
        {"passages": 0.0},
    )


@pytest.mark.parametrize(
    ("query", "begin"), [("WHALE", "[1] Whale"), ("2", "[1] Ω-3"), ("zürich", "[1] Zürich")]
)
async def test_titles_digits_and_other_scripts(corpus, query, begin):
    assert (await ask(SearchTool({"corpus": corpus}), query))[0].startswith(begin)


async def test_stopwords_count_when_told_so(corpus):
    tool = SearchTool({"corpus": corpus, "stopwords": None, "top_k": 9})
    assert (await ask(tool, "the"))[1] == {"passages": 3.0}


def test_ranks_as_the_formula_says(corpus):
    """BM25 with Lucene's idf, k1 = 1.5, b = 0.75."""
    texts = [f"{row.get('title', '')} {row['text']}".lower() for row in ROWS]
    documents = [[w.strip(".,:") for w in text.replace("-", " ").split()] for text in texts]
    mean = sum(map(len, documents)) / len(documents)

    def score(words, document):
        total = 0.0
        for word in words:
            holding = sum(word in d for d in documents)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            f = document.count(word)
            total += idf * f / (f + 1.5 * (0.25 + 0.75 * len(document) / mean))
        return total

    tool = SearchTool({"corpus": corpus, "stopwords": None, "top_k": 5})
    for query in (["dog", "sea"], ["the", "fox"], ["a", "day", "of", "fish"], ["fox", "fish"]):
        scores = [score(query, document) for document in documents]
        order = sorted((n for n in range(5) if scores[n]), key=lambda n: -scores[n])
        assert tool.search(" ".join(query)) == [tool._rows[n] for n in order]


async def test_many_files_and_many_searches_at_once(corpus, tmp_path):
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"text": f"entry number{n}"}) + "\n" for n in range(500)))
    tool = SearchTool({"corpus": [corpus, str(more)], "top_k": 1})
    queries = [f"number{n}" for n in range(100)]
    answers = await asyncio.gather(*(ask(tool, query) for query in queries))
    assert [text for text, _ in answers] == [f"[1] entry {query}" for query in queries]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"corpus.jsonl: line 2: not valid JSON"),
        ("[1]", r"line 2: expected an object with `text`, not list"),
        ('{"contents": "x"}', r"line 2: text: missing.*known: contents"),
        ('{"text": 3}', r"line 2: text: got 3; expected a string"),
        ('{"text": " "}', r"line 2: text: is empty"),
        ('{"text": "x", "title": ["y"]}', r"line 2: title: got \['y'\]; expected a string"),
        ('{"text": "x", "id": true}', r"line 2: id: got True; expected a string"),
    ],
)
def test_bad_rows_are_named(tmp_path, line, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"text": "x"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        load_tools(write_tools(tmp_path, corpus=str(path)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.corpus: got None; expected the path"),
        ({"corpus": "nowhere.jsonl"}, "config.corpus: nowhere.jsonl: no such file"),
        ({"corpus": []}, r"config.corpus: got \[\]"),
        ({"corpus": "CORPUS", "topk": 3}, "config.topk: no such key; did you mean 'top_k'"),
        ({"corpus": "CORPUS", "top_k": 0}, "config.top_k: got 0; expected a positive whole"),
        ({"corpus": "CORPUS", "stopwords": "xx"}, "config.stopwords: .*xx"),
        ({"corpus": "EMPTY"}, "config.corpus: .*empty.jsonl: has no rows"),
        ({"corpus": "SIGNS"}, "config.corpus: .*signs.jsonl: has no words"),
    ],
)
def test_config_errors(tmp_path, corpus, config, message):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "signs.jsonl").write_text('{"text": "?"}\n')
    places = {
        "CORPUS": corpus,
        "EMPTY": f"{tmp_path}/empty.jsonl",
        "SIGNS": f"{tmp_path}/signs.jsonl",
    }
    if isinstance(config.get("corpus"), str):
        config = {**config, "corpus": places.get(config["corpus"], config["corpus"])}
    with pytest.raises(ConfigError, match=message):
        load_tools(write_tools(tmp_path, **config))


def write_tools(tmp_path, **config):
    path = tmp_path / "tools.yaml"
    entry = {"class_name": "minirl.tools.search:SearchTool", "config": config}
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return path
