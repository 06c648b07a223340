"""Print the number and the devices of a large embedding's partitions."""

from dtrain.runtime import tensorflow as distributed

keras = distributed.keras()


def main() -> None:
    if distributed.serve():
        return
    run = distributed.init()
    with run.strategy.scope():
        small, large = keras.layers.Dense(4), keras.layers.Embedding(9000, 16)
        small.build((None, 4))
        large.build((None,))
    assert not hasattr(small.kernel, "variables")
    parts = large.embeddings.variables
    where = sorted(part.device.partition("/device")[0] for part in parts)
    print(f"{len(parts)} parts on {', '.join(where)}")


main()
