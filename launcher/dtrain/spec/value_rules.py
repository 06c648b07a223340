"""Rules and types for values in a cluster file.

A rule returns what is wrong with a text as the end of a sentence, or an empty text.
"""

from __future__ import annotations

import re
from typing import get_args

from dtrain.spec.hosts import host_name_fault
from dtrain.spec.model import TransportName
from dtrain.spec.ports import MAX_PORT
from dtrain.spec.scalars import Check, Choice, Integer, Text
from dtrain.spec.schema import ListOf, MapOf, OneOf

_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_MODULE = r"[^\W\d]\w*(\.[^\W\d]\w*)*"


def matching(pattern: str, wrong: str) -> Check:
    """The rule of a text that matches ``pattern`` as a whole."""
    return lambda text: "" if re.fullmatch(pattern, text) else wrong


def pattern_text(pattern: str, wrong: str) -> Text:
    """The type of a text that matches ``pattern`` as a whole."""
    return Text(matching(pattern, wrong), f"^{pattern}$")


variable = matching(
    _VARIABLE,
    "is not a variable name: it must be letters, digits and '_', not starting with a digit",
)
interface = matching(
    r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,14}",
    "must be one network interface, such as ib0 (as `ip link` shows it)",
)


def address(text: str) -> str:
    return host_name_fault(text)[0]


def option_safe(text: str) -> str:
    return "cannot start with '-'" if text.startswith("-") else ""


def one_word(text: str) -> str:
    return "cannot contain spaces" if re.search(r"\s", text) else option_safe(text)


def script(text: str) -> str:
    return "cannot start with '-'; write it as ./-…" if text.startswith("-") else ""


def module(text: str) -> str:
    if re.fullmatch(_MODULE, text) and not text.endswith(".py"):
        return ""
    if "/" in text or text.endswith(".py"):
        return "must be a module name, such as my.train; use job.script for a file"
    return "must be a module name, such as my.train"


def run_dir(text: str) -> str:
    if text.startswith(("/", "~/")):
        return ""
    return "must start with '/' or '~/', because it is a folder on every node"


def unix_group(text: str) -> str:
    if re.fullmatch(r"[^\s:/,-][^:/,\x00-\x1f\x7f]*", text) and not text.isdigit():
        return ""
    return "must be the name of a Unix group on the hosts"


def mount(text: str) -> str:
    source, *others = text.split(":")
    target = [other for other in others if other != "ro"]
    paths = [source, *target]
    if len(target) > 1 or len(others) > 2 or (target and others[0] == "ro"):
        return "must be SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro"
    if not all(path.startswith(("/", "~/")) for path in paths):
        return "must name paths that start with '/' or '~/'"
    return "cannot contain commas, quotes or line breaks" if re.search(r'[,"\n\r]', text) else ""


NAME = pattern_text(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
    "must be letters, digits, '.', '_' or '-', start with a letter or digit, "
    "and have at most 64 characters",
)
TOPOLOGY = pattern_text(
    r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}",
    "must be the chips of a slice along two or three axes, such as 4x4 or 2x2x4",
)
GPU = pattern_text(
    r"(?![0-9]{1,3}$).+", "must be a GPU's name, such as h100; the number of GPUs is 'gpus: 8'"
)
VARIABLE = Text(variable, f"^{_VARIABLE}$")
PORT = Integer(1, MAX_PORT)
GPUS = OneOf(
    Integer(0, 1024, also=" or a list of GPU indices"),
    ListOf(Integer(0, 1023), unique=True, minimum=1, what="GPU indices"),
)
SLOTS = Integer(1, 1024)
ENV: MapOf[str] = MapOf(
    Text(empty=True, lines=True),
    variable,
    f"^{_VARIABLE}$",
    what="environment variables as NAME: value",
)
TRANSPORT = Choice(get_args(TransportName))
