"""Where bodies run: `cpu` on threads, `cuda` on a GPU. `base` says what both give to a body."""
