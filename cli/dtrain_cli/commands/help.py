"""`dtrain help`: the documentation pages, and the reference of every cluster-file key."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Annotated

from dtrain.diagnostics import UsageError
from dtrain.spec.problems import nearest
from dtrain_cli import output
from dtrain_cli.app import ELSEWHERE, VERBS, app
from dtrain_cli.completion import topics as topic_values
from dtrain_cli.parameters import argument
from dtrain_cli.views import can_redraw, color

_PAGES = files("dtrain_cli") / "help"
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
"""What only editors of a page need to know."""
_SOURCE = re.compile(r"\[([^]]+)\]\(\.\./\.\./\.\./([^)]+)\)")
"""A link to a file of dtrain's source code, which may not be on this machine."""


def help(
    topic: Annotated[
        str | None,
        argument(
            "A topic, command, key of the cluster file or word of a heading: ssh, ps, "
            "job.restart, ray.",
            "TOPIC",
            topic_values,
        ),
    ] = None,
) -> None:
    """Show a documentation page; without TOPIC, list the topics."""
    if not topic:
        output.write(_contents())
        return
    topic = topic.lower()
    if topic in VERBS and topic not in topics():
        app([topic, "--help"], prog_name="dtrain", standalone_mode=False)
        return
    text = _page(topic)
    if sys.stdout is not None and can_redraw(sys.stdout.isatty()):
        # rich takes a tenth of a second to import, and a pipe does not need it.
        from dtrain_cli.views.page import drawn

        text = drawn(text, color=color(terminal=True))
    output.write(text)


def topics() -> dict[str, str]:
    """The title of each page, by topic."""
    pages = {page.name[:-3]: page for page in _PAGES.iterdir() if page.name.endswith(".md")}
    heads = {name: pages[name].read_text("utf-8").partition("\n")[0] for name in sorted(pages)}
    return {name: head.removeprefix("# ") for name, head in heads.items()}


def keys() -> dict[str, str]:
    """The Markdown of each key of the cluster file."""
    _, *sections = re.split(r"^(?=## )", (_PAGES / "keys.md").read_text("utf-8"), flags=re.M)
    return {section.split("\n", 1)[0].removeprefix("## "): section for section in sections}


def _contents() -> str:
    titles = topics()
    width = max(map(len, titles))
    lines = [f"  {topic:{width}}  {title}" for topic, title in titles.items()]
    return "\n".join(
        [
            "Topics:",
            *lines,
            "",
            "dtrain help TOPIC shows a page, dtrain help KEY a key of the cluster file",
            "(job.restart), dtrain help WORD the sections on a word (jax), and",
            "dtrain COMMAND --help the options of a command.",
            "",
        ]
    )


def _page(topic: str) -> str:
    """The Markdown of a page, of the keys that ``topic`` names, or of the sections with this word
    in their heading.

    Raises UsageError for an unknown topic.
    """
    titles = topics()
    if topic in titles:
        return _text(topic)
    by_key = keys()
    # `restart` and `job.restart` both name the key job.restart and all keys below it.
    found = [section for key, section in by_key.items() if f".{topic}." in f".{key}.".lower()]
    found = found or list(_sections(topic, titles))
    if found:
        return "".join(found).rstrip() + "\n"
    names = [*titles, *VERBS, *_names(by_key)]
    begun = next((name for name in names if name.lower().startswith(topic)), None)
    known = ELSEWHERE.get(topic, "").partition(" ")[0] or begun
    word = re.compile(rf"\b{re.escape(topic)}", re.IGNORECASE)
    mention = [] if known else [title for title in titles if word.search(_text(title))]
    if mention:
        hint = f"pages that mention it: {', '.join(mention)}"
    elif close := known or nearest(topic, names):
        hint = f"did you mean {close!r}? 'dtrain help' lists the topics"
    else:
        hint = f"topics: {', '.join(titles)}"
    raise UsageError(f"no help topic {topic!r}", hint=hint)


def _text(topic: str) -> str:
    """The Markdown of a page for a reader who may not have the source code."""
    text = (_PAGES / f"{topic}.md").read_text("utf-8")
    return _SOURCE.sub(_named, _COMMENT.sub("", text))


def _sections(word: str, titles: Iterable[str]) -> Iterator[str]:
    """The sections with ``word``, or one that begins so, in their heading, with their page's name.
    Not those of the page `keys`: `_page` looks there first."""
    heading = re.compile(rf"## (.*\b{re.escape(word)})", re.IGNORECASE)
    for title in sorted({*titles} - {"keys"}):
        _, *sections = re.split(r"^(?=## )", _text(title), flags=re.M)
        yield from (
            heading.sub(rf"## {title}: \1", section, count=1)
            for section in sections
            if heading.match(section)
        )


def _named(link: re.Match[str]) -> str:
    """The text of a link to a file, and the file's path in the source code."""
    text, path = link.groups()
    return f"`{path}`" if path.endswith(text) else f"{text} (`{path}`)"


def _names(keys: dict[str, str]) -> list[str]:
    """Each key by its full path and by its last part."""
    return [*keys, *(key.rpartition(".")[2] for key in keys)]
