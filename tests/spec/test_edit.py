"""Writing a layout into a cluster file changes only the requested keys."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtrain.diagnostics import InternalError, SpecError, UsageError
from dtrain.launchplan.build import build
from dtrain.runtime.layout import Layout, Training
from dtrain.spec.edit import new_file, write_layout
from dtrain.spec.load import parse
from dtrain.spec.model import ClusterFile, Expected

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"

LAYOUT = {
    "tensor": 2,
    "pipeline": 2,
    "data": 2,
    "sharding": "full",
    "micro_batch": 1,
    "grad_accumulation": 4,
}
TRAINING = {"global_batch": 8, "precision": "bf16"}
CLUSTER = "cluster: {hosts: [a, b], gpus: 4}\n"
FLOW = ", ".join(f"{key}: {value}" for key, value in LAYOUT.items())


def keys(**others: object) -> dict[str, object]:
    return {"strategy": "3d", "layout": LAYOUT, "training": TRAINING, "expected": {}, **others}


def written(text: str, **training: object) -> str:
    return write_layout(text, keys(training={**TRAINING, **training}), file="x.yaml")


def refusal(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        written(text)
    assert caught.value.message.startswith("x.yaml: ")
    return caught.value


def test_block_style_keeps_comments_quotes_and_order() -> None:
    before = (
        CLUSTER
        + """\
# the job
job:
    layout:   # by hand

        # how layers are split
        micro_batch: 4      # fits
        tensor: 8           # within a host
        'sharding': "none"  # for now
        expert: 1           # goes, with its line

        # the rest
        recompute: none
    strategy: 'fsdp'        # quoted
    script: "train.py"
    framework: torch
    training:
        seq_len: 2048       # kept
        global_batch: 64    # tokens: 131072
    # the end
"""
    )
    assert (
        written(before)
        == CLUSTER
        + """\
# the job
job:
    layout:   # by hand

        # how layers are split
        micro_batch: 1      # fits
        grad_accumulation: 4
        tensor: 2           # within a host
        pipeline: 2
        data: 2
        'sharding': "full"  # for now

        # the rest
    strategy: '3d'        # quoted
    script: "train.py"
    framework: torch
    training:
        seq_len: 2048       # kept
        global_batch: 8    # tokens: 131072
        precision: bf16
    # the end
"""
    )


def test_new_keys_are_inserted_in_schema_order() -> None:
    before = (
        CLUSTER
        + """\
job:
  framework: torch   # or tensorflow
  script: train.py
  env:
    A: 1
    # B: 2

  # not yet acted on
  restart: {max: 3}
"""
    )
    assert (
        written(before)
        == CLUSTER
        + f"""\
job:
  framework: torch   # or tensorflow
  strategy: 3d
  script: train.py
  env:
    A: 1
    # B: 2
  layout: {{{FLOW}}}
  training: {{global_batch: 8, precision: bf16}}

  # not yet acted on
  restart: {{max: 3}}
"""
    )


def test_a_long_section_has_a_line_for_each_key() -> None:
    layout = {**LAYOUT, "recompute": "selective", "sequence_parallel": True, "offload": False}
    before = CLUSTER + "job:\n   framework: torch\n   script: t.py\n   grace: 5\n"
    text = write_layout(before, keys(layout=layout))
    assert "   layout:\n      tensor: 2\n      pipeline: 2\n" in text
    assert "      sequence_parallel: true\n      offload: false\n   training: {" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ", layout: {%s}, training: {%s}"),
        (", layout: {}, training: {}", ", layout: {%s}, training: {%s}"),
        (", layout: , training:", ", layout: {%s}, training: {%s}"),
        (", layout: {tensor: 8}, training: {seq_len: 5}", ", layout: {%s}, training: {%s, seq: 5}"),
        (", layout: {offload: false}", ", layout: {%s}, training: {%s}"),
        (", layout: {offload: false, data: 8, expert: 1, }", ", layout: {%s}, training: {%s}"),
    ],
)
def test_flow_style_stays_on_its_line(before: str, after: str) -> None:
    text = written(CLUSTER + f"job: {{framework: torch, script: t.py{before}}}  # all of it")
    assert text.count("\n") == 1
    assert text.endswith("}  # all of it")
    spec = parse(text, "x.yaml")
    assert spec.job.layout == Layout(**LAYOUT)
    assert spec.job.training == Training(8, "bf16", 5 if "seq" in after else None)
    if before in ("", ", layout: {}, training: {}"):
        inner = after % (FLOW, "global_batch: 8, precision: bf16")
        assert text == (
            CLUSTER + f"job: {{framework: torch, strategy: 3d, script: t.py{inner}}}  # all of it"
        )


def test_flow_style_on_several_lines() -> None:
    before = (
        CLUSTER
        + """\
