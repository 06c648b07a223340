"""Where the events of a run go: its journal, its observers, and notifications."""
