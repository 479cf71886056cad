"""The independent witness: the whole model in plain torch, without cache, paging or serving code.

``oracle.model`` is the forward (differentiable, tiers N0 to N2), ``oracle.checkpoint`` reads the released layout with its
own code. ``train`` differentiates this very forward; tests and ``flashstep check`` compare the engine with it.
"""