job: {
  framework: torch, script: train.py,   # two on one line
  layout: {
    tensor: 8,   # t
    # about d
    data: 1,     # d
    sharding: none, expert: 1,
    recompute: full   # r
  },
  grace: 5   # last
}
"""
    )
    assert (
        written(before)
        == CLUSTER
        + """\
job: {
  framework: torch, strategy: 3d, script: train.py,   # two on one line
  layout: {
    tensor: 2,   # t
    pipeline: 2,
    # about d
    data: 2,     # d
    sharding: full, micro_batch: 1, grad_accumulation: 4
  },
  training: {global_batch: 8, precision: bf16},
  grace: 5   # last
}
"""
    )


def test_json_stays_json() -> None:
    import json

    before = """\
{
  "cluster": {"hosts": ["a", "b"], "gpus": 4},
  "job": {
    "framework": "torch",
    "layout": {
      "tensor": 8,
      "expert": 1
    },
    "script": "t.py"
  }
}"""
    text = written(before)
    document = json.loads(text)
    assert document["job"]["layout"] == LAYOUT
    assert document["job"]["training"] == TRAINING
    assert document["job"]["strategy"] == "3d"
    assert '      "tensor": 2,\n      "pipeline": 2,\n' in text
    compact = json.dumps(json.loads(before), separators=(",", ":"))
    assert json.loads(written(compact)) == document


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"], ids=repr)
@pytest.mark.parametrize("final", [True, False], ids=["ends-in-newline", "no-final-newline"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "bom"])
def test_line_endings_and_byte_order_marks(ending: str, final: bool, mark: str) -> None:
    lines = [
        "%YAML 1.1",
        "---",
        "# é 漢字 🚀",
        "name: 'x' # a\ttab",
        *CLUSTER.splitlines(),
        "job:",
    ]
    kept = ["  framework: torch # 🚀", "  script: é.py"]
    before = mark + ending.join([*lines, *kept]) + (ending if final else "")
    lines[3] = before.split(ending)[3]
    text = written(before)
    assert text == mark + ending.join(
        [
            *lines,
            kept[0],
            "  strategy: 3d",
            kept[1],
            f"  layout: {{{FLOW}}}",
            "  training: {global_batch: 8, precision: bf16}",
        ]
    ) + (ending if final else "")


def test_document_markers_and_text_after_them() -> None:
    before = f"--- # start\n{CLUSTER}job:\n  framework: torch\n  script: t.py\n...\n# after\n"
    text = written(before)
    assert text.startswith(f"--- # start\n{CLUSTER}job:\n  framework: torch\n  strategy: 3d\n")
    assert text.endswith("precision: bf16}\n...\n# after\n")


def test_empty_sections_are_filled_in_place() -> None:
    before = (
        CLUSTER
        + """\
job:
  framework: torch
  layout:     # from the planner
  script: t.py
  training:   # what else
    # nothing yet
  grace: 5
"""
    )
    text = written(before)
    assert f"  layout: {{{FLOW}}}     # from the planner\n" in text
    assert "  training: {global_batch: 8, precision: bf16}   # what else\n    # nothing" in text


def test_values_in_odd_styles() -> None:
    before = (
        CLUSTER
        + """\
