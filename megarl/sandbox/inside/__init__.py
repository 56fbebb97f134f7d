"""Code that runs in the sandbox, with a possibly different interpreter (Python 3.9 or later) and only the standard
library.

``launcher`` is process 1 and runs the program or the checks; ``answer`` is with the program, ``checker`` with the
tests; ``values`` encodes return values, for both of them and the outside.
"""
