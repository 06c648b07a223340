"""``job.sync.exclude``: paths of the working folder that are not sent, as gitignore patterns.

As in git, a pattern cannot re-include a file inside an excluded folder: the folder is never read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtrain.diagnostics import UsageError


class Exclusion:
    """One list of patterns. The last matching pattern decides."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises UsageError for a pattern that is invalid in git."""
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
        self._spec = GitIgnoreSpec.from_lines(patterns)

    def covers(self, path: str, *, folder: bool) -> bool:
        """Whether ``path`` (relative, with ``/`` between names) is excluded.

        The caller has checked its parents, and none of them is excluded.
        """
        return self._spec.match_file(f"{path}/" if folder else path)
