"""Write a layout into the text of a cluster file, and leave the rest of the text unchanged.

PyYAML gives the position of each value. This module first replaces values, then inserts keys one
by one, then removes keys. Finally it parses the result and compares it with the request. If they
differ, it refuses the file, so it never damages one.

A load and dump by ruamel.yaml does not work: it deletes comments in multi-line flow mappings and
below a removed key, puts new keys after the comments of the next key, and changes line endings,
spaces in braces, unused anchors and multi-line plain scalars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dtrain.diagnostics import InternalError, SpecError, UsageError
from dtrain.hostlist import fold
from dtrain.spec import source, spans, yaml_text
from dtrain.spec.job_keys import JOB
from dtrain.spec.layout_keys import EXPECTED, LAYOUT, TRAINING
from dtrain.spec.load import parse, read_document
from dtrain.spec.schema import Section
from dtrain.spec.source import Node, Scalar
from dtrain.spec.spans import EntrySpan, NodeSpan
from dtrain.spec.yaml_text import Values

_ORDER = {
    "job": [*JOB.fields],
    "layout": [*LAYOUT.fields],
    "training": [*TRAINING.fields],
    "expected": [*EXPECTED.fields],
}
_REPLACED = ("layout", "expected")
"""Sections that get exactly the given keys. Other keys of `job.training` stay."""
_BLANK = re.compile(r"[ \t]*")
_REST = re.compile(r"[ \t]*(#.*)?", re.DOTALL)


def write_layout(text: str, keys: Mapping[str, Any], *, file: str = "the cluster file") -> str:
    """Set ``keys`` of ``job`` in ``text``: ``strategy``, ``layout``, ``training`` and ``expected``.

    ``job.layout`` and ``job.expected`` get exactly the given keys; other keys of ``job.training``
    stay. The rest of the text keeps its bytes: comments, order, quotes, blank lines and line
    endings. ``file`` names the text in messages.

    Raises SpecError if ``text`` is not a valid cluster file, and UsageError if it cannot be
    edited safely or cannot be launched with this layout.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    edited = _Edit(text.removeprefix(mark), keys, file).run()
    _check_result(text, mark + edited, file)
    return mark + edited


_BY_SCRIPT = {
    "overlap_experts": "--overlap-moe-expert-parallel-comm",
    "cuda_graph": "--cuda-graph-impl full_iteration",
}
"""Keys of `job.training` that only the script turns on, and what Megatron-LM needs for each."""


def new_file(
    hosts: Sequence[str],
    gpus: int,
    keys: Mapping[str, Any],
    *,
    gpu: str,
    gbps: float,
    file: str = "the cluster file",
) -> str:
    """A cluster file with ``keys`` as for `write_layout`, for hosts with ``gpus`` GPUs each.

    ``gbps`` is the network bandwidth of one host in Gbit/s. What the planner cannot know, such as
    the script, is a placeholder marked with a comment.

    Raises UsageError if the values do not form a valid cluster file.
    """
    machines = json.dumps(fold(list(hosts)), ensure_ascii=False)
    lines = [
        "# Written by `dtrain plan`. Edit the lines marked CHANGE, then run `dtrain launch` with",
        "# --dry-run to see what would run.",
        "cluster:",
        "  # CHANGE: your machines, named as in ~/.ssh/config, in node-rank order",
        f"  hosts: {machines}",
        f"  gpus: {gpus}  # on each host",
        f"  gpu: {yaml_text.literal(gpu)}",
        f"  network: {{gbps: {gbps:.12g}}}  # per host, all NICs together",
        "",
        "job:",
        "  framework: torch",
        f"  strategy: {yaml_text.literal(keys['strategy'])}",
        "  # CHANGE: your training script; it gets the layout in the environment variables",
        "  # DTRAIN_LAYOUT and DTRAIN_TRAINING",
        *(
            line
            for key, setting in _BY_SCRIPT.items()
            if keys["training"].get(key)
            for line in (
                f"  # dtrain does not turn on {key} below: the script does. Megatron-LM needs",
                f"  # {setting} and what `dtrain help keys` says of the key",
            )
        ),
        "  script: train.py",
        *(
            line
            for name, values in _sections(keys).items()
            if values
            for line in yaml_text.block(name, values, "  ", "  ")
        ),
    ]
    text = "\n".join([*lines, ""])
    _check_result("", text, file)
    return text


class UnfitFileError(UsageError):
    """The file would not be valid with the layout."""


