"""``job.sync.exclude``: paths of the working folder that are not sent, as gitignore patterns.

As in git, a pattern cannot re-include a file inside an excluded folder: the folder is never read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtrain.diagnostics import UsageError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


def exclusion(patterns: Sequence[str]) -> GitIgnoreSpec:
    """Matches paths that are relative; that of a folder ends with ``/``. The last pattern that
    matches decides. The caller has matched the parents of a path, and none is excluded.

    Raises UsageError for a pattern that is invalid in git.
    """
    # Slow to import, and most jobs send no folder.
    from pathspec import GitIgnoreSpec

    for pattern in patterns:
        try:
            GitIgnoreSpec.from_lines([pattern])
        except (ValueError, re.error):
            raise UsageError(
                f"job.sync.exclude: {pattern!r} is not a pattern",
                hint="write patterns as in .gitignore, such as '*.pt', 'data/' or '/top'",
            ) from None
    return GitIgnoreSpec.from_lines(patterns)
