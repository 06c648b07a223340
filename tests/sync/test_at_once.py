"""Several syncs of one workdir at the same time: hosts that share a home, two launches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dtrain.sync import SyncResult
from support.synced import Folders, contents


def test_hosts_that_share_a_home_send_once(folders: Folders) -> None:
    folders.write({f"lib/{n}.py": str(n) * 1000 for n in range(50)})
    tree = folders.scan()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: folders.sync(tree, unused=-1), range(8)))
    assert sorted(result.sent_files for result in results) == [0] * 7 + [50]
    assert len({result.tree_path for result in results}) == 1
    assert contents(folders.workdir) == contents(folders.source)


def test_hosts_with_disks_of_their_own_get_the_same(folders: Folders) -> None:
    folders.write({f"lib/{n}.py": str(n) * 1000 for n in range(50)})
    (folders.source / "big").write_bytes(bytes(range(256)) * 20_000)
    tree = folders.scan()

    def sync(number: int) -> SyncResult:
        mine = Folders(
            folders.source, folders.workdir.with_name(f"host-{number}"), folders.connection
        )
        return mine.sync(tree)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(sync, range(8)))
    wanted = contents(folders.source)
    for result in results:
        assert result.sent_files == 51
        assert contents(Path(result.tree_path)) == wanted


def test_two_launches_each_get_what_they_sent(folders: Folders) -> None:
    trees, wanted = [], []
    for number in range(8):
        source = folders.source / str(number)
        mine = Folders(source, folders.workdir, folders.connection)
        mine.write({"a.py": f"version {number}", f"only-{number}.py": "", "same": "same"})
        trees.append(mine.scan())
        wanted.append(contents(source))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(folders.sync, trees))
    for result, expected in zip(results, wanted, strict=True):
        assert contents(Path(result.tree_path)) == expected
    assert contents(folders.workdir) in wanted