job:
  framework: torch
  script: t.py
  setup: |+
    echo layout: 5

  layout:
    sharding: >-
      none

    tensor:
      010
    ? data
    : 1   # d
    "recompute": selective
"""
    )
    text = written(before.replace("tensor:\n      010", "tensor:\n      8"))
    spec = parse(text, "x.yaml")
    assert spec.job.layout == Layout(**LAYOUT)
    assert spec.job.setup == ("echo layout: 5\n\n",)
    assert "    ? data\n    : 2   # d\n" in text


def test_an_equal_layout_changes_nothing() -> None:
    for path in [*CONFIGS.glob("*.yaml"), HERE / "every_key.yaml"]:
        text = path.read_text()
        spec = parse(text, path.name)
        # Only the keys of the file, without derived values.
        written_out = yaml.safe_load(text)["job"]
        if "layout" not in written_out:
            continue
        layout = {key: getattr(spec.job.layout, key) for key in written_out["layout"]}
        training = {key: getattr(spec.job.training, key) for key in written_out["training"]}
        expected = written_out.get("expected", {})
        given = keys(
            strategy=spec.job.strategy, layout=layout, training=training, expected=expected
        )
        assert write_layout(text, given) == text


def test_what_a_plan_expects_replaces_the_old_values() -> None:
    before = CLUSTER + "job: {framework: torch, script: t.py}  # mine\n"
    one = {"step_time": 1.5, "memory_gib": 60.25}
    text = write_layout(before, keys(expected=one))
    assert parse(text, "x.yaml").job.expected == Expected(step_time=1.5, memory_gib=60.25)
    text = write_layout(text, keys(expected={"step_time": 2.0}))
    assert parse(text, "x.yaml").job.expected == Expected(step_time=2.0)
    assert text.endswith(", expected: {step_time: 2.0}}  # mine\n")


def test_equal_values_keep_their_spelling() -> None:
    line = "  layout: {tensor: 02, pipeline: +2, data: 2, sharding: 'full',"
    before = CLUSTER + f"job:\n  framework: torch\n  script: t.py\n{line} micro_batch: 1}}\n"
    assert f"{line} micro_batch: 1, grad_accumulation: 4}}\n" in written(before)


def test_a_layout_of_another_cluster_can_be_replaced() -> None:
    text = written(CLUSTER + "job: {framework: torch, script: t.py, layout: {tensor: 64}}")
    assert parse(text, "x.yaml").job.layout == Layout(**LAYOUT)


def test_anchors_without_other_uses() -> None:
    before = (
        CLUSTER
        + """\
job:
  framework: torch
  script: t.py
  env: &env {N: &n 4, M: *n}
  layout: &layout
    tensor: &t 8
    pipeline: &one 1
    data: *one      # as many
    micro_batch: *one
    grad_accumulation: *n
  training: {global_batch: *t, precision: bf16}
