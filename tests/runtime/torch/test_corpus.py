"""The recipe's training data and its held-out data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_gpt import Windows, documents, read

pytestmark = pytest.mark.torch


def test_text_and_rows_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "deep").mkdir()
    rows = [{"text": "third", "id": 1}, {"text": "fourth — é"}]
    (tmp_path / "deep" / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "picture.png").write_bytes(b"\0")
    found = [document.decode() for document in documents(tmp_path)]
    assert found == ["first", "second", "third", "fourth — é"]
    assert list(documents(tmp_path / "b.txt")) == [b"second"]


def test_the_end_of_every_document_is_held_out(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(bytes(range(100)))
    train, held_out = read(tmp_path, 1)
    assert train.text.tolist() == 2 * list(range(95))
    assert held_out.text.tolist() == 2 * list(range(95, 100))


def test_targets_are_one_byte_on() -> None:
    windows = Windows(b"abcdefg", 3)
    assert [[tensor.tolist() for tensor in windows[n]] for n in range(len(windows))] == [
        [list(b"abc"), list(b"bcd")],
        [list(b"def"), list(b"efg")],
    ]


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: no .*\.txt files under"):
        list(documents(tmp_path))
