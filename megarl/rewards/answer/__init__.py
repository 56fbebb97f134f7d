"""The answer in a response of any subject (``grammar``); how people write numbers, units, formulas and orders."""
