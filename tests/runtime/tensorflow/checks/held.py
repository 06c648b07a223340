"""A recipe that waits for a file once it has printed a text, as its chief does in a certain step.

held.py TEXT FILE MODULE OPTIONS    MODULE is a recipe of scripts/recipes/: classify_text, say
"""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

TEXT, FILE = sys.argv.pop(1), Path(sys.argv.pop(1))


def print_and_wait(*words: object, **options: Any) -> None:
    print(*words, **options)
    while TEXT in str(words[0]) and not FILE.exists():
        time.sleep(0.02)


training: Any = importlib.import_module(sys.argv.pop(1))
training.print = print_and_wait
training.main()
