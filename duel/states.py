"""The states of a run or a row."""

QUEUED, RUNNING = "queued", "running"
FINISHED, FAILED, CANCELLED, LOST, SKIPPED = "finished", "failed", "cancelled", "lost", "skipped"
STATES = (QUEUED, RUNNING, FINISHED, FAILED, CANCELLED, LOST, SKIPPED)
TERMINAL = frozenset((FINISHED, FAILED, CANCELLED, LOST, SKIPPED))