class _Edit:
    """One edit of one text. ``text`` is valid YAML after every step."""

    def __init__(self, text: str, keys: Mapping[str, Any], file: str) -> None:
        self.text = text
        self.wanted = _sections(keys)
        self.strategy: str = keys["strategy"]
        self.file = file
        try:
            self.before = _read(text, file)
        except SpecError:
            # parse() reports every problem, _read() only the first kind.
            parse(text, file)
            raise
        job = self.before[1].section("job")
        self.now = {name: dict(job.section(name).values) for name in self.wanted}
        self.old_strategy = job.get("strategy")

    def run(self) -> str:
        job = self._job()
        for name in (*self.wanted, "strategy"):
            self._refuse_shared(job, name)
        self._replace(job)
        if self.old_strategy is None:
            self._insert(("job",), "strategy", self.strategy)
        for name, values in self.wanted.items():
            self._section(name, values)
        self._verify()
        return self.text

    def _section(self, name: str, values: dict[str, Any]) -> None:
        """Insert the missing keys of a section and remove the unwanted ones."""
        entry = self._job().entry(name)
        if entry is None:
            if values:
                self._insert(("job",), name, values)
            return
        if entry.value.empty:
            if values:
                self._fill(entry, values)
            return
        for key in (key for key in values if key not in self.now[name]):
            self._insert(("job", name), key, values[key])
        for key in self._leaving(name):
            self._remove(("job", name), key)

    def _refuse_shared(self, job: NodeSpan, name: str) -> None:
        """Raise UsageError if an alias or a merge shares the text to change."""
        given = self.before[1].section("job")
        entry = job.entry(name)
        if name == "strategy" and self.strategy == self.old_strategy:
            return
        if entry is None:
            if name in given:
                self._refuse(f"job.{name} comes from a merge ('<<')")
            return
        value = entry.value
        outside = {
            part.alias
            for key, of_job in job.entries
            if key.value not in self.wanted
            for part in of_job.walk()
            if part.alias
        }
        if name == "strategy":
            if value.anchor in outside:
                self._refuse(f"job.{name} is used elsewhere too, through *{value.anchor}")
            return
        if value.alias:
            self._refuse(f"job.{name} is an alias (*{value.alias})")
        if value.anchor and (
            not value.mapping
            or any(part.alias == value.anchor for part in spans.parse(self.text).walk())
        ):
            self._refuse(f"job.{name} has an anchor (&{value.anchor})")
        for key, inner in value.entries:
            if key.value == "<<" and not key.quote:
                self._refuse(f"job.{name} holds a merge ('<<')")
            if inner.anchor in outside and self._changes(name, key.value):
                self._refuse(f"job.{name}.{key.value} is used elsewhere too, as *{inner.anchor}")

    def _leaving(self, name: str) -> list[str]:
        """The keys to remove from a section."""
        now = self.now[name] if name in _REPLACED else ()
        return [key for key in now if key not in self.wanted[name]]

    def _changes(self, name: str, key: str) -> bool:
        """Whether an existing key of a section gets another value or is removed."""
        if key not in self.wanted[name]:
            return name in _REPLACED
        return bool(self.wanted[name][key] != self.now[name][key])

    def _replace(self, job: NodeSpan) -> None:
        """Give existing keys their new values."""
        places: list[tuple[NodeSpan, Any]] = []
        strategy = job.entry("strategy")
        if strategy and self.strategy != self.old_strategy:
            places.append((strategy.value, self.strategy))
        sections = [entry.value for name in self.wanted if (entry := job.entry(name))]
        anchors = {part.anchor for section in sections for part in section.walk()}
        for name, values in self.wanted.items():
            section = job.entry(name)
            for key, value in section.value.entries if section else ():
                if self._changes(name, key.value) and key.value in values:
                    places.append((value, values[key.value]))
                elif value.alias and value.alias in anchors:
                    # Its anchor may change or be removed.
                    places.append((value, self.now[name][key.value]))
        for part, value in sorted(places, key=lambda place: place[0].start, reverse=True):
            # The end of a block scalar includes the line breaks after it.
            end = part.start + len(self.text[part.start : part.end].rstrip())
            self._splice(part.start, end, yaml_text.literal(value, part.quote))

    def _insert(self, path: tuple[str, ...], key: str, value: Any) -> None:
        """Add a key to the mapping at ``path``, in the order of the schema."""
        mapping, head = self._find(path)
        order = _ORDER[path[-1]]
        entries = mapping.entries
        if not entries:
            quote = '"' if self.text[head.start] == '"' else ""
            self._splice(mapping.end - 1, mapping.end - 1, yaml_text.item(key, value, quote))
            return
        leaving = self._leaving(path[-1])
        entries = [entry for entry in entries if entry.key.value not in leaving] or entries
        earlier = {known: index for index, known in enumerate(order[: order.index(key)])}
        after = max(entries, key=lambda entry: earlier.get(entry.key.value, -1))
        if after.key.value not in earlier:
            after = entries[-1]
        if mapping.flow:
            self._insert_in_flow(mapping, after, key, value)
        else:
            indent, step = self._indent(after.key), self._step(mapping, head)
            lines = yaml_text.lines(key, value, indent, step)
            self._add_lines(self._below(after, len(indent)), lines)

    def _add_lines(self, at: int, lines: list[str]) -> None:
        """Insert lines at the start of a line, or after the last line."""
        newline = spans.BREAK.search(self.text)
        ending = newline[0] if newline else "\n"
        added = ending.join(lines)
        starts_line = at == 0 or spans.BREAK.match(self.text[at - 1])
        self._splice(at, at, added + ending if starts_line else ending + added)

    def _below(self, entry: EntrySpan, column: int) -> int:
        """The start of the first line after a block entry and the comments that belong to it."""
        end = entry.value.end
        if not spans.BREAK.match(self.text[end - 1]):
            end = spans.next_line(self.text, end)
        at = end
        while at < len(self.text):
            line = self.text[at : spans.line_end(self.text, at)]
            comment = line.lstrip()
            if comment and not (comment.startswith("#") and len(line) - len(comment) > column):
                break
            at = spans.next_line(self.text, at)
            if comment:
                end = at
        return end

    def _insert_in_flow(self, mapping: NodeSpan, after: EntrySpan, key: str, value: Any) -> None:
        item = yaml_text.item(key, value, '"' if self.text[after.key.start] == '"' else "")
        end = after.value.end
        comma = self._comma(end, mapping.end)
        behind = end if comma is None else comma + 1
        if not (self._leads(after.key.start) and self._ends_line(behind)):
            self._splice(end, end, f", {item}")
            return
        line = self._indent(after.key) + item + ("" if comma is None else ",")
        self._add_lines(spans.next_line(self.text, behind), [line])
        if comma is None:
            self._splice(end, end, ",")

    def _fill(self, entry: EntrySpan, values: dict[str, Any]) -> None:
        """Write the keys of a section that exists but is empty."""
        colon = re.compile(r"[ \t]*:").match(self.text, entry.key.end)
        name = entry.key.value
        if not colon:
            self._refuse(f"job.{name} has no value and no ':' directly after it")
        job, head = self._find(("job",))
        quote = '"' if job.flow and self.text[entry.key.start] == '"' else ""
        if job.flow:
            self._splice(colon.end(), colon.end(), " " + yaml_text.flow(values, quote))
            return
        first, *more = yaml_text.lines(name, values, self._indent(entry.key), self._step(job, head))
        if more:
            self._add_lines(spans.next_line(self.text, colon.end()), more)
        else:
            self._splice(colon.end(), colon.end(), first[first.index(":") + 1 :])

    def _remove(self, path: tuple[str, ...], key: str) -> None:
        mapping, _ = self._find(path)
        entries = mapping.entries
        index = next(i for i, entry in enumerate(entries) if entry.key.value == key)
        start, end = entries[index].key.start, entries[index].value.end
        end = start + len(self.text[start:end].rstrip())
        comma = self._comma(end, mapping.end) if mapping.flow else None
        before = None
        if mapping.flow and index:
            before = self._comma(entries[index - 1].value.end, mapping.end)
        behind = end if comma is None else comma + 1
        if self._leads(start) and self._ends_line(behind):
            self._drop_lines(start, behind)
            if before is not None and comma is None:
                self._splice(before, before + 1, "")
        elif not mapping.flow:
            self._refuse(f"job.{path[-1]}.{key} shares a line with another key")
        elif before is not None and not self.text[before + 1 : start].strip(" \t"):
            self._splice(before, end, "")
        else:
            if comma is not None:
                gap = _BLANK.match(self.text, comma + 1)
                self._splice(comma, gap.end() if gap else comma + 1, "")
            self._splice(start, end, "")
            if before is not None and comma is None:
                self._splice(before, before + 1, "")

    def _drop_lines(self, start: int, end: int) -> None:
        """Delete the lines from the one that holds ``start`` to the one that holds ``end``."""
        first, after = spans.line_start(self.text, start), spans.next_line(self.text, end)
        if after == spans.line_end(self.text, end):
            # The last line had no line break, so the new last line must not have one either.
            first -= 2 if self.text[:first].endswith("\r\n") else 1
        self._splice(first, after, "")

    def _verify(self) -> None:
        """Raise UsageError unless the edit set the wanted keys and left the rest unchanged."""
        try:
            root, document = _read(self.text, self.file)
        except SpecError as error:
            self._refuse(f"an edited file would not be valid ({error.problems[0].message})")
        job = document.section("job")
        wanted: dict[str, Any] = dict(self.wanted)
        wanted["training"] = {**self.now["training"], **wanted["training"]}
        now = {name: dict(job.section(name).values) for name in wanted}
        targets = {*self.wanted, "strategy"}
        if (
            now != wanted
            or job.get("strategy") != self.strategy
            or _rest(root, targets) != _rest(self.before[0], targets)
        ):
            self._refuse("dtrain cannot edit YAML that is written this way")

    def _refuse(self, reason: str) -> NoReturn:
        changes = [
            f"  {yaml_text.item(name, values)}" for name, values in self.wanted.items() if values
        ]
        changes.append(f"  {yaml_text.item('strategy', self.strategy)}")
        raise UsageError(
            f"{self.file}: cannot be edited safely: {reason}",
            hint="\n".join(["write these keys of job by hand:", *changes]),
        )

    def _job(self) -> NodeSpan:
        return self._find(("job",))[0]

    def _find(self, path: tuple[str, ...]) -> tuple[NodeSpan, NodeSpan]:
        """The mapping at ``path`` and its key."""
        part = head = spans.parse(self.text)
        for key in path:
            entry = part.entry(key)
            if entry is None or not entry.value.mapping:
                self._refuse(f"{'.'.join(path)} is not written out")
            head, part = entry
        return part, head

    def _comma(self, index: int, end: int) -> int | None:
        """The index of the comma after ``index``, in a flow mapping that ends at ``end``."""
        found = re.compile(r"(?:\s|#[^\n\r\x85\u2028\u2029]*)*").match(self.text, index, end - 1)
        at = found.end() if found else index
        return at if self.text[at] == "," else None

    def _leads(self, start: int) -> bool:
        """Whether only blanks precede ``start`` in its line."""
        return not self.text[spans.line_start(self.text, start) : start].strip(" \t")

    def _ends_line(self, end: int) -> bool:
        """Whether only blanks and a comment follow ``end`` in its line."""
        rest = self.text[end : spans.line_end(self.text, end)]
        return _REST.fullmatch(rest) is not None

    def _indent(self, key: NodeSpan) -> str:
        found = _BLANK.match(self.text, spans.line_start(self.text, key.start))
        return found[0] if found else ""

    def _step(self, mapping: NodeSpan, head: NodeSpan) -> str:
        """One level of indentation, as between a key and its block mapping."""
        inner, outer = self._indent(mapping.entries[0].key), self._indent(head)
        return inner[len(outer) :] or "  "

    def _splice(self, start: int, end: int, replacement: str) -> None:
        self.text = self.text[:start] + replacement + self.text[end:]


