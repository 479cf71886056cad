"""Statistics of measurements: numbers in, p-values and intervals out (scipy and numpy; the ``bench`` extra).

Definitions are those of spec/serving.md E.9. Knows no ledger, no metric and no words of a claim.
"""
