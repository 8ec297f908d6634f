"""An independent, slow statement of what every policy does to a model: the truth of the tests.

The stock DynamicCache keeps every token. One dense attention function hides exactly the evicted
(layer, KV head, token) triples behind an explicit mask, in float64, and the policies are written
out again from their formulas on explicit probability matrices: no kernel, no page, no batch.
Nothing of sparsekv is used but the hyper-parameters that a policy object carries.

    types, attention      what is passed around; softmax over what is kept, RoPE, rounding
    plans, pyramid, duo   budgets: integer arithmetic
    votes ... values      statistics of keys: one file an idea, plain tensors in and out
    scores                policy name -> ranking of the keys of a layer
    cuts, heads, critical which keys a ranking keeps: per head, pooled over heads, in two stages
    state                 scores that live on from step to step
    evictor               `Reference`: a model under a policy, fed token by token or in chunks
    kvzip, pruned         drivers of their own: extra passes, hidden states that are dropped

One row, no padding. `test_goldens.py` proves these functions before they prove anything else.
"""

from reference.evictor import Reference

__all__ = ["Reference"]
