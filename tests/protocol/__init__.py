"""Model checking of the ring protocol: the real bodies, one memory operation at a time.

`bodies` loads their source, `model` runs them, `threads` are the host's threads around them, `explore` goes
through every interleaving of a scenario of `scenarios`.
"""
