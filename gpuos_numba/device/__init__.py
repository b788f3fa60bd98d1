"""The executor's half: bodies that run unchanged on every machine. Never imports `host`."""
