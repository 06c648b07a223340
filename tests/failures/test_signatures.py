"""Every signature explains what it was made for, and nothing else; no text takes it long."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.failures.catalogue import MOST, End, Phrase, Signature, explain, signatures
from dtrain.failures.cause import Failure
from dtrain.spec.clusterfile import CLUSTER_FILE

SAMPLES: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("samples.yaml").read_text(encoding="utf-8")
)
CASES = [
    pytest.param(kind, sample, id=f"{kind}-{number}")
    for kind, samples in SAMPLES.items()
    for number, sample in enumerate(samples)
]
KNOWN = {signature.id: signature for signature in signatures()}


def end(sample: dict[str, Any]) -> End:
    return End(
        code=sample.get("code", 1),
        signal=sample.get("signal") or by_status(sample.get("code", 1)),
        out_of_memory=sample.get("out_of_memory", False),
        output=sample["said"],
    )


def by_status(code: int | None) -> str | None:
    return Failure("n0", "worker", 0, 0, 0.0, code=code).ended_by


def test_ids_are_unique_and_all_have_samples() -> None:
    assert [each for each, count in Counter(s.id for s in signatures()).items() if count > 1] == []
    assert set(SAMPLES) == {*KNOWN, "unknown"}


def test_every_sample_has_its_source() -> None:
    assert all(sample["source"] for samples in SAMPLES.values() for sample in samples)


@pytest.mark.parametrize(("kind", "sample"), CASES)
def test_a_sample_is_explained_by_its_signature(kind: str, sample: dict[str, Any]) -> None:
    found = explain(end(sample))
    assert (found.id if found is not None else "unknown") == kind


@pytest.mark.parametrize(("kind", "sample"), CASES)
def test_no_other_signature_fits_a_sample(kind: str, sample: dict[str, Any]) -> None:
    """The confusion table: what fits besides the right one is written down in the sample."""
    this = end(sample)
    fitting = {each.id for each in signatures() if each.fits(this, this.output)}
    assert fitting - {kind} == set(sample.get("also", ()))


@pytest.mark.parametrize("signature", signatures(), ids=lambda signature: signature.id)
def test_every_phrase_signal_and_status_is_in_a_sample(signature: Signature) -> None:
    ends = [end(sample) for sample in SAMPLES[signature.id]]
    texts = [each.output for each in ends]
    for phrase in signature.says:
        assert any(phrase.occurs_in(text) for text in texts), vars(phrase)
    if len(signature.signals) == 1:
        assert all(each.signal in signature.signals for each in ends)


@pytest.mark.parametrize("signature", signatures(), ids=lambda signature: signature.id)
def test_details_are_found_and_named(signature: Signature) -> None:
    if signature.details is None:
        assert not signature.precisely
        return
    descriptions = {signature.describe(sample["said"]) for sample in SAMPLES[signature.id]}
    assert descriptions - {signature.what}, "no sample has the details"
    assert not any("{" in each or "None" in each for each in descriptions)
    names = set(re.findall(r"\{(\w+)\}", signature.precisely))
    assert names == set(signature.details.groupindex)


@pytest.mark.parametrize(
    ("kind", "sample"), [case for case in CASES if "precisely" in case.values[1]]
)
def test_a_sample_is_described_precisely(kind: str, sample: dict[str, Any]) -> None:
    assert KNOWN[kind].describe(sample["said"]) == sample["precisely"]


def test_figures_come_from_what_was_said() -> None:
    found = explain(end(SAMPLES["cuda-out-of-memory"][0]))
    assert found is not None
    assert found.what == (
        "GPU 0 had 11.06 MiB free of 23.65 GiB, and the script asked for 22.00 MiB more"
    )


@pytest.mark.parametrize("signature", signatures(), ids=lambda signature: signature.id)
def test_words(signature: Signature) -> None:
    """Clauses, as hints are; the keys that remedies name exist."""
    for text in (signature.what, signature.remedy):
        assert text
        assert not text.endswith(".")
        assert "\n" not in text
    record = CLUSTER_FILE.json_schema()
    for path in re.findall(r"`((?:cluster|job)\.[\w.]+)", signature.remedy):
        here = record
        for key in path.split("."):
            here = resolved(here, key)


def resolved(schema: Any, key: str) -> Any:
    if key in schema.get("properties", {}):
        return schema["properties"][key]
    assert isinstance(schema.get("additionalProperties"), dict), f"no key {key}"
    return schema["additionalProperties"]


def test_patterns_cannot_backtrack_without_end() -> None:
    """Only bounded repetition, and none of it nested."""
    for signature in signatures():
        if signature.details is None:
            continue
        bare = re.sub(r"\\.|\[[^\]]*\]", "x", signature.details.pattern)
        assert not re.search(r"[*+]|\{\d+,\}", bare), signature.id
        assert not re.search(r"\)[{?]", bare.replace(")?", ")", 1)), signature.id


# Texts that make naive matching slow.
HOSTILE: list[Callable[[int], str]] = [
    lambda size: "a" * size,
    lambda size: "\n" * size,
    lambda size: "Timed out waiting " * (size // 18),
    lambda size: "Timed out waiting\n" * (size // 18),
    lambda size: "DataLoader worker (pid " * (size // 23),
    lambda size: "WorkNCCL(SeqNum=1, OpType=A, " * (size // 29),
    lambda size: "Tried to allocate 1 GiB. GPU 0 has a total " * (size // 43),
    lambda size: "Connectio" * (size // 9),
    lambda size: ("ncclSocketInit: connecting to address " * 99 + "\n") * (size // 3763),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_time_grows_with_the_length_and_no_faster(text: Callable[[int], str]) -> None:
    def seconds(size: int) -> float:
        this, output = End(code=1), text(size)
        started = time.process_time()
        for signature in signatures():
            signature.fits(this, output)
            signature.describe(output)
        return time.process_time() - started

    seconds(1 << 12)
    small = min(seconds(1 << 16) for _ in range(3))
    large = min(seconds(1 << 20) for _ in range(2))
    assert large < 16 * 4 * small + 0.05


def test_no_more_than_the_end_of_a_long_text_is_looked_at() -> None:
    early = "MemoryError\n" + "x" * MOST
    assert explain(End(code=1, output=early)) is None
    late = "x" * MOST + "\nMemoryError"
    found = explain(End(code=1, output=late))
    assert found is not None
    assert found.id == "cpu-out-of-memory"


def test_phrases() -> None:
    assert Phrase("a*b").occurs_in("xx a yy b")
    assert not Phrase("a*b").occurs_in("a\nb")
    assert Phrase("a*b").occurs_in("a\na b")
    assert not Phrase("a*b").occurs_in("b a")
    assert Phrase("^a").occurs_in("b\na")
    assert not Phrase("^a").occurs_in("ba")
    assert not Phrase("ab*ba").occurs_in("aba")


def explained(*exceptions: str, link: str) -> str | None:
    output = f"\n\n{link}\n\n".join(exceptions)
    found = explain(End(code=1, output=output))
    return found.id if found is not None else None


HANDLING = "During handling of the above exception, another exception occurred:"
CAUSED = "The above exception was the direct cause of the following exception:"
BUS = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error."
GENERAL = "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly"
MISSING = "ModuleNotFoundError: No module named 'flash_attn'"
NAN = "ValueError: loss is NaN at step 50"
ECHO = "RuntimeError: Connection closed by peer [10.0.0.2]:1"


def test_an_exception_counts_more_than_the_one_that_was_being_handled() -> None:
    assert explained(MISSING, NAN, link=HANDLING) == "not-a-number"
    assert explained(MISSING, "ValueError: bad batch", link=HANDLING) == "module-missing"


def test_the_cause_of_an_exception_explains_it() -> None:
    assert explained(BUS, GENERAL, link=CAUSED) == "shared-memory-full"


def test_an_own_fault_counts_more_than_the_echo_that_followed() -> None:
    """As where a `finally` does one more collective after an error."""
    assert explained(NAN, ECHO, link=HANDLING) == "not-a-number"
    assert explained(ECHO, NAN, link=HANDLING) == "not-a-number"
    assert explained(ECHO, "ValueError: bad batch", link=HANDLING) == "peer-closed"
