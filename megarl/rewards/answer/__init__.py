"""The answer in a text, and how people write numbers, units, formulas and orders."""
