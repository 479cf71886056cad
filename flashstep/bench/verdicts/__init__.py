"""The rules of a claim: what a design must have, each broken one as a ``Verdict`` with why and what to do.

One module for each thing that is judged. They take the arms' entries and what was compared and give verdicts, never an
exception. The claim's own words are ``bench.claim``'s.
"""
