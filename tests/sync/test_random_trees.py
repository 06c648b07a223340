"""Any folder, edited in any way on both sides: the node shows it exactly, and loses nothing."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtrain.spec.model import Host
from dtrain.transport.local import LocalTransport
from support.synced import Folders, contents, write

# Few names, so that files, folders, links and outputs meet each other.
NAMES = st.sampled_from(["a", "b", "c\n", "-d", "\u00e9"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CONTENT = st.sampled_from(["", "1", "22", "x" * 5000])
EDIT = st.one_of(
    st.tuples(st.just("write"), PATHS, CONTENT),
    st.tuples(st.just("program"), PATHS, CONTENT),
    st.tuples(st.just("folder"), PATHS, CONTENT),
    st.tuples(st.just("delete"), PATHS, CONTENT),
    st.tuples(st.just("link"), PATHS, CONTENT),
)
OUTPUTS = st.dictionaries(st.sampled_from(["out/1", "out/2", "a/out", "b/x/out", "log"]), CONTENT)
ROUND = st.tuples(st.lists(EDIT, max_size=6), OUTPUTS)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(st.lists(ROUND, min_size=1, max_size=4))
def test_any_folder(rounds: list[tuple[list[tuple[str, str, str]], dict[str, str]]]) -> None:
    top = Path(tempfile.mkdtemp())
    host = Host(name="gpu01", address="gpu01", transport="local")
    connection = LocalTransport().connect(host)
    try:
        folders = Folders(top / "source", top / "gpt", connection)
        folders.source.mkdir()
        written: set[str] = set()
        for number, (edits, outputs) in enumerate(rounds):
            for edit in edits:
                _apply(folders.source, *edit)
            result = folders.sync(unused=-1)
            root = Path(result.tree_path)
            assert folders.workdir.resolve() == root
            shown, sent = contents(root), contents(folders.source)
            assert {path: shown[path] for path in sent} == sent
            modes = {path: _executable(folders.source / path.decode()) for path in sent}
            assert modes == {path: _executable(root / path.decode()) for path in sent}
            for output in written:
                assert output in _everything(folders.container), output
            # What is neither sent nor an output has gone.
            for path, content in shown.items():
                is_output = isinstance(content, bytes) and content.decode() in written
                assert path in sent or content is None or is_output, path
            for path, content in outputs.items():
                unique = f"output {number} {path} {content}"
                try:
                    write(root / path, unique)
                except (NotADirectoryError, IsADirectoryError, FileExistsError):
                    continue
                except OSError:
                    continue  # A loop of links.
                # An output over an output replaces it; a link may lead anywhere in the tree.
                written = {output for output in written if output in _everything(folders.container)}
                written.add(unique)
    finally:
        connection.close()
        shutil.rmtree(top)


def _apply(source: Path, what: str, name: str, content: str) -> None:
    path = source / name
    try:
        if what == "delete":
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        elif what == "folder":
            path.mkdir(parents=True)
        elif what == "link":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to("b")
        else:
            write(path, content)
            path.chmod(0o755 if what == "program" else 0o644)
    except OSError:
        pass  # The edit does not apply here.


def _executable(path: Path) -> bool:
    return path.is_file() and bool(path.stat().st_mode & 0o100)


def _everything(container: Path) -> set[str]:
    """Contents of all files in all snapshots."""
    return {
        content.decode() for content in contents(container).values() if isinstance(content, bytes)
    }
