"""`sparsekv bench`: one registry of cases, one runner, result files, plots and a table.

A case measures one thing in one shape: ours and its peers, interleaved, against the machine's own
ceilings and a target. `registry.py` lists all of them; a file `*_cases.py` holds one group.
"""
