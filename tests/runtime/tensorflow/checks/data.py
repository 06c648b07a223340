"""The recipes' readers, on small data in the formats of CIFAR-10 and IMDb."""

import pickle
import tarfile
from pathlib import Path

import classify_images
import classify_text
import numpy as np

folder = Path("cifar-10-batches-py")
folder.mkdir()
for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
    # One byte for each color plane, by rows: the format puts planes first.
    pixels = np.repeat(np.array([[number, 100, 200]] * 2, np.uint8), 1024, axis=1)
    batch = {b"data": pixels, b"labels": [number, 9]}
    (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
(folder / "batches.meta").write_bytes(b"")
with tarfile.open("cifar-10-python.tar.gz", "w:gz") as archive:
    archive.add(folder)

for path in (Path(), folder, Path("cifar-10-python.tar.gz")):
    data = classify_images.cifar(path)
    assert data.images.shape == (10, 32, 32, 3)
    assert data.images[2, 5, 7].tolist() == [1, 100, 200]
    assert data.labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert data.test_images.shape == (2, 32, 32, 3)
    assert data.test_labels.tolist() == [5, 9]

for part in ("train", "test"):
    for mood, text in (("neg", "bad, Bad film"), ("pos", "good " * 9)):
        where = Path("aclImdb") / part / mood
        where.mkdir(parents=True)
        (where / "0_1.txt").write_text(text)
reviews = classify_text.reviews(Path("aclImdb"), length=6, buckets=1000)
assert reviews.labels.tolist() == reviews.test_labels.tolist() == [0, 1]
bad, comma, again, film, *padding = reviews.texts[0].tolist()
assert bad == again and len({bad, comma, film, 0}) == 4 and padding == [0, 0]
assert len(set(reviews.texts[1])) == 1 and reviews.texts.shape == (2, 6)

passages = classify_text.packages(100, 1000)
assert passages.classes == 8 and set(passages.labels) == set(passages.test_labels) == set(range(8))
for reader, text in (
    (lambda: classify_images.cifar(Path("nothing")), "no such file or folder"),
    (lambda: classify_images.cifar(Path("aclImdb")), "has no data_batch_1"),
    (lambda: classify_text.reviews(Path("nothing"), 6, 1000), "--data needs the folder aclImdb"),
):
    try:
        reader()
    except SystemExit as end:
        assert text in str(end), end
    else:
        raise AssertionError(text)
print("all read")
