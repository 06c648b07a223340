"""Train the images recipe under every strategy of one host, one after the other in one process,
and leave each one's losses in STRATEGY-LOOP.json."""

import os
import sys

import classify_images

LOOPS = sys.argv[1:]

for strategy in ("one_device", "mirrored", "central_storage", "model_parallel"):
    for loop in LOOPS:
        os.environ["DTRAIN_STRATEGY"] = strategy
        options = ["--loop", loop, "--steps", "25", "--losses", f"{strategy}-{loop}.json"]
        sys.argv = ["classify_images.py", "--cpus", "2", *options]
        classify_images.main()
