"""Exam of silent failures: known faults, put into small jobs one at a time, and the alarm that must name each.

Code here patches the other packages in processes of its own; no other package imports it.
"""

FACE = ("command",)
"""Modules that other packages may import."""
