"""Operator injection: an expression arrives while the executor serves, an operator that it runs leaves.

    check -> request -> render -> keys (-> compile) -> signing -> store

with postfix for running at once, and audit for what happened. Each module can be read alone; none of them
executes text that a user gave.
"""
