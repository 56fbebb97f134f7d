"""Code that runs in the sandbox, by an interpreter that may be another one (Python 3.9 or later): standard library
only.

``launcher`` is process 1 and runs the program or the checks; ``answer`` is with the program, ``checker`` with the
tests; ``values`` is how the two of them, and the outside, write down what a function returned.
"""