def _read(text: str, file: str) -> tuple[Node, Section]:
    """The tree and the typed values. Raises SpecError. Does not check for contradictions."""
    root, document, problems = read_document(text, file)
    problems.raise_if_any()
    return root, document


def _check_result(text: str, edited: str, file: str) -> None:
    """Raise SpecError for old problems of ``text``, UsageError for new ones in ``edited``."""
    try:
        parse(edited, file)
    except SpecError as error:
        known: set[str] = set()
        if text:
            try:
                parse(text, file)
            except SpecError as earlier:
                known = {problem.message for problem in earlier.problems}
                if all(problem.message in known for problem in error.problems):
                    raise
        fresh = [problem for problem in error.problems if problem.message not in known]
        raise UnfitFileError(
            f"{file}: cannot launch this layout: {fresh[0].message}", hint=fresh[0].hint
        ) from None


def _rest(node: Node, without: set[str]) -> object:
    """The file's content, without the keys ``without`` of ``job``."""

    def plain(node: Node) -> object:
        match node:
            case Scalar():
                return node.text, node.plain
            case source.Sequence():
                return [plain(item) for item in node.items]
            case source.Mapping():
                return {entry.key.text: plain(entry.value) for entry in node.entries}
        return None

    whole: Any = plain(node)
    return {**whole, "job": {k: v for k, v in whole["job"].items() if k not in without}}


def _sections(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each section's keys in the order of the schema. Raises InternalError for an unknown key."""
    sections: dict[str, Values] = {name: keys[name] for name in ("layout", "training", "expected")}
    for name, values in sections.items():
        if unknown := [key for key in values if key not in _ORDER[name]]:
            raise InternalError(f"job.{name} has no key {unknown[0]!r}")
    return {
        name: {key: values[key] for key in _ORDER[name] if values.get(key) is not None}
        for name, values in sections.items()
    }
