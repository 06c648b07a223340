#!/usr/bin/env python3
"""Asks the planner questions, and compares its answers with what an expert expects of them.

    scripts/planner/questions.py [--text] [OPTIONS ...]

Asks those of `tests/plan/questions.yaml` whose options contain each of OPTIONS. Prints for each
question the verdict, the answer and the CPU seconds of a process; with --text, all that a user
sees. Ends with 1 if an answer is not as expected, or a process takes over 3 s of CPU.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parents[2] / "tests" / "plan" / "questions.yaml"
MOST_CPU = 3.0
UNITS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

Ended = tuple[int, str, str]
"""The exit code, stdout and stderr of `dtrain plan`."""
Run = Callable[[Sequence[str]], Ended]


def questions() -> dict[str, list[dict[str, Any]]]:
    """Return the questions of each kind."""
    found: dict[str, list[dict[str, Any]]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def asked(question: Mapping[str, Any], run: Run) -> tuple[list[str], str]:
    """Return what is not as expected, and the answer in short.

    Asks for text and for JSON, in a folder with the question's files.
    """
    files = question.get("files", {})
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            # JSON is YAML, too.
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        words = shlex.split(question["plan"])
        argv = ["plan", *(str(Path(folder, word)) if word in files else word for word in words)]
        code, text, errors = run(argv)
        json_code, document, _ = run([*argv, "--json"])
    expected = dict(question["expect"])
    wrong = []
    for name, said in (("error", errors), ("hint", errors.partition("hint:")[2]), ("says", text)):
        parts = expected.pop(name, ())
        for part in [parts] if isinstance(parts, str) else parts:
            if part not in " ".join(said.split()):
                wrong.append(f"{name} lacks {part!r}")
    # 1: no layout fits.
    if code != json_code or (code not in (0, 1)) != ("error" in question["expect"]):
        wrong.append(f"ends with {code}, and with --json {json_code}")
    if code not in (0, 1):
        return wrong, errors
    values = _values(json.loads(document))
    wrong += [
        f"{name} is {values.get(name)}, not {bound}"
        for name, bound in expected.items()
        if not meets(bound, values.get(name))
    ]
    return wrong, _short(values)


def _values(found: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an answer that may have a bound."""
    values = {"fits": False, "parameters": found["model"]["parameters"]}
    if "strategies" in found:
        best = next((one for one in found["strategies"] if one["name"] == found["strategy"]), {})
        values |= {"strategy": found["strategy"]}
    else:
        best = next(iter(found["layouts"]), {})
        values |= {name: found.get("training", {}).get(name) for name in ("days", "price")}
    values |= best
    if best:
        values["gib"] = best["memory_gib"]["total"]
    if "time_s" in best:
        values |= {"step": best["time_s"]["total"], "tokens": best["tokens_per_s_per_gpu"]}
    return values


def meets(bound: Any, value: Any) -> bool:
    """Whether a value is in a bound, which is as at the top of the file of questions."""
    if isinstance(value, bool):
        return value is bound
    return any(_in(choice, value) for choice in str(bound).split(" or "))


def _in(choice: str, value: Any) -> bool:
    if not isinstance(value, (int, float)):
        return choice == str(value)
    least, to, most = choice.partition(" to ")
    if not to:
        least = choice.removeprefix("at least ") if "at most" not in choice else "0"
        most = choice.removeprefix("at most ") if "at least" not in choice else "inf"
    return _number(least) <= value <= _number(most)


def _number(text: str) -> float:
    return float(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else float(text)


def _short(values: Mapping[str, Any]) -> str:
    if "tensor" not in values:
        return str(values.get("strategy") or "nothing fits")
    sizes = [
        f"{name} {values[name]}"
        for name in ("tensor", "pipeline", "context", "expert", "data")
        if values[name] > 1
    ]
    return (
        f"{' x '.join(sizes) or 'one GPU'}, sharding {values['sharding']}, recompute "
        f"{values['recompute']}{', offload' * values['offload']}: {values['gib']:.1f} GiB, "
        f"{values['step']:.3g} s, {values['tokens']:,.0f} tokens/s, MFU {values['mfu']:.2f}"
    )


def main() -> int:
    words = [one for one in sys.argv[1:] if one != "--text"]
    failed, slowest, texts = 0, 0.0, "--text" in sys.argv

    def run(argv: Sequence[str]) -> Ended:
        nonlocal slowest
        before = _cpu()
        command = [sys.executable, "-m", "dtrain_cli", *argv]
        # As on a terminal of 80 columns.
        environment = os.environ | {"COLUMNS": "80"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        slowest = max(slowest, _cpu() - before)
        if texts and "--json" not in argv:
            print(done.stdout)
        return done.returncode, done.stdout, done.stderr

    every = chain.from_iterable(questions().values())
    found = [one for one in every if all(word in one["plan"] for word in words)]
    for number, question in enumerate(found, 1):
        print(f"{number}. {question['plan']}", flush=True)
        slowest = 0.0
        wrong, answer = asked(question, run)
        if slowest > MOST_CPU:
            wrong.append(f"takes {slowest:.1f} s of CPU")
        failed += bool(wrong)
        print(f"   {'; '.join(wrong) or 'as expected'}: {answer.strip()} ({slowest:.2f} s)")
        if wrong:
            print(f"   {question['because']}")
    print(f"{failed} of {len(found)} answers are not as expected")
    return int(failed > 0)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
