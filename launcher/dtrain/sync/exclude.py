"""``job.sync.exclude``: which paths of the working folder are not sent, with gitignore's patterns.

As in git, a file inside an excluded folder cannot be included again: the folder is never read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pathspec import GitIgnoreSpec

from dtrain.diagnostics import UsageError


class Exclusion:
    """Answers for one list of patterns; the last pattern that matches decides."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises UsageError for a pattern that git would not understand."""
        for pattern in patterns:
            try:
                GitIgnoreSpec.from_lines([pattern])
            except (ValueError, re.error):
                raise UsageError(
                    f"job.sync.exclude: {pattern!r} is not a pattern",
                    hint="write patterns as in .gitignore, such as '*.pt', 'data/' or '/top'",
                ) from None
        self._spec = GitIgnoreSpec.from_lines(patterns)

    def covers(self, path: str, *, folder: bool) -> bool:
        """Whether ``path`` (relative, with ``/`` between names) is excluded.

        Its parents must be included: a caller that walks the tree asks about them first.
        """
        return self._spec.match_file(f"{path}/" if folder else path)
