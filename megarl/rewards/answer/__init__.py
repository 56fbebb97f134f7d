"""The answer in a response of any subject (``grammar``); and notations of numbers, units, formulas and orders."""
