"""Measurements, one question a file: `python -m experiments.<name>`; results/ holds what they found."""
