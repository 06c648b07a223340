"""The page of `dtrain plan --html` in a real browser."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest

from dtrain.parallelism.answer import alternatives, explain, units
from dtrain.parallelism.answer.remedies import remedies
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.model.sizes import shape_for_size
from dtrain.parallelism.question import Question
from dtrain_cli.options import as_options
from dtrain_cli.views.layouts_html import page
from support.browser import Browser

pytestmark = pytest.mark.browser

HOSTILE = "</title><script>alert(1)</script> \"'&\x1b[31m<img src=//example.com/x>"
CASES = {
    "fits": (100e9, 64, 1024),
    "nothing fits": (1e12, 16, 64),
    "one gpu": (1e9, 1, 8),
}


def question(case):
    size, gpus, batch = CASES[case]
    table = hardware()
    gpu = table.gpu("a100-80gb")
    return Question(
        shape_for_size(size), table.cluster(gpu, gpus), of_family(gpu.family), batch,
        tokens=2 * 10**12, cluster_source=f"from {HOSTILE}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def answers():
    return {case: question(case).answer() for case in CASES}


@pytest.fixture(scope="module")
def files(answers, tmp_path_factory):
    """The page of each case, as a file."""
    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for case, answer in answers.items():
        paths[case] = folder / f"{case.replace(' ', '-')}.html"
        text = page(answer, count=8, notes=[f"a note: {HOSTILE}"])
        paths[case].write_text(text, encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


# Boxes of visible text: one for each line of HTML and each element of SVG.
BOXES = """
(() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    if (!node.data.trim() || node.parentElement.closest('title, defs')) continue;
    if (!node.parentElement.checkVisibility({contentVisibilityAuto: true})) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width > 1 && box.height > 1)
        found.push({text: node.data.trim().slice(0, 40),
          wide: !!node.parentElement.closest('.wide'),
          left: box.left, top: box.top, right: box.right, bottom: box.bottom});
  }
  return found;
})()
"""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_nothing_overflows_or_overlaps(browser, files, case, width):
    browser.show(files[case], width)
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    boxes = browser.evaluate(BOXES)
    assert len(boxes) > 30
    for box in boxes:
        # A wide table can be scrolled.
        assert box["wide"] or (box["left"] >= 0 and box["right"] <= width), box
    boxes.sort(key=lambda box: box["top"])
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if other["top"] >= box["bottom"]:
                break
            across = min(box["right"], other["right"]) - max(box["left"], other["left"])
            down = min(box["bottom"], other["bottom"]) - other["top"]
            # The line boxes of adjacent lines touch, but their glyphs do not.
            assert across <= 1 or down <= 4, (box, other)
    covered = browser.evaluate("""[...document.querySelectorAll('.label')].filter(one =>
      one.getBoundingClientRect().bottom > one.nextElementSibling.getBoundingClientRect().top)""")
    assert covered == []


@pytest.mark.parametrize("case", CASES)
def test_it_makes_no_requests_and_logs_no_errors(browser, files, case):
    browser.requests.clear()
    browser.console.clear()
    browser.show(files[case], 1000)
    sent = [url for url in browser.requests if not url.startswith(("data:", "about:"))]
    assert sent == [files[case].as_uri()]
    assert browser.console == []
    # Values of a cluster file appear in the page only as text.
    assert browser.evaluate("document.querySelectorAll('script, img, iframe').length") == 0
    assert "<script>alert(1)</script>" in browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.styleSheets[0].cssRules.length") > 30


def test_an_injected_script_does_not_run(browser, files, tmp_path):
    text = files["fits"].read_text("utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("<main>", "<main><script>window.ran = true</script>"))
    browser.show(broken, 1000)
    assert browser.evaluate("window.ran === undefined")
    assert any("Content Security Policy" in line for line in browser.console)


BARS = """
[...document.querySelectorAll('#NAME .bar')].map(svg => {
  const whole = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('[data-value]')].map(part => {
    const box = part.getBoundingClientRect();
    return {value: +part.dataset.value, left: box.left - whole.left, width: box.width,
      title: part.querySelector('title').textContent, fill: getComputedStyle(part).fill};
  });
})
"""


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("case", CASES)
def test_bars_are_as_long_as_their_numbers(browser, files, answers, case, width):
    answer = answers[case]
    shown = answer.shortlist(8) or (answer.best,)
    browser.show(files[case], width)
    for chart, field, parts in (
        ("memory", "memory", explain.MEMORY_PARTS),
        ("time", "time", explain.TIME_PARTS),
    ):
        bars = browser.evaluate(BARS.replace("NAME", chart))
        assert len(bars) == len(shown)
        scale = float(browser.evaluate(f"document.getElementById('{chart}').dataset.scale"))
        full = browser.evaluate(f"document.querySelector('#{chart} .bar').clientWidth")
        assert full > 300
        for candidate, bar in zip(shown, bars, strict=True):
            costs = getattr(candidate, field)
            expected = [
                (title, getattr(costs, name)) for name, title in parts.items()
                if getattr(costs, name) > 0
            ]  # fmt: skip
            before = 0.0
            assert len(bar) == len(expected)
            for part, (title, value) in zip(bar, expected, strict=True):
                assert part["title"].startswith(f"{title}: ")
                assert part["value"] == pytest.approx(value)
                assert part["width"] == pytest.approx(value / scale * full, abs=0.1)
                assert part["left"] == pytest.approx(before / scale * full, abs=0.1)
                before += value
            assert before == pytest.approx(costs.total)


# Matrices for linear RGB that simulate protanopia and deuteranopia (Machado, Oliveira and Fernandes
# 2009, severity 1).
SIGHT = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}


def lab(color, sight):
    """CIELAB of ``#rrggbb``."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [max(0.0, sum(f * c for f, c in zip(row, linear, strict=True))) for row in SIGHT[sight]]
    r, g, b = seen
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_adjacent_colors_in_a_bar_differ(browser, files, dark, sight):
    browser.show(files["fits"], 1000, dark=dark)
    count = max(len(explain.MEMORY_PARTS), len(explain.TIME_PARTS))
    colors = browser.evaluate(
        f"[...Array({count}).keys()].map(number => "
        "getComputedStyle(document.documentElement).getPropertyValue(`--c${number}`).trim())"
    )
    assert len(set(colors)) == count
    seen = [lab(color, sight) for color in colors]
    for first, second in itertools.pairwise(range(count)):
        # Two is just visible between adjacent colors; twelve is far more.
        assert math.dist(seen[first], seen[second]) > 12, (colors[first], colors[second])


