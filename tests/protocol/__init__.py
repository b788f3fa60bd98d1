"""Model checking of the ring protocol: the real bodies, one memory operation at a time."""