"""
    )
    text = written(before)
    spec = parse(text, "x.yaml")
    assert spec.job.layout == Layout(**LAYOUT)
    assert spec.job.training == Training(8, "bf16")
    assert spec.job.env == {"N": "4", "M": "4"}
    assert "  env: &env {N: &n 4, M: *n}\n  layout: &layout\n" in text
    assert "    grad_accumulation: *n\n" in text
    assert "    data: 2      # as many\n" in text


JOB = CLUSTER + "job:\n  framework: torch\n  script: t.py\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            JOB + "  layout: {tensor: &t 8}\n  env: {TP: *t}\n",
            r"job.layout.tensor is used elsewhere too, as *t",
        ),
        (JOB + "  layout: {<<: {tensor: 8}}\n", "job.layout holds a merge ('<<')"),
        (JOB + "  <<: {layout: {tensor: 8}}\n", "job.layout comes from a merge ('<<')"),
        (JOB + "  layout: &l\n", "job.layout has an anchor (&l)"),
        (
            JOB + "  strategy: &s ddp\n  env: {S: *s}\n",
            "job.strategy is used elsewhere too, through *s",
        ),
        (
            JOB + "  layout:\n    ? expert\n    : 1\n    tensor: 8\n",
            "job.layout.expert shares a line with another key",
        ),
        (JOB + "  ? layout\n", "job.layout has no value and no ':' directly after it"),
        (
            JOB.removesuffix("\n") + "\n  setup: |\n    echo",
            "dtrain cannot edit YAML that is written",
        ),
    ],
)
def test_unsafe_edits_are_refused(text: str, reason: str) -> None:
    error = refusal(text)
    assert reason in error.message
    assert error.hint.splitlines() == [
        "write these keys of job by hand:",
        f"  layout: {{{FLOW}}}",
        "  training: {global_batch: 8, precision: bf16}",
        "  strategy: 3d",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "job: 5", "[", "job: {}", CLUSTER, JOB + "  layout: 5\n", JOB + "  layout: {tenso: 5}\n"],
)
def test_existing_problems_are_reported_as_usual(text: str) -> None:
    with pytest.raises(SpecError) as expected:
        parse(text, "x.yaml")
    with pytest.raises(SpecError) as caught:
        written(text)
    assert caught.value.problems == expected.value.problems


def test_a_layout_that_the_file_cannot_launch_is_refused() -> None:
    error = refusal(JOB.replace("gpus: 4", "gpus: 8"))
    assert error.message == (
        "x.yaml: cannot launch this layout: the layout is for 8 workers "
        "(tensor 2 x pipeline 2 x data 2), but the hosts have 16"
    )
    assert "product of tensor" in error.hint


def test_contradictions_elsewhere_are_reported_as_usual() -> None:
    with pytest.raises(SpecError, match="RANK is set by dtrain"):
        written(JOB + "  env: {RANK: 1}\n")


def test_unknown_keys_are_internal_errors() -> None:
    with pytest.raises(InternalError, match=r"job\.layout has no key 'tenso'"):
        write_layout(JOB, keys(layout={"tenso": 8}))


# ---------------------------------------------------------------- random files

COMMENTS = st.sampled_from(
    ["", " # c", "   # é 漢: {x, y} 'q", " # a\ttab", " # layout: {tensor: 1}"]
)
OTHERS = {
    "workdir": ["~/runs", "'it''s'", '"a # b"', "é/漢"],
    "args": ["[--config, gpt.yaml]", "\n    - --lr\n    - 3e-4", "[\n    a,   # first\n    b\n  ]"],
    "setup": ["|\n    ulimit -n 65536\n    # no comment\n", "source ~/env.sh"],
    "env": ["{A: &a 1, B: *a}", "\n    A: 1   # one\n    # B: 2\n    C: '3'"],
    "rendezvous": ["{backend: direct, port: 29500}", ""],
    "grace": ["1m"],
    "restart": ["{max: 3}", "\n    max: 3"],
}
OLD_LAYOUT = {
    "tensor": ["8", "&t 2", "02"],
    "pipeline": ["1", "2"],
    "schedule": ["gpipe"],
    "expert": ["1"],
    "data": ["2", "1"],
    "sharding": ["none", "'hybrid'", '"full"'],
    "micro_batch": ["4"],
    "recompute": ["full", "'none'"],
    "offload": ["false"],
}
OLD_TRAINING = {"seq_len": ["2048"], "global_batch": ["512", "8"], "precision": ["'bf16'", "fp16"]}
LAYOUTS = [
    LAYOUT,
    {**LAYOUT, "sharding": "hybrid", "shard": 2, "offload": False, "recompute": "none"},
    {"data": 8, "sharding": "full", "micro_batch": 1, "grad_accumulation": 1},
    {"tensor": 8, "sequence_parallel": True, "recompute": "selective", "grad_accumulation": 8},
    {
        "pipeline": 4,
        "virtual_pipeline": 2,
        "schedule": "1f1b",
        "context": 2,
        "expert": 2,
        "grad_accumulation": 8,
        "offload": True,
    },
]


@st.composite
def section(draw: st.DrawFn, name: str, keys: dict[str, list[str]]) -> list[tuple[str, bool]]:
    """Lines of a section, each with whether it must stay unchanged."""
    chosen = draw(st.lists(st.sampled_from([*keys]), unique=True, max_size=5))
    items = [(key, draw(st.sampled_from(keys[key]))) for key in chosen]
    comments = [draw(COMMENTS) for _ in range(len(items) + 1)]
    style = draw(st.sampled_from(["block", "flow", "braces"]))
    if style == "flow" or not items:
        inner = ", ".join(f"{key}: {value}" for key, value in items)
        spare = draw(st.sampled_from(["", ","])) if items else ""
        value = f" {{{inner}{spare}}}" if items or draw(st.booleans()) else ""
        return [(f"  {name}:{value}{comments[-1]}", False)]
    if style == "block":
        lines = [(f"  {name}:{comments[-1]}", True)]
        for (key, value), comment in zip(items, comments, strict=False):
            if draw(st.booleans()):
                lines += [("", True), ("      # above " + key, True)]
            lines.append((f"    {key}: {value}{comment}", False))
        return lines
    lines = [(f"  {name}: {{{comments[-1]}", True)]
    for (key, value), comment in zip(items, comments, strict=False):
        comma = "," if key != items[-1][0] or draw(st.booleans()) else ""
        lines.append((f"    {key}: {value}{comma}{comment}", False))
    return [*lines, ("  }", True)]


@st.composite
def files(draw: st.DrawFn) -> tuple[list[tuple[str, bool]], str, bool]:
    """Lines of a cluster file, its line ending, and whether the last line has one."""
    entries: list[list[tuple[str, bool]]] = [
        [("  framework: torch", True)],
        [("  script: t.py", True)],
    ]
    for name in draw(st.lists(st.sampled_from([*OTHERS]), unique=True, max_size=4)):
        value = draw(st.sampled_from(OTHERS[name]))
        text = f"  {name}:{'' if value.startswith(chr(10)) or not value else ' '}{value}"
        entries.append([(line, True) for line in text.split("\n")])
    if draw(st.booleans()):
        entries.append(draw(section("layout", OLD_LAYOUT)))
    if draw(st.booleans()):
        entries.append(draw(section("training", OLD_TRAINING)))
    if draw(st.booleans()):
        name = draw(st.sampled_from(["none", "'3d'", "none # f"]))
        entries.append([(f"  strategy: {name}", False)])
    lines: list[tuple[str, bool]] = [("# é first", True)] if draw(st.booleans()) else []
    cluster = [("cluster:", True), ("  hosts: [a, b]  # two", True), ("  gpus: 4", True)]
    job: list[tuple[str, bool]] = [("job:", True)]
    for entry in draw(st.permutations(entries)):
        if draw(st.booleans()):
            job += [("", True), ("  # 漢 about the next", True)]
        job += entry
    parts = [cluster, job]
    for part in parts if draw(st.booleans()) else reversed(parts):
        lines += part
    return lines, draw(st.sampled_from(["\n", "\r\n"])), draw(st.booleans())


def without_targets(spec: ClusterFile) -> ClusterFile:
    job = replace(spec.job, layout=None, training=None, strategy=None)
    return replace(spec, job=job, warnings=())


@given(files(), st.sampled_from(LAYOUTS), st.sampled_from(["3d", "none"]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_file(
    file: tuple[list[tuple[str, bool]], str, bool],
    layout: dict[str, object],
    strategy: str,
) -> None:
    lines, ending, final = file
    before = ending.join(line for line, _ in lines) + (ending if final else "")
    planned = keys(strategy=strategy, layout=layout)
    try:
        text = write_layout(before, planned)
    except UsageError as error:
        # A block scalar that ends with the file, without a newline, would get one.
        assert not final, error.message
        assert "dtrain cannot edit YAML that is written" in error.message
        return
    after, earlier = parse(text, "x.yaml"), None
    try:
        earlier = parse(before, "x.yaml")
    except SpecError as error:
        assert any("layout" in p.message or "pipeline" in p.message for p in error.problems) or (
            "shard" in str(error) or "batch" in str(error)
        )
    assert after.job.layout == Layout(**layout)  # type: ignore[arg-type]
    assert after.job.training is not None
    assert (after.job.training.global_batch, after.job.training.precision) == (8, "bf16")
    assert after.job.training.seq_len in (None, 2048)
    assert (after.job.training.seq_len == 2048) == ("seq_len: 2048" in before)
    assert after.job.strategy == strategy
    if earlier:
        assert without_targets(after) == without_targets(earlier)
    kept_in_order(lines, text, ending)
    for line, stays in lines:
        key, comment = line.split(":")[0], line[line.find("#") :] if "#" in line else ""
        if not stays and comment and (key.strip() in layout or key.strip() not in OLD_LAYOUT):
            new = next(new for new in text.split(ending) if new.startswith(f"{key}:"))
            assert key.strip() == "strategy" or new.endswith(comment)
    assert text.endswith(ending) == before.endswith(ending)
    assert write_layout(text, planned) == text


def kept_in_order(lines: list[tuple[str, bool]], text: str, ending: str) -> None:
    """Check that all lines to keep are there, and that new lines have only requested keys."""
    result = text.split(ending)
    assert ending == "\r\n" or "\r" not in text
    assert ending == "\n" or text.count("\n") == text.count("\r\n")
    position = 0
    known = ("layout", "training", "strategy", *Layout.__dataclass_fields__)
    known += tuple(Training.__dataclass_fields__)
    for index, (line, stays) in enumerate(lines):
        if not stays:
            continue
        if line.lstrip().startswith(("layout:", "training:")) and line not in result[position:]:
            # A section without a value is filled in its line.
            raise AssertionError(f"{line!r} is missing")
        found = result.index(line, position)
        for new in result[position:found]:
            assert new.strip().startswith(known), (new, index)
        position = found + 1
    for new in result[position:]:
        assert not new or new.strip().startswith(known), new


# ---------------------------------------------------------------------------- a new file


@pytest.mark.parametrize("hosts", [["gpu01"], ["gpu01", "gpu02"], ["a", "10.0.0.7"]])
def test_a_new_file_launches(hosts: list[str]) -> None:
    gpus = 8 // len(hosts)
    text = new_file(hosts, gpus, keys(), gpu="a100-80gb", gbps=1600, file="new.yaml")
    spec = parse(text, "new.yaml")
    assert [host.name for host in spec.cluster.hosts] == hosts
    assert (spec.cluster.hosts[0].gpu, spec.cluster.gbps) == ("a100-80gb", 1600)
    assert (spec.job.layout, spec.job.training) == (Layout(**LAYOUT), Training(8, "bf16"))
    assert build(spec).world_size == 8
    assert text.count("CHANGE") == 3
    assert max(map(len, text.splitlines())) <= 100
    assert write_layout(text, keys()) == text


def test_a_new_file_with_few_values() -> None:
    few = keys(strategy="ddp", layout={"data": 8}, training={})
    text = new_file(["gpu01"], 8, few, gpu="h100", gbps=400)
    assert "training:" not in text
    assert "expected:" not in text
    assert parse(text, "x.yaml").job.layout == Layout(data=8)


def test_a_new_file_that_cannot_be_launched() -> None:
    with pytest.raises(UsageError, match=r"new\.yaml: cannot launch this layout"):
        new_file(["gpu01"], 4, keys(), gpu="h100", gbps=400, file="new.yaml")