def test_a_part_has_the_same_color_in_every_bar(browser, files):
    browser.show(files["fits"], 1000)
    for chart in ("memory", "time"):
        fills = {}
        for bar in browser.evaluate(BARS.replace("NAME", chart)):
            for part in bar:
                fills.setdefault(part["title"].partition(":")[0], set()).add(part["fill"])
        assert all(len(colors) == 1 for colors in fills.values())


def test_the_limit_is_at_its_place(browser, files, answers):
    browser.show(files["nothing fits"], 1000)
    limit = answers["nothing fits"].best.limit
    place = browser.evaluate("""(() => {
      const svg = document.querySelector('#memory .bar');
      const [line, over] = [svg.querySelector('.limit'), svg.querySelector('.hatched')];
      const box = one => one.getBoundingClientRect();
      return {line: box(line).left - box(svg).left, over: box(over).left - box(svg).left,
        end: box(over).right - box(svg).left, whole: svg.clientWidth,
        scale: +document.getElementById('memory').dataset.scale};
    })()""")
    at = limit / place["scale"] * place["whole"]
    assert place["line"] == pytest.approx(at, abs=1.5)
    assert place["over"] == pytest.approx(at, abs=0.1)
    total = answers["nothing fits"].best.memory.total
    assert place["end"] == pytest.approx(total / place["scale"] * place["whole"], abs=0.1)


def test_tables_have_the_numbers_of_the_charts(browser, files, answers):
    browser.show(files["fits"], 1000)
    labels = browser.evaluate(
        "[...document.querySelectorAll('svg.bar')].map(one => "
        "[one.getAttribute('role'), one.getAttribute('aria-label')])"
    )
    best = answers["fits"].best
    assert all(role == "img" and label for role, label in labels)
    assert units.gib(best.memory.total) in labels[0][1]
    assert f"optimizer states {units.gib(best.memory.optimizer)}" in labels[0][1]
    hidden = "[...document.querySelectorAll('svg')].every(one => one.ariaHidden || one.ariaLabel)"
    assert browser.evaluate(hidden)
    sums = browser.evaluate("""[...document.querySelectorAll('#memory table')].map(table =>
      [...table.rows].map(row => [...row.cells].map(cell => cell.textContent)))""")[0]
    assert sums[-1][0] == "total"
    assert float(sums[-1][1]) == pytest.approx(best.memory.total, abs=0.06)
    heads = "[...document.querySelectorAll('th')].every(one => one.scope)"
    assert browser.evaluate(heads)
    levels = "[...document.querySelectorAll('h1, h2')].map(one => one.tagName)"
    assert browser.evaluate(levels)[0] == "H1"
    assert browser.evaluate("document.documentElement.lang") == "en"


# Contrast of text with the page behind it, after WCAG 2.2.
CONTRAST = """
(() => {
  const channels = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = color => {
    const [r, g, b] = channels(color).map(one => one / 255)
      .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll('p, dt, dd, li, td, th, summary, text, b')].map(one => {
    const style = getComputedStyle(one);
    const text = light(one.tagName === 'text' ? style.fill : style.color);
    return (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05);
  });
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(browser, files, dark):
    for case in CASES:
        browser.show(files[case], 1000, dark=dark)
        assert min(browser.evaluate(CONTRAST)) >= 4.5
    black = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", black))) < 64) == dark


def test_it_prints_with_the_numbers(browser, files):
    browser.show(files["fits"], 1000, dark=True, print_=True)
    boxes = browser.evaluate(BOXES)
    assert any(box["text"].startswith("GiB, of each bar") for box in boxes)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert browser.pdf().startswith(b"%PDF-")


def test_the_page_has_the_sentences_of_the_text_output(answers, browser, files):
    for case, answer in answers.items():
        browser.show(files[case], 1000)
        text = " ".join(browser.evaluate("document.body.innerText").split())
        assert explain.headline(answer.best) in text
        assert explain.fullness(answer.best) in text
        for rival in alternatives.rivals(answer):
            assert rival.verdict in text
        for remedy in remedies(answer):
            assert as_options(remedy) in text


def test_every_text_is_escaped(answers):
    """Names from files and users are escaped in elements and attributes. Needs no browser."""
    answer = answers["fits"]
    asked = replace(
        answer.question,
        shape=replace(answer.question.shape, name=HOSTILE),
        batch_source=HOSTILE,
    )
    text = page(replace(answer, question=asked), count=3, notes=[HOSTILE])
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;alert(1)") == 6


def test_a_model_may_have_any_name(browser, tmp_path):
    asked = question("one gpu")
    named = replace(asked, shape=replace(asked.shape, name=HOSTILE)).answer()
    path = tmp_path / "page.html"
    path.write_text(page(named, count=3), encoding="utf-8")
    browser.show(path, 400)
    assert "<script>alert(1)</script>" in browser.evaluate("document.title")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
